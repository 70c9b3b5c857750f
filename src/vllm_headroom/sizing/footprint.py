"""What a model takes of a GPU: bytes of KV cache per token, bytes of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Final

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
    return None if layer is None else ceil(shape.kv_layers / pipeline_parallel) * layer


def layer_bytes(shape: ModelShape, *, kv_dtype: str = "auto", tensor_parallel: int = 1) -> int | None:
    """Return the bytes that one layer keeps of a token on each GPU; None for a dtype not known here."""
    dtype = (shape.kv_dtype_bytes, 0) if kv_dtype == "auto" else KV_DTYPES.get(kv_dtype)
    if dtype is None:
        return None
    value_bytes, scale_bytes = dtype
    if shape.latent_width is not None:
        return ceil(shape.latent_width * value_bytes)
    heads = max(1, shape.kv_heads // tensor_parallel)
    return heads * (ceil((shape.head_size + shape.value_head_size) * value_bytes) + scale_bytes)


def engine_bytes_per_token(shape: ModelShape, kv_dtype: str, gpus: int | None) -> int | None:
    """Return the bytes of KV cache that a token takes on all GPUs of an engine; None where they cannot be known.

    They are the same however the engine is spread over its `gpus` (None: not known), unless it could keep copies: of a
    latent vector on any two, of KV heads on more GPUs than there are heads. A dtype can be one that is not known here,
    and where layers keep a window or a state, bytes per token do not say what the cache holds.
    """
    copied = gpus != 1 if shape.latent_width is not None else (gpus or 1) > shape.kv_heads
    return bytes_per_token(shape, kv_dtype=kv_dtype) if shape.keeps_every_token and not copied else None


def token_bytes(shape: ModelShape | None) -> Callable[[str, int | None], int | None] | None:
    """Return `engine_bytes_per_token` of this model, None without one."""
    return None if shape is None else partial(engine_bytes_per_token, shape)


def weights_bytes(
    shape: ModelShape, *, total_bytes: float | None = None, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> int | None:
    """Return the bytes of weights on the GPU that holds most; None where they cannot be counted.

    `total_bytes` are those of the whole model, where they are known better than by counting. Tensor parallelism is
    taken to divide everything: what it repeats (norms, routers, some projections) is about one per cent. The first and
    the last pipeline stage hold an embedding each.
    """
    total = model_bytes(shape) if total_bytes is None else total_bytes
    if total is None:
        return None
    embedding = (shape.vocabulary or 0) * (shape.hidden_size or 0) * shape.dtype_bytes
    all_embeddings = embedding if shape.tied_embeddings else 2 * embedding
    layers = max(0.0, total - all_embeddings) / pipeline_parallel
    ends = min(total, all_embeddings) if pipeline_parallel == 1 else embedding
    return ceil((layers + ends) / tensor_parallel)


def model_bytes(shape: ModelShape, parameters: int | None = None) -> float | None:
    """Return the bytes of the whole model, of `parameters` or as many as are counted; None where they cannot be.

    Embeddings keep the model's dtype under quantisation.
    """
    if shape.vocabulary is None or shape.hidden_size is None:
        return None if parameters is None else parameters * shape.weight_bytes_per_parameter
    embeddings = shape.vocabulary * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    layers = shape.layer_parameters if parameters is None else max(0, parameters - embeddings)
    if layers is None:
        return None
    return layers * shape.weight_bytes_per_parameter + embeddings * shape.dtype_bytes
