"""How far did a GPU's memory get above what the engine should hold?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_headroom import catalog
from vllm_headroom.derive.discrepancy import discrepancy
from vllm_headroom.model import Failure, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the operator says that the engine should use of each GPU: bytes, a ratio of the whole, or nothing.

    It stands for what the engine says itself.
    """

    reported_bytes: int | None = None
    utilization_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A discrepancy (signed), as ratio and in bytes, and when it was read."""

    ratio: float
    n_bytes: float
    seconds: float


def excesses(snapshot: Snapshot, report: Report) -> Iterator[tuple[str, Excess]]:
    """Yield the UUID of each GPU of which it is said what to use, and the discrepancy, by the daemon's derivation."""
    found = discrepancy(_told(snapshot, report), configured_bytes=report.reported_bytes)
    in_bytes = {sample.labels: sample.value for sample in found if sample.metric is catalog.MEMORY_DISCREPANCY}
    for sample in found:
        if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO:
            n_bytes = in_bytes[sample.labels]
            yield sample.labels[1], Excess(ratio=sample.value, n_bytes=n_bytes, seconds=snapshot.time_seconds)


def _told(snapshot: Snapshot, report: Report) -> Snapshot:
    """Return the snapshot with the operator's budget on the engine's page, where a live engine has it."""
    if report == Report() or isinstance(snapshot.engines, Failure):
        return snapshot
    engines = tuple(
        replace(
            engine,
            gpu_memory_utilization_ratio=report.utilization_ratio,
            kv_cache_memory_bytes=None,
            memory_bytes=None,
        )
        for engine in snapshot.engines.engines
    )
    return replace(snapshot, engines=replace(snapshot.engines, engines=engines))
