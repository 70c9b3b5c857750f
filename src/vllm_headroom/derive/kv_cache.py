"""How big is the KV cache, what does a request take of it and how many more fit?"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, isfinite

from vllm_headroom import catalog
from vllm_headroom.derive.readings import engine_labels, named
from vllm_headroom.model import EngineReading, Failure, Sample, Snapshot


def kv_cache(snapshot: Snapshot, *, bytes_per_token: float | None) -> tuple[Sample, ...]:
    """Return KV figures per engine; `bytes_per_token` counts one token on all GPUs of one engine together.

    vLLM tells no bytes per token, so without it there are tokens and no bytes. What is per running request is absent
    while nothing runs or nothing is held.
    """
    if isinstance(snapshot.engines, Failure):
        return ()
    return tuple(sample for engine in named(snapshot.engines) for sample in _of_engine(engine, bytes_per_token))


def _of_engine(engine: EngineReading, bytes_per_token: float | None) -> Iterator[Sample]:
    labels, capacity_tokens = engine_labels(engine), engine.kv_capacity_tokens
    if capacity_tokens is not None and bytes_per_token is not None:
        yield Sample(catalog.ENGINE_KV_CAPACITY_BYTES, labels, capacity_tokens * bytes_per_token)
    if not engine.running or not engine.kv_used_ratio:
        return
    more = engine.running * (1.0 - engine.kv_used_ratio) / engine.kv_used_ratio
    yield Sample(catalog.ENGINE_ADDITIONAL_REQUESTS, labels, float(floor(more)) if isfinite(more) else more)
    if capacity_tokens is None:
        return
    tokens = engine.kv_used_ratio * capacity_tokens / engine.running
    yield Sample(catalog.ENGINE_KV_TOKENS_PER_REQUEST, labels, tokens)
    if bytes_per_token is not None:
        yield Sample(catalog.ENGINE_KV_BYTES_PER_REQUEST, labels, tokens * bytes_per_token)
