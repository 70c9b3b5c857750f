"""The size of the KV cache and its use per request."""

from collections.abc import Iterator
from math import ceil, isfinite

from vllm_headroom import catalog
from vllm_headroom.derive.pages import list_engines, list_named
from vllm_headroom.derive.series import label_engine
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import EngineReading, Sample, Snapshot, TokenBytes
from vllm_headroom.vocabulary import MemoryPart


def derive_kv_cache(
    snapshot: Snapshot, *, bytes_per_token: float | None, model: TokenBytes | None = None
) -> tuple[Sample, ...]:
    """Return the KV-cache samples of each engine.

    vLLM does not export how many bytes one token takes across an engine's GPUs. The size is taken
    from the first of these sources that is known:

    - `bytes_per_token`, which the operator configured;
    - the cache's size according to the probe, divided by its capacity in tokens;
    - `model`, which computes the size from the cache's dtype. `model` defaults to the model that
      the engine's processes load.

    If none of these sources is known, there are samples in tokens but none in bytes. While no
    request is running, there are no samples per running request.
    """
    engines = list_named(snapshot.page)
    # The operator's figure takes precedence over the probe's, and the probe's over the model's.
    if bytes_per_token is None:
        bytes_per_token = _measure_bytes_per_token(snapshot, engines)
    if model is None:
        model = snapshot.token_bytes
    gpus = _count_gpus_per_engine(snapshot)
    samples: list[Sample] = []
    for engine in engines:
        token_bytes = bytes_per_token
        if token_bytes is None and model is not None and engine.kv_cache_dtype is not None:
            token_bytes = model(engine.kv_cache_dtype, gpus) or None
        samples += _derive_engine_cache(engine, token_bytes)
    return tuple(samples)


def _measure_bytes_per_token(
    snapshot: Snapshot, engines: tuple[EngineReading, ...]
) -> float | None:
    """Return the probe's cache size divided by its capacity, or None if either is unknown."""
    sizes = []
    for gpu in snapshot.owned_gpus:
        parts = () if gpu.inside is None else gpu.inside.parts
        # The size of a sleeping engine's cache is unknown, so the sum is unknown too.
        sizes.append(dict(parts).get(MemoryPart.KV_CACHE))
    cache_bytes = sum_known(sizes)
    capacity_tokens = sum_known(engine.kv_capacity_tokens for engine in engines)
    if not cache_bytes or not capacity_tokens:
        return None
    return cache_bytes / capacity_tokens


def _count_gpus_per_engine(snapshot: Snapshot) -> int | None:
    """Return how many GPUs each engine has, rounded up, or None if unknown."""
    ranks = {engine.engine for engine in list_engines(snapshot.page)}
    return ceil(len(snapshot.owned_gpus) / max(1, len(ranks))) or None


def _derive_engine_cache(engine: EngineReading, token_bytes: float | None) -> Iterator[Sample]:
    """Yield the samples of one engine; those in bytes are omitted if `token_bytes` is None."""
    labels = label_engine(engine)
    capacity_tokens = engine.kv_capacity_tokens
    request_tokens = count_tokens_per_request(engine)
    if engine.kv_token_ratio is not None:
        yield Sample(catalog.ENGINE_KV_TOKENS_USED, labels, engine.kv_token_ratio)
    if token_bytes is not None and capacity_tokens is not None:
        yield Sample(catalog.ENGINE_KV_CAPACITY_BYTES, labels, token_bytes * capacity_tokens)
    if request_tokens is not None:
        yield Sample(catalog.ENGINE_KV_TOKENS_PER_REQUEST, labels, request_tokens)
    if token_bytes is not None and request_tokens is not None:
        yield Sample(catalog.ENGINE_KV_BYTES_PER_REQUEST, labels, token_bytes * request_tokens)


def count_tokens_per_request(engine: EngineReading) -> float | None:
    """Return the average number of tokens per running request.

    Returns None while nothing is running or the cache is empty. Also returns None if one of the
    figures is unknown.
    """
    if not engine.running or not engine.kv_used_ratio or engine.kv_capacity_tokens is None:
        return None
    tokens = engine.kv_used_ratio * engine.kv_capacity_tokens / engine.running
    # Absurd values on a page may overflow.
    return tokens if isfinite(tokens) else None
