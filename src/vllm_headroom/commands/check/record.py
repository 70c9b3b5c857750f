"""Everything about a trace that a limit may be set on, and why it may not suffice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.check.series import Budget, Coverage, MemorySeries, excesses
from vllm_headroom.derive.leak.baseline import WARM_REQUESTS
from vllm_headroom.derive.leak.facts import Observation
from vllm_headroom.derive.leak.host import host_observations
from vllm_headroom.derive.leak.observed import observations
from vllm_headroom.derive.leak.shape import GROWING_SECONDS
from vllm_headroom.derive.life.service import of_service
from vllm_headroom.derive.page_facts import finished, named, running_requests, together
from vllm_headroom.model import EnginePage, Gpu, Snapshot
from vllm_headroom.trace.counter import Rise
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import duration
from vllm_headroom.vocabulary import Role


class Record:
    """A trace, read to its end.

    `host` is by role, `capacity_tokens` (the least seen) by engine.
    """

    def __init__(self, budget: Budget, *, keeps_gpus: bool, keeps_host: bool) -> None:
        self.watched, self.engine = Coverage(), Coverage()
        self.finished, self.preemptions = Rise(), Rise()
        self.host: dict[Role, MemorySeries] = {}
        self.capacity_tokens: dict[str, float] = {}
        self.models: set[str] = set()
        self._budget = budget
        self._keeps_gpus, self._keeps_host = keeps_gpus, keeps_host
        self._gpus: dict[str, MemorySeries] = {}
        self._detector = Watch()
        self._life = 0

    @property
    def restarts(self) -> int:
        """How often the engine began anew."""
        return self._detector.lives.restarts

    @property
    def samples(self) -> int:
        """How many samples the trace has."""
        return self._detector.samples

    @property
    def span_seconds(self) -> float:
        """From the first sample to the last; what was watched where a clock was set back."""
        begin, end = self._detector.span
        return max(end - begin, self.watched.seconds)

    @property
    def gpus(self) -> tuple[MemorySeries, ...]:
        """The GPUs, in the order of their indices."""
        return tuple(self._gpus[uuid] for _, uuid, _ in self._detector.gpus if uuid in self._gpus)

    @property
    def expects(self) -> bool:
        """Whether anybody, the operator or the engine, says what the engine should use."""
        return self._budget != Budget() or any(gpu.excess for gpu in self._gpus.values())

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample."""
        now = snapshot.time_seconds
        served = of_service(self._detector.step(snapshot))
        told: dict[str, Observation] = {gpu.reading.uuid: seen for gpu, seen in observations(served, served.devices)}
        told.update(host_observations(served))
        self.watched.step(now)
        page = snapshot.page
        if page is not None and named(page):
            self._engines(page, now)
        running = None if (finished(page) or 0.0) < WARM_REQUESTS else running_requests(page)
        for gpu, seen in observations(snapshot, snapshot.devices):
            self._gpu(gpu, seen, told.get(gpu.reading.uuid), running)
        for uuid, excess in excesses(snapshot, self._budget):
            self._gpus[uuid].exceeds(excess)
        for role, seen in host_observations(snapshot):
            new = MemorySeries(role, role, self._detector.course(role), keeps=self._keeps_host)
            self.host.setdefault(role, new).step(seen, told.get(role), self._detector.requests(role), running)

    def _gpu(self, gpu: Gpu, seen: Observation, told: Observation | None, running: float | None) -> None:
        reading, uuid = gpu.reading, gpu.reading.uuid
        new = MemorySeries(uuid, reading.called, self._detector.course(uuid), keeps=self._keeps_gpus)
        series = self._gpus.setdefault(uuid, new)
        series.total_bytes = series.total_bytes if reading.memory is None else reading.memory.total_bytes
        series.step(seen, told, self._detector.requests(uuid), running)
        for part, part_bytes in () if running is None or gpu.inside is None else gpu.inside.parts:
            series.parts.step(part, part_bytes)

    def _engines(self, page: EnginePage, now: float) -> None:
        self.engine.step(now)
        anew, self._life = self.restarts != self._life, self.restarts
        self.finished.step(finished(page), anew=anew)
        self.preemptions.step(together(engine.preemptions_total for engine in named(page)), anew=anew)
        for engine in named(page):
            self.models.add(engine.model_name)
            if engine.kv_capacity_tokens is not None:
                least = self.capacity_tokens.get(engine.engine, engine.kv_capacity_tokens)
                self.capacity_tokens[engine.engine] = min(least, engine.kv_capacity_tokens)


def paired(record: Record, before: Record | None) -> Iterator[tuple[MemorySeries, MemorySeries | None]]:
    """Yield each GPU and its like in another trace, or None.

    They are alike by UUID, else by their place among the indices: another machine's GPUs have other UUIDs.
    """
    old = () if before is None else before.gpus
    same = {gpu.key: gpu for gpu in old}
    for place, gpu in enumerate(record.gpus):
        yield gpu, same.get(gpu.key) or (old[place] if place < len(old) else None)


LEAST_SECONDS: Final = GROWING_SECONDS
LEAST_REQUESTS: Final = WARM_REQUESTS
"""First uses of kernels are over by then; before, memory says little about what it will be."""

LEAST_SHARE: Final = 0.9
"""Of the trace, in which a figure must be known: a peak may hide in the rest."""


def doubt(record: Record, coverage: Coverage | None, what: str) -> str | None:
    """Return what is missing for `what`, which `coverage` tells was read for how long; None when nothing is."""
    return too_little(record) or unread(record, record.engine, "the engine") or unread(record, coverage, what)


def too_little(record: Record) -> str | None:
    """Return why the trace is too short; None when it is not."""
    if not record.samples:
        return "the trace has no samples"
    watched, done = record.watched.seconds, record.finished.total
    if watched < LEAST_SECONDS:
        return f"the trace is too short: it covers {duration(watched)}, and {LEAST_SECONDS / 60:.0f} min are the least"
    if done is None:
        return "the engine does not say how many requests it finished"
    if done < LEAST_REQUESTS:
        return f"too little load: {done:,.0f} requests finished, and {LEAST_REQUESTS:,.0f} are the least"
    return None


def unread(record: Record, coverage: Coverage | None, what: str) -> str | None:
    """Return that `what` could not be read for too long; None when it could."""
    read = 0.0 if coverage is None else coverage.seconds
    if read >= LEAST_SHARE * record.span_seconds:
        return None
    return f"{what} could be read for {duration(read)} of {duration(record.span_seconds)}"
