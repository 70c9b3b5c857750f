"""The size of a model's parameters, derived from its configuration's dtype or quantisation."""

import re
from collections.abc import Callable
from typing import Final

from vllm_headroom_tools.sizing.config_fields import Config, read_mapping

DTYPE_BYTES: Final = {
    "float32": 4.0,
    "float": 4.0,
    "float16": 2.0,
    "half": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}
"""The bytes per value, by torch's name for the dtype."""

UNNAMED_DTYPE_BYTES: Final = 4.0
"""The bytes per parameter in a checkpoint whose dtype is not given. As in transformers, they are 32
bits.
"""

UNKNOWN_DTYPE_BYTES: Final = 2.0
"""Our choice: the bytes per parameter if its dtype is not in the table."""

BYTE_BITS: Final = 8

GROUP_SCALE_BYTES: Final = 2.5
"""The bytes that 4-bit methods store per group of weights. They are for a 16-bit scale and a 4-bit
zero point (AutoGPTQ, AutoAWQ).
"""

ZERO_POINT_BYTES: Final = 0.5
"""The part of GROUP_SCALE_BYTES that is used for the zero point. Symmetric quantisation has no zero
point.
"""

USUAL_GROUP_WEIGHTS: Final = 128
"""Our choice: the number of weights per group if the configuration does not give it."""

GROUP_OVERHEAD_BYTES: Final = GROUP_SCALE_BYTES / USUAL_GROUP_WEIGHTS

FOUR_BIT_BYTES: Final = 0.5 + GROUP_OVERHEAD_BYTES

MXFP4_GROUP_WEIGHTS: Final = 32

MXFP4_BYTES: Final = 0.5 + 1 / MXFP4_GROUP_WEIGHTS
"""4 bits, plus an 8-bit scale per 32 weights (OCP Microscaling Formats)."""

MXFP8_BYTES: Final = 1.0 + 1 / 32
"""8 bits, plus an 8-bit scale per 32 weights (OCP Microscaling Formats)."""

NVFP4_BYTES: Final = 0.5 + 1 / 16
"""4 bits, plus an 8-bit scale per 16 weights."""

BITSANDBYTES_BYTES: Final = 0.5 + 4 / 64
"""4 bits, plus a 32-bit scale per 64 weights."""

QUANTISED_BYTES: Final = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "ptpc_fp8": 1.0,
    "experts_int8": 1.0,
    "modelopt": 1.0,
    "awq": FOUR_BIT_BYTES,
    "awq_marlin": FOUR_BIT_BYTES,
    "gptq": FOUR_BIT_BYTES,
    "gptq_marlin": FOUR_BIT_BYTES,
    "mxfp4": MXFP4_BYTES,
    "modelopt_fp4": NVFP4_BYTES,
    "modelopt_mxfp8": MXFP8_BYTES,
    "bitsandbytes": BITSANDBYTES_BYTES,
    "fp8_per_tensor": 1.0,
    "fp8_per_block": 1.0,
    "fp8_per_channel": 1.0,
    "int8_per_channel_weight_only": 1.0,
    "mxfp8": MXFP8_BYTES,
    "nvfp4_per_token": NVFP4_BYTES,
}
"""The bytes per parameter of the linear layers, by vLLM's name for the method."""

CHECKPOINT_METHODS: Final = (
    "auto_awq",
    "auto_gptq",
    "compressed-tensors",
    "deepseek_v4_fp8",
    "fp_quant",
    "gguf",
    "gpt_oss_mxfp4",
    "humming",
    "inc",
    "modelopt_mixed",
    "moe_wna16",
    "online",
    "quark",
    "torchao",
)
"""vLLM's other methods (0.19 to 0.33, layers/quantization/__init__.py). For these methods, the
checkpoint's configuration says what is quantised, and to how many bits.
"""

MODELOPT_METHODS: Final = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "FP8_PB_WO": "modelopt",
    "NVFP4": "modelopt_fp4",
    "W4A16_NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
}
"""The method for each ModelOpt algorithm that vLLM 0.32 supports (layers/quantization/modelopt.py).
"""

NUMBER_LIMIT: Final = 2**16
"""Our choice: the highest plausible number of bits, or of weights per group. A larger number is
considered a mistake.
"""

UNQUANTISED_FIELDS: Final = (
    # fp8, AWQ and MXFP4.
    "modules_to_not_convert",
    # Other variants of fp8.
    "ignored_layers",
    # compressed-tensors.
    "ignore",
    # ModelOpt.
    "exclude_modules",
)
"""The fields that list modules that are not quantised; the comments name the methods."""

KV_SCHEME_BYTES: Final = {"fp8": 1.0, "nvfp4": 9 / 16}
"""The bytes per value in the KV cache, by the format of the checkpoint's scales."""


