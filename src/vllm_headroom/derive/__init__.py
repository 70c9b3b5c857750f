"""Pure derivations: one question per file, each a function of its state and the snapshot."""

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from vllm_headroom.derive.admission import Batches, derive_admission
from vllm_headroom.derive.allocator_counts import Counts, derive_counters
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.derive.health import INITIAL, derive_health
from vllm_headroom.derive.host_memory import derive_host_memory
from vllm_headroom.derive.kv_cache import derive_kv_cache
from vllm_headroom.derive.leak.leak import LeakMemory, derive_leaks
from vllm_headroom.derive.life.engine import derive_engine_state
from vllm_headroom.derive.peaks import derive_peaks
from vllm_headroom.derive.per_request import Baselines, derive_baseline, derive_per_request
from vllm_headroom.derive.prefix_cache import PrefixCacheState, derive_prefix_cache
from vllm_headroom.derive.readings import derive_readings
from vllm_headroom.derive.startup import derive_refusal, derive_startup
from vllm_headroom.model import Sample, Snapshot, TokenBytes

State = TypeVar("State")
StepFunction = Callable[[State, Snapshot], tuple[State, tuple[Sample, ...]]]


class Derivation(Struct, Generic[State], frozen=True, kw_only=True):
    """A question about every snapshot; `step` returns the next state and the samples."""

    name: str
    initial: State
    step: StepFunction[State]


def answer(
    derivation: Derivation[State], state: State, snapshot: Snapshot
) -> tuple[State, tuple[Sample, ...]]:
    """Run one step of a derivation; return the next state and the samples with finite values.

    Other values come from absurd numbers on a page, which overflow or divide to infinity.
    """
    following, samples = derivation.step(state, snapshot)
    return following, tuple([sample for sample in samples if isfinite(sample.value)])


def make_stateless(
    name: str, question: Callable[[Snapshot], tuple[Sample, ...]]
) -> Derivation[None]:
    """Build a derivation that needs no state."""
    return Derivation(name=name, initial=None, step=lambda _, snapshot: (None, question(snapshot)))


LEAK: Final = Derivation(name="leak", initial=LeakMemory(), step=derive_leaks)
"""The leak detector; replay runs it on recorded traces too."""


def build_derivations(
    *,
    reported_bytes: float | None = None,
    kv_bytes_per_token: float | None = None,
    model: TokenBytes | None = None,
    baseline_bytes_per_request: float | None = None,
) -> tuple[Derivation[Any], ...]:
    """Return every derivation in the order of the page; a new one is added here.

    Each argument is None where the operator has not configured it. `reported_bytes` is the memory
    that the engine should use on each GPU. `kv_bytes_per_token` is the size of one token in the KV
    cache of one engine; `model` computes that size from the cache's dtype.
    `baseline_bytes_per_request` is the expected memory per running request on each GPU.
    """
    return (
        Derivation(name="health", initial=INITIAL, step=derive_health),
        make_stateless("readings", derive_readings),
        make_stateless("engine_state", derive_engine_state),
        make_stateless("startup", derive_startup),
        make_stateless("refusal", derive_refusal),
        Derivation(name="allocator", initial=Counts(), step=derive_counters),
        make_stateless("peaks", derive_peaks),
        make_stateless("discrepancy", partial(derive_discrepancy, configured_bytes=reported_bytes)),
        make_stateless("per_request", derive_per_request),
        make_stateless(
            "kv_cache", partial(derive_kv_cache, bytes_per_token=kv_bytes_per_token, model=model)
        ),
        Derivation(name="admission", initial=Batches(), step=derive_admission),
        Derivation(name="prefix_cache", initial=PrefixCacheState(), step=derive_prefix_cache),
        make_stateless("host_memory", derive_host_memory),
        LEAK,
        Derivation(
            name="baseline",
            initial=Baselines(),
            step=partial(derive_baseline, configured_bytes=baseline_bytes_per_request),
        ),
    )
