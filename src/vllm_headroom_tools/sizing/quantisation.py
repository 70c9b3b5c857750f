"""What a parameter of a model weighs: from its configuration's dtype or quantisation."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from vllm_headroom_tools.sizing.layers import Config, read_part

DTYPE_BYTES: Final = {
    "float32": 4.0,
    "float": 4.0,
    "float16": 2.0,
    "half": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}

SCALE_BYTES: Final = 2.5
"""Four-bit methods keep a 16-bit scale and a 4-bit zero point for each group of weights (AutoGPTQ, AutoAWQ)."""

GROUP_OVERHEAD_BYTES: Final = SCALE_BYTES / 128
LARGEST_GROUP: Final = 2**16

FOUR_BITS: Final = 0.5 + GROUP_OVERHEAD_BYTES
MXFP4: Final = 0.5 + 1 / 32
"""An 8-bit scale for each 32 weights (OCP Microscaling Formats)."""

NVFP4: Final = 0.5 + 1 / 16
QUANTISED_BYTES: Final = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "ptpc_fp8": 1.0,
    "experts_int8": 1.0,
    "modelopt": 1.0,
    "awq": FOUR_BITS,
    "awq_marlin": FOUR_BITS,
    "gptq": FOUR_BITS,
    "gptq_marlin": FOUR_BITS,
    "mxfp4": MXFP4,
    "modelopt_fp4": NVFP4,
    "modelopt_mxfp8": 1.0 + 1 / 32,
    "bitsandbytes": 0.5 + 4 / 64,  # a 32-bit scale for each 64 weights
}
"""Bytes of a parameter of the linear layers, by vLLM's name of the method."""

MODELOPT: Final = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "FP8_PB_WO": "modelopt",
    "NVFP4": "modelopt_fp4",
    "W4A16_NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
}
"""The method of each of ModelOpt's algorithms that vLLM 0.32 serves (layers/quantization/modelopt.py)."""

BYTE: Final = 8

LEFT_OUT: Final = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""What fp8, AWQ and MXFP4, other ways of fp8, compressed-tensors, and ModelOpt call the modules they leave alone."""


def read_stored_bytes(config: Config) -> float:
    """Return the bytes of a parameter in the checkpoint: without a dtype it is in 32 bits (transformers' default)."""
    name = config.get("dtype") or config.get("torch_dtype")
    if isinstance(name, dict):  # one for each part of the model
        name = next(iter(name.values()), None)
    return DTYPE_BYTES.get(str(name).rsplit(".", 1)[-1], 4.0 if name is None else 2.0)


def read_weight_bytes(config: Config, dtype_bytes: float) -> tuple[float | None, str | None]:
    """Return bytes per parameter of the linear layers (None: not known) and the quantisation (None: none)."""
    found = read_part(config, "quantization_config", "compression_config")
    if not found:
        return dtype_bytes, None
    algorithm = str(found.get("quant_algo") or "").upper()
    method = str(found.get("quant_method") or "unknown").replace("-", "_")
    if algorithm == "MIXED_PRECISION":  # its modules differ: its bytes are those of its files
        return None, "mixed precision"
    if method == "modelopt" and algorithm:
        method = MODELOPT.get(algorithm, f"modelopt {algorithm}")
    if method == "bitsandbytes" and found.get("load_in_8bit"):
        return 1.0, "bitsandbytes 8-bit"
    groups = found.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = (
        read_part(first, "weights") if isinstance(first, dict) else {}
    )  # compressed-tensors', ModelOpt's
    bits = _find_first((found.get("bits"), found.get("w_bit"), weights.get("num_bits")))
    if bits is not None and weights.get("type") == "float" and bits < BYTE:
        return NVFP4, f"{method} {bits}-bit"
    if bits is not None:
        group = _find_first((found.get("group_size"), weights.get("group_size")))
        scale = SCALE_BYTES - (0.5 if weights.get("symmetric") is True else 0.0)
        overhead = scale / group if group else GROUP_OVERHEAD_BYTES
        return bits / BYTE + (overhead if bits < BYTE else 0.0), f"{method} {bits}-bit"
    return QUANTISED_BYTES.get(method), method


def match_plain(config: Config) -> Callable[[str], bool]:
    """Return whether a module, by its name such as "layers.3.mlp.down_proj", is left out of the quantisation.

    Checkpoints name such modules, or what they are in, in full, with wildcards, or by an expression after "re:", and
    may name the part of the model that the layers are in too.
    """
    found = read_part(config, "quantization_config", "compression_config")
    names: list[object] = next(
        (found[name] for name in LEFT_OUT if isinstance(found.get(name), list)), []
    )
    expressions = []
    for name in names:
        if isinstance(name, str) and name.startswith("re:"):
            with suppress(re.error):
                expressions.append(re.compile(name.removeprefix("re:").removeprefix("^")))
        elif isinstance(name, str):
            inside = name[max(0, name.find("layers.")) :]
            wild = re.escape(inside).replace(r"\*", ".*")
            expressions.append(re.compile(rf"(?:^|\.){wild}(?:\.|$)"))
    only_experts = (
        found.get("quant_method") == "mxfp4"
    )  # nothing else is (vLLM 0.32, quantization/mxfp4.py)
    return lambda module: (
        (only_experts and ".experts." not in module)
        or any(each.search(module) for each in expressions)
    )


def read_kv_dtype_bytes(config: Config, dtype_bytes: float) -> float:
    """Return the bytes of a value in the KV cache with `--kv-cache-dtype auto`.

    That is the model's dtype, or FP8 where the checkpoint brings scales for it, which llm-compressor's say by
    `kv_cache_scheme` and ModelOpt's also by `kv_cache_quant_algo` (vLLM 0.32, model_executor/layers/attention/
    attention.py and utils/torch_utils.py, `get_kv_cache_quant_algo_string`).
    """
    found = read_part(config, "quantization_config", "compression_config")
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        scheme = "fp8" if scheme.get("num_bits") == BYTE else "nvfp4"
    return {"fp8": 1.0, "nvfp4": 9 / 16}.get(str(scheme).lower(), dtype_bytes)


def _find_first(named: tuple[object, ...]) -> int | None:
    return next(
        (value for value in named if isinstance(value, int) and 1 <= value <= LARGEST_GROUP), None
    )