def is_same_method(name: str, quantisation: str | None) -> bool:
    """Return whether a checkpoint uses the method with this name in vLLM.

    For example, awq_marlin matches a checkpoint quantised with AWQ. `quantisation` is None if the
    checkpoint is not quantised.
    """
    if quantisation is None:
        return False
    words = name.replace("-", "_").removeprefix("auto_").removeprefix("gpt_oss_").split("_")
    return quantisation.startswith(words[0]) or name in CHECKPOINT_METHODS


def read_stored_bytes(config: Config) -> float:
    """Return the bytes per parameter in the checkpoint, according to its dtype."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    if isinstance(dtype, dict):
        # Each part of the model may have its own dtype; use the first one.
        dtype = next(iter(dtype.values()), None)
    if dtype is None:
        return UNNAMED_DTYPE_BYTES
    # Some files use torch's full name, such as "torch.bfloat16".
    return DTYPE_BYTES.get(str(dtype).rsplit(".", 1)[-1], UNKNOWN_DTYPE_BYTES)


def read_quantisation(config: Config) -> Config:
    """Return the part of the configuration that describes the quantisation.

    Returns an empty mapping if the model is not quantised.
    """
    return read_mapping(config, "quantization_config", "compression_config")


def read_weight_bytes(config: Config, dtype_bytes: float) -> tuple[float | None, str | None]:
    """Return the bytes per parameter of the linear layers, and the name of the quantisation.

    The bytes are None if the method is unknown. Without quantisation, the name is None and the
    bytes are those of the dtype.
    """
    quantisation = read_quantisation(config)
    if not quantisation:
        return dtype_bytes, None
    algorithm = str(quantisation.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION":
        # Matrices are quantised in different ways; `match_matrix_bytes` provides the bytes for
        # each.
        return None, "modelopt mixed precision"
    method = str(quantisation.get("quant_method") or "unknown").replace("-", "_")
    if method == "modelopt" and algorithm:
        method = MODELOPT_METHODS.get(algorithm, f"modelopt {algorithm}")
    # Some methods give their size in a switch instead of in `bits`.
    if method == "bitsandbytes" and quantisation.get("load_in_8bit"):
        return 1.0, "bitsandbytes 8-bit"
    scheme = _read_weight_scheme(quantisation)
    bits = _pick_number(quantisation.get("bits"), quantisation.get("w_bit"), scheme.get("num_bits"))
    # If the bits are not given, use the method's usual size.
    if bits is None:
        return QUANTISED_BYTES.get(method), method
    name = f"{method} {bits}-bit"
    if bits >= BYTE_BITS:
        return bits / BYTE_BITS, name
    # There are two 4-bit float formats, which differ in the number of weights per scale.
    if scheme.get("type") == "float":
        is_mxfp4 = scheme.get("group_size") == MXFP4_GROUP_WEIGHTS
        return MXFP4_BYTES if is_mxfp4 else NVFP4_BYTES, name
    return bits / BYTE_BITS + _count_group_bytes(quantisation, scheme), name


def _read_weight_scheme(quantisation: Config) -> Config:
    """Return the scheme that quantises the weights of the first group of modules.

    Both compressed-tensors and ModelOpt write such groups. Returns an empty mapping if there are no
    groups.
    """
    groups = quantisation.get("config_groups")
    if not isinstance(groups, dict):
        return {}
    group = next(iter(groups.values()), None)
    return read_mapping(group, "weights") if isinstance(group, dict) else {}


def _count_group_bytes(quantisation: Config, scheme: Config) -> float:
    """Return the bytes that scale and zero point add to each weight in a group."""
    group_weights = _pick_number(quantisation.get("group_size"), scheme.get("group_size"))
    if group_weights is None:
        return GROUP_OVERHEAD_BYTES
    scale_bytes = GROUP_SCALE_BYTES
    if scheme.get("symmetric") is True:
        scale_bytes -= ZERO_POINT_BYTES
    return scale_bytes / group_weights


def _pick_number(*values: object) -> int | None:
    """Return the first value that can be a number of bits or weights.

    Returns None if there is none.
    """
    for value in values:
        if isinstance(value, int) and 1 <= value <= NUMBER_LIMIT:
            return value
    return None


def match_unquantised(config: Config) -> Callable[[str], bool]:
    """Return a function that checks whether the module with a given name is unquantised.

    A name looks like "layers.3.mlp.down_proj". Checkpoints list the names of unquantised modules,
    or of modules that contain them. A listed name is complete, has wildcards, or is a regular
    expression after "re:". A listed name may begin with the name of the model part that contains
    the layers.
    """
    quantisation = read_quantisation(config)
    patterns = []
    for name in _list_unquantised_names(quantisation):
        pattern = _compile_module_pattern(name)
        if pattern is not None:
            patterns.append(pattern)
    # MXFP4 only quantises experts (vLLM 0.32, quantization/mxfp4.py).
    quantises_only_experts = quantisation.get("quant_method") == "mxfp4"

    def is_unquantised(module: str) -> bool:
        if quantises_only_experts and ".experts." not in module:
            return True
        return any(pattern.search(module) for pattern in patterns)

    return is_unquantised


MODULE_LAYER: Final = re.compile(r"layers\.(\d+)\.(.*)", re.DOTALL)
STATE_PROJECTIONS: Final = ("mixer.in_proj", "mixer.out_proj", "linear_attn.")
ATTENTION_PARTS: Final = ("attn", "mixer.q_", "mixer.k_", "mixer.v_", "mixer.o_")


def match_matrix_bytes(config: Config) -> Callable[[str], float | None] | None:
    """Return a function that maps a matrix's name to its bytes per parameter.

    That function returns None for a matrix that is not quantised. Returns None if all quantised
    matrices use the same method. ModelOpt lists the method of each module in `quantized_layers`.
    The list uses the checkpoint's names, so only the layer and the part are compared. DeepSeek V4
    has 4-bit experts in an 8-bit checkpoint.
    """
    quantisation = read_quantisation(config)
    listed = quantisation.get("quantized_layers")
    other_bytes = None
    if quantisation.get("quant_method") == "fp8":
        other_bytes = QUANTISED_BYTES["fp8"]
    bytes_by_part: dict[tuple[str, str], float] = {}
    if isinstance(listed, dict):
        for name, scheme in listed.items():
            algorithm = str(scheme.get("quant_algo") if isinstance(scheme, dict) else scheme)
            method = MODELOPT_METHODS.get(algorithm.upper())
            # If a part's method is unknown, `other_bytes` is used for the part.
            part = _find_part(str(name))
            if method is not None and part is not None:
                bytes_by_part[part] = QUANTISED_BYTES[method]
    elif config.get("expert_dtype") != "fp4":
        return None

    def read_matrix_bytes(name: str) -> float | None:
        """Return a matrix's bytes per weight, or None if the format is unknown."""
        part = _find_part(name)
        if part is not None and part in bytes_by_part:
            return bytes_by_part[part]
        # Without a list, only the model's experts use 4 bits.
        if part is not None and part[1] == "experts" and not bytes_by_part:
            return MXFP4_BYTES
        return other_bytes

    return read_matrix_bytes


