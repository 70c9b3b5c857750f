"""What a model takes of a GPU: bytes of KV cache per token, bytes of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Final

from vllm_headroom.sizing.heads import KvHeads
from vllm_headroom.sizing.shape import ModelShape

FP8: Final = (1.0, 0)
SCALED_PER_HEAD: Final = 8
"""Bytes of the two 32-bit scales per head of the per-token-head methods (v1/attention/backends/triton_attn.py)."""

KV_DTYPES: Final = {
    "float16": (2.0, 0),
    "bfloat16": (2.0, 0),
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "fp8_e5m2": FP8,
    "fp8_inc": FP8,
    "fp8_per_token_head": (1.0, SCALED_PER_HEAD),
    "int8_per_token_head": (1.0, SCALED_PER_HEAD),
    "int4_per_token_head": (0.5, SCALED_PER_HEAD),
    "nvfp4": (9 / 16, 0),
}
"""Bytes of a value and of each head's scales, by vLLM's name of the cache's dtype (0.32, config/cache.py)."""


def bytes_per_token(
    shape: ModelShape, *, kv_dtype: str = "auto", tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> int | None:
    """Return the bytes of KV cache that a token takes on the GPU that holds most; None for a dtype not known here.

    Keys and values: layers on the rank x KV heads on the rank x (key size + value size) x bytes of the dtype (vLLM,
    v1/kv_cache_interface.py, `AttentionSpec.page_size_bytes`); heads that tensor parallelism cannot divide are
    repeated on each rank. Latent attention keeps one vector per layer, on every rank whole. Layers with a window count
    in full, and states not at all.
    """
    layer = layer_bytes(shape, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
    windowed = layer_bytes(shape, shape.windowed_heads, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
    if layer is None or windowed is None:
        return None
    full, rest = ceil(shape.full_layers / pipeline_parallel), ceil(shape.windowed_layers / pipeline_parallel)
    return ceil(shape.kv_layers / pipeline_parallel) * layer if layer == windowed else full * layer + rest * windowed


def layer_bytes(
    shape: ModelShape, heads: KvHeads | None = None, *, kv_dtype: str = "auto", tensor_parallel: int = 1
) -> int | None:
    """Return the bytes that one layer keeps of a token on each GPU; None for a dtype not known here.

    It has `heads`, or those of layers that keep every token.
    """
    dtype = (shape.kv_dtype_bytes, 0) if kv_dtype == "auto" else KV_DTYPES.get(kv_dtype)
    if dtype is None:
        return None
    value_bytes, scale_bytes = dtype
    if shape.latent_width is not None:
        return ceil(shape.latent_width * value_bytes)
    kept = heads or shape.heads
    count = max(1, kept.count // tensor_parallel)
    return count * (ceil((kept.key_size + kept.value_size) * value_bytes) + scale_bytes)


def engine_bytes_per_token(shape: ModelShape, kv_dtype: str, gpus: int | None) -> int | None:
    """Return the bytes of KV cache that a token takes on all GPUs of an engine; None where they cannot be known.

    They are the same however the engine is spread over its `gpus` (None: not known), unless it could keep copies: of a
    latent vector on any two, of KV heads on more GPUs than there are heads. A dtype or a type of model can be one that
    is not known here, and where layers keep a window or a state, bytes per token do not say what the cache holds.
    """
    copied = gpus != 1 if shape.latent_width is not None else (gpus or 1) > shape.heads.count
    certain = shape.keeps_every_token and shape.unknown_type is None and not copied
    return bytes_per_token(shape, kv_dtype=kv_dtype) if certain else None


def token_bytes(shape: ModelShape | None) -> Callable[[str, int | None], int | None] | None:
    """Return `engine_bytes_per_token` of this model, None without one."""
    return None if shape is None else partial(engine_bytes_per_token, shape)


def weights_bytes(
    shape: ModelShape,
    *,
    total_bytes: float | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    data_parallel: int = 1,
) -> int | None:
    """Return the bytes of weights on the GPU that holds most; None where they cannot be counted.

    `total_bytes` are those of the whole model, where they are known better than by counting. Tensor parallelism is
    taken to divide everything: what it repeats (norms, routers, some projections) is about one per cent. Data
    parallelism repeats everything but experts. The first and the last pipeline stage hold an embedding each.
    """
    total = model_bytes(shape) if total_bytes is None else total_bytes
    if total is None:
        return None
    embeddings = (shape.embeddings or 0) * shape.dtype_bytes
    one = embeddings if shape.tied_embeddings else embeddings / 2
    layers = max(0.0, total - embeddings)
    layers *= 1 - _experts_share(shape) * (1 - 1 / data_parallel)
    ends = min(total, embeddings) if pipeline_parallel == 1 else one
    return ceil((layers / pipeline_parallel + ends) / tensor_parallel)


def _experts_share(shape: ModelShape) -> float:
    """Return the share of the layers' bytes that belongs to experts."""
    each, found = shape.weight_bytes_per_parameter or shape.dtype_bytes, shape.parameters
    counted = (found.total - found.plain) * each + found.plain * shape.dtype_bytes if found else 0
    return found.experts * each / counted if found and counted else 0.0


def model_bytes(shape: ModelShape, parameters: int | None = None) -> float | None:
    """Return the bytes of the whole model, of `parameters` or as many as are counted; None where they cannot be.

    Embeddings, encoders, and what the quantisation leaves out, keep the model's dtype.
    """
    each = shape.weight_bytes_per_parameter
    if each is None:
        return None
    if shape.embeddings is None:
        return None if parameters is None else parameters * each
    others = (shape.encoder and shape.encoder.parameters) or 0
    counted = shape.parameters
    layers = counted.total if counted else None
    if parameters is not None:
        layers = max(0, parameters - shape.embeddings - others)
    if layers is None:
        return None
    plain = min(layers, counted.plain) if counted else 0
    return (layers - plain) * each + (plain + shape.embeddings + others) * shape.dtype_bytes
