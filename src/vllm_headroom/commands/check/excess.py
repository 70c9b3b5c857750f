"""How far did a GPU's memory get above what the engine should hold?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_headroom import catalog
from vllm_headroom.commands.check.coverage import Coverage
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


class Excesses:
    """The highest discrepancy of each GPU, by UUID, and for how long there was one."""

    def __init__(self, report: Report) -> None:
        self.highest: dict[str, Excess] = {}
        self.coverage: dict[str, Coverage] = {}
        self._report = report

    @property
    def expected(self) -> bool:
        """Whether anybody, the operator or the engine, says what the engine should use."""
        return self._report != Report() or bool(self.highest)

    def step(self, snapshot: Snapshot) -> None:
        """Ask the daemon's own derivation, and keep the highest."""
        for uuid, excess in self._of(snapshot):
            self.coverage.setdefault(uuid, Coverage()).step(excess.seconds)
            before = self.highest.get(uuid)
            if before is None or excess.ratio > before.ratio:
                self.highest[uuid] = excess

    def _of(self, snapshot: Snapshot) -> Iterator[tuple[str, Excess]]:
        found = discrepancy(self._told(snapshot), configured_bytes=self._report.reported_bytes)
        in_bytes = {sample.labels: sample.value for sample in found if sample.metric is catalog.MEMORY_DISCREPANCY}
        for sample in found:
            if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO:
                n_bytes = in_bytes[sample.labels]
                yield sample.labels[1], Excess(ratio=sample.value, n_bytes=n_bytes, seconds=snapshot.time_seconds)

    def _told(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the operator's budget on the engine's page, where a live engine has it."""
        if self._report == Report() or isinstance(snapshot.engines, Failure):
            return snapshot
        ratio = self._report.utilization_ratio
        engines = tuple(
            replace(engine, gpu_memory_utilization_ratio=ratio, kv_cache_memory_bytes=None, memory_bytes=None)
            for engine in snapshot.engines.engines
        )
        return replace(snapshot, engines=replace(snapshot.engines, engines=engines))