def read_head_bytes(config: Config) -> float | None:
    """Return the bytes per parameter of the output matrix if it is quantised, otherwise None."""
    listed = read_quantisation(config).get("quantized_layers")
    scheme = listed.get("lm_head") if isinstance(listed, dict) else None
    if not isinstance(scheme, dict):
        return None
    method = MODELOPT_METHODS.get(str(scheme.get("quant_algo")).upper())
    return None if method is None else QUANTISED_BYTES[method]


def _find_part(name: str) -> tuple[str, str] | None:
    """Return the layer and part that a module's name contains.

    Returns None if the module is in no layer.
    """
    match = MODULE_LAYER.search(name)
    if match is None:
        return None
    # The order matters, because "shared_expert" contains "expert".
    layer = match[1]
    module = match[2]
    if "shared_expert" in module:
        return layer, "shared experts"
    if "experts" in module:
        return layer, "experts"
    if module.startswith(STATE_PROJECTIONS):
        return layer, "state"
    if any(part in module for part in ATTENTION_PARTS):
        return layer, "attention"
    return layer, "mlp"


def _list_unquantised_names(quantisation: Config) -> list[str]:
    """Return the names in the first field that lists modules.

    Returns an empty list if no field does.
    """
    for field in UNQUANTISED_FIELDS:
        names = quantisation.get(field)
        if isinstance(names, list):
            return [name for name in names if isinstance(name, str)]
    return []


def _compile_module_pattern(name: str) -> re.Pattern[str] | None:
    """Return a pattern that matches modules with this name, or None if it is invalid."""
    if name.startswith("re:"):
        # The names used here begin at the layers, without the model part. Therefore, "^" would not
        # match.
        expression = name.removeprefix("re:").removeprefix("^")
        try:
            return re.compile(expression)
        except re.error:
            return None
    layer_name = name[max(0, name.find("layers.")) :]
    wildcard = re.escape(layer_name).replace(r"\*", ".*")
    return re.compile(rf"(?:^|\.){wildcard}(?:\.|$)")


def read_kv_dtype_bytes(config: Config, dtype_bytes: float) -> float:
    """Return the bytes per value in the KV cache with `--kv-cache-dtype auto`.

    The result is the bytes of the model's dtype. If the checkpoint has scales for FP8 or NVFP4, the
    result is the bytes of that format. llm-compressor checkpoints name the format in
    `kv_cache_scheme`. ModelOpt checkpoints may also name it in `kv_cache_quant_algo`. The sources
    are vLLM 0.32, model_executor/layers/attention/attention.py, and utils/torch_utils.py,
    `get_kv_cache_quant_algo_string`.
    """
    quantisation = read_quantisation(config)
    scheme = quantisation.get("kv_cache_scheme") or quantisation.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        scheme = "fp8" if scheme.get("num_bits") == BYTE_BITS else "nvfp4"
    return KV_SCHEME_BYTES.get(str(scheme).lower(), dtype_bytes)
