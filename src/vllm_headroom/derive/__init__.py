"""Pure: one question a file, each a function of its own state and the snapshot."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from vllm_headroom.derive.derivation import Derivation, stateless
from vllm_headroom.derive.discrepancy import discrepancy
from vllm_headroom.derive.health import INITIAL, health
from vllm_headroom.derive.host_memory import host_memory
from vllm_headroom.derive.inside import Counts, counters
from vllm_headroom.derive.kv_cache import Batches, PrefixCacheState, TokenBytes, admission, kv_cache, prefix_cache
from vllm_headroom.derive.leak.leak import LeakMemory, leaks
from vllm_headroom.derive.per_request import Baselines, baseline, per_request
from vllm_headroom.derive.readings import engine_state, readings

LEAK: Final = Derivation(name="leak", initial=LeakMemory(), step=leaks)
"""The leak detector, which is also fed a recorded past."""


def derivations(
    *,
    reported_bytes: float | None = None,
    kv_bytes_per_token: float | None = None,
    model: TokenBytes | None = None,
    baseline_bytes_per_request: float | None = None,
) -> tuple[Derivation[Any], ...]:
    """Return every derivation, in the order of the line: what a newcomer adds to.

    `reported_bytes` is what the operator says the engine should use on each GPU, `kv_bytes_per_token` the size of one
    token in the KV cache of one engine, `model` what tells it from a dtype, `baseline_bytes_per_request` what a
    running request should cost on a GPU; None where the operator does not say.
    """
    return (
        Derivation(name="health", initial=INITIAL, step=health),
        stateless("readings", readings),
        stateless("life", engine_state),
        Derivation(name="allocator", initial=Counts(), step=counters),
        stateless("discrepancy", partial(discrepancy, configured_bytes=reported_bytes)),
        stateless("per_request", per_request),
        stateless("kv_cache", partial(kv_cache, bytes_per_token=kv_bytes_per_token, model=model)),
        Derivation(name="admission", initial=Batches(), step=admission),
        Derivation(name="prefix_cache", initial=PrefixCacheState(), step=prefix_cache),
        stateless("host_memory", host_memory),
        LEAK,
        Derivation(
            name="baseline",
            initial=Baselines(),
            step=partial(baseline, configured_bytes=baseline_bytes_per_request),
        ),
    )
