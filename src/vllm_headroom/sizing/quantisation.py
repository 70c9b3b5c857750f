"""What a parameter of a model weighs: from its configuration's dtype or quantisation."""

from __future__ import annotations

from typing import Final

from vllm_headroom.sizing.fields import Config, part

DTYPE_BYTES: Final = {
    "float32": 4.0,
    "float": 4.0,
    "float16": 2.0,
    "half": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}

GROUP_OVERHEAD_BYTES: Final = 2.5 / 128
"""Four-bit methods keep a 16-bit scale and a 4-bit zero point for each group of 128 weights (AutoGPTQ, AutoAWQ)."""

FOUR_BITS: Final = 0.5 + GROUP_OVERHEAD_BYTES
MXFP4: Final = 0.5 + 1 / 32
"""An 8-bit scale for each 32 weights (OCP Microscaling Formats)."""

NVFP4: Final = 0.5 + 1 / 16
BITSANDBYTES: Final = 0.5 + 4 / 64
"""A 32-bit scale for each 64 weights."""

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
    "bitsandbytes": BITSANDBYTES,
}
"""Bytes of a parameter of the linear layers, by vLLM's name of the method."""

BYTE: Final = 8


def stored_bytes(config: Config) -> float:
    """Return the bytes of a parameter in the checkpoint: without a dtype it is in 32 bits (transformers' default)."""
    name = config.get("dtype") or config.get("torch_dtype")
    if isinstance(name, dict):  # one for each part of the model
        name = next(iter(name.values()), None)
    return DTYPE_BYTES.get(str(name).rsplit(".", 1)[-1], 4.0 if name is None else 2.0)


def weight_bytes_per_parameter(config: Config, dtype_bytes: float) -> tuple[float, str | None]:
    """Return bytes per parameter of the linear layers and the name of the quantisation, None for none."""
    found = part(config, "quantization_config", "compression_config")
    if not found:
        return dtype_bytes, None
    method = str(found.get("quant_method") or "unknown").replace("-", "_")
    if method == "bitsandbytes" and found.get("load_in_8bit"):
        return 1.0, "bitsandbytes 8-bit"
    bits = _bits(found)
    if bits is not None:
        return bits / BYTE + (GROUP_OVERHEAD_BYTES if bits < BYTE else 0.0), f"{method} {bits}-bit"
    return QUANTISED_BYTES.get(method, dtype_bytes), method


def kv_dtype_bytes(config: Config, dtype_bytes: float) -> float:
    """Return the bytes of a value in the KV cache when vLLM is told "auto".

    That is the model's dtype, or FP8 where the checkpoint brings scales for it, which llm-compressor's say by
    `kv_cache_scheme` and ModelOpt's also by `kv_cache_quant_algo` (vLLM 0.32, model_executor/layers/attention/
    attention.py and utils/torch_utils.py, `get_kv_cache_quant_algo_string`).
    """
    found = part(config, "quantization_config", "compression_config")
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        scheme = "fp8" if scheme.get("num_bits") == BYTE else "nvfp4"
    return {"fp8": 1.0, "nvfp4": 9 / 16}.get(str(scheme).lower(), dtype_bytes)


def _bits(found: Config) -> int | None:
    """Return the bits of a weight, of compressed-tensors the first group's."""
    groups = found.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = part(first, "weights") if isinstance(first, dict) else {}
    named = (found.get("bits"), found.get("w_bit"), weights.get("num_bits"))
    return next((bits for bits in named if isinstance(bits, int) and 1 <= bits <= 4 * BYTE), None)
