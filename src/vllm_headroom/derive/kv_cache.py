"""How big is the KV cache, and what does a request take of it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite

from vllm_headroom import catalog
from vllm_headroom.derive.page_facts import engines, named, together
from vllm_headroom.derive.readings import engine_labels
from vllm_headroom.model import EngineReading, Inside, Sample, Snapshot
from vllm_headroom.vocabulary import MemoryPart

TokenBytes = Callable[[str, int | None], int | None]
"""What a token takes in the cache of one engine, by the cache's dtype and the number of its GPUs, None if unknown."""


def kv_cache(
    snapshot: Snapshot, *, bytes_per_token: float | None, model: TokenBytes | None = None
) -> tuple[Sample, ...]:
    """Return KV figures per engine; `bytes_per_token` counts one token on all GPUs of one engine together.

    vLLM tells no bytes per token: without it they are what the cache takes by the probe over the tokens it can hold, or
    `model` tells them from the cache's dtype on the page, and where that cannot be, there are tokens and no bytes. What
    is per running request is absent while nothing runs or nothing is held.
    """
    gpus, known = _gpus(snapshot), _measured(snapshot) if bytes_per_token is None else bytes_per_token
    return tuple(
        sample
        for engine in named(snapshot.page)
        for sample in _of_engine(engine, _known(engine, model, gpus) if known is None else known)
    )


def _gpus(snapshot: Snapshot) -> int | None:
    """Return the GPUs of one engine, at the most; None where they are not known."""
    ranks = {engine.engine for engine in engines(snapshot.page)}
    return -(-len(snapshot.owned) // max(1, len(ranks))) or None


def _measured(snapshot: Snapshot) -> float | None:
    """Return what all KV caches take over the tokens that all engines can hold; None where one of them is unknown.

    A cache that sleep has dropped is unknown, not free.
    """
    inside = [gpu.inside or Inside() for gpu in snapshot.owned]
    held_bytes = together(dict(each.parts).get(MemoryPart.KV_CACHE) for each in inside)
    tokens = together(engine.kv_capacity_tokens for engine in named(snapshot.page))
    return held_bytes / tokens if held_bytes and tokens else None


def _known(engine: EngineReading, model: TokenBytes | None, gpus: int | None) -> int | None:
    if model is None or engine.kv_cache_dtype is None:
        return None
    return model(engine.kv_cache_dtype, gpus)


def tokens_per_request(engine: EngineReading) -> float | None:
    """Return what a running request holds on average; None while nothing runs or nothing is held."""
    if not engine.running or not engine.kv_used_ratio or engine.kv_capacity_tokens is None:
        return None
    tokens = engine.kv_used_ratio * engine.kv_capacity_tokens / engine.running
    return tokens if isfinite(tokens) else None


def _of_engine(engine: EngineReading, bytes_per_token: float | None) -> Iterator[Sample]:
    labels, capacity_tokens = engine_labels(engine), engine.kv_capacity_tokens
    if capacity_tokens is not None and bytes_per_token is not None:
        yield Sample(catalog.ENGINE_KV_CAPACITY_BYTES, labels, capacity_tokens * bytes_per_token)
    tokens = tokens_per_request(engine)
    if tokens is None:
        return
    yield Sample(catalog.ENGINE_KV_TOKENS_PER_REQUEST, labels, tokens)
    if bytes_per_token is not None:
        yield Sample(catalog.ENGINE_KV_BYTES_PER_REQUEST, labels, tokens * bytes_per_token)
