"""Everything about a trace that a limit may be set on."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom.commands.check.excess import Excesses, Report
from vllm_headroom.commands.check.parts import Parts
from vllm_headroom.commands.check.series import Counted, Coverage, Series
from vllm_headroom.derive.leak.baseline import WARM_REQUESTS
from vllm_headroom.derive.leak.facts import Observation
from vllm_headroom.derive.leak.gpus import observation
from vllm_headroom.derive.leak.host import host_observation
from vllm_headroom.derive.page_facts import begun_anew, finished, life, named, running_requests, together
from vllm_headroom.model import EnginePage, Failure, Snapshot
from vllm_headroom.trace.replay import Watch
from vllm_headroom.vocabulary import Role


class Record:
    """A trace, read to its end.

    `gpus` are by UUID, `host` by role, `capacity_tokens` (the least seen) by engine. `restarts` counts how often the
    engine began anew.
    """

    def __init__(self, report: Report, *, keeps_gpus: bool, keeps_host: bool) -> None:
        self.restarts = 0
        self.watched, self.engine = Coverage(), Coverage()
        self.finished, self.preemptions = Counted(), Counted()
        self.gpus: dict[str, Series] = {}
        self.indices: dict[str, int] = {}
        self.host: dict[Role, Series] = {}
        self.parts: dict[str, Parts] = {}
        self.excesses = Excesses(report)
        self.capacity_tokens: dict[str, float] = {}
        self.models: set[str] = set()
        self._keeps_gpus, self._keeps_host = keeps_gpus, keeps_host
        self._life: str | None = None
        self._finished_total: float | None = None
        self._detector = Watch()

    @property
    def samples(self) -> int:
        """How many samples the trace has."""
        return self._detector.samples

    @property
    def span_seconds(self) -> float:
        """From the first sample to the last; what was watched where a clock was set back."""
        begin, end = self._detector.span
        return max(end - begin, self.watched.seconds)

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample."""
        now = snapshot.time_seconds
        self._detector.step(snapshot)
        self.watched.step(now)
        page = None if isinstance(snapshot.engines, Failure) else snapshot.engines
        if page is not None and named(page):
            self._engines(page, now)
        running = None if page is None or (finished(page) or 0.0) < WARM_REQUESTS else running_requests(page)
        for uuid, seen, total_bytes in self._gpu_readings(snapshot):
            series = self.gpus.setdefault(
                uuid, Series(self._name(uuid), self._detector.course(uuid), keeps=self._keeps_gpus)
            )
            series.total_bytes = series.total_bytes if total_bytes is None else total_bytes
            series.step(seen, running)
        if running is not None:
            self._inside(snapshot)
        for role, seen in _roles(snapshot):
            self.host.setdefault(role, Series(role, self._detector.course(role), keeps=self._keeps_host)).step(
                seen, running
            )
        self.excesses.step(snapshot)

    def _gpu_readings(self, snapshot: Snapshot) -> Iterator[tuple[str, Observation, int | None]]:
        for gpu in () if isinstance(snapshot.gpus, Failure) else snapshot.gpus:
            reading = gpu.reading
            self.indices[reading.uuid] = reading.index
            yield (
                reading.uuid,
                observation(gpu, snapshot),
                None if reading.memory is None else reading.memory.total_bytes,
            )

    def _inside(self, snapshot: Snapshot) -> None:
        for gpu in () if isinstance(snapshot.gpus, Failure) else snapshot.gpus:
            if gpu.inside is not None:
                self.parts.setdefault(gpu.reading.uuid, Parts()).step(gpu.inside)

    def _name(self, uuid: str) -> str:
        return uuid if uuid.startswith("MIG-") else f"GPU {self.indices[uuid]}"

    def _engines(self, page: EnginePage, now: float) -> None:
        self.engine.step(now)
        now_life, now_finished = life(page), finished(page)
        anew = begun_anew(self._life, now_life, self._finished_total, now_finished)
        self.restarts += anew
        self._life = now_life or self._life
        self._finished_total = self._finished_total if now_finished is None else now_finished
        self.finished.step(now_finished, anew=anew)
        self.preemptions.step(together(engine.preemptions_total for engine in named(page)), anew=anew)
        for engine in named(page):
            self.models.add(engine.model_name)
            if engine.kv_capacity_tokens is not None:
                least = self.capacity_tokens.get(engine.engine, engine.kv_capacity_tokens)
                self.capacity_tokens[engine.engine] = min(least, engine.kv_capacity_tokens)


def paired(record: Record, before: Record | None) -> Iterator[tuple[str, str | None]]:
    """Yield the UUID of each GPU and that of its like in another trace, or None.

    They are alike by UUID, else by their place among the indices: another machine's GPUs have other UUIDs.
    """
    old = [] if before is None else _ordered(before)
    for place, uuid in enumerate(_ordered(record)):
        yield uuid, uuid if uuid in old else old[place] if place < len(old) else None


def _ordered(record: Record) -> list[str]:
    return sorted(record.gpus, key=lambda uuid: (record.indices[uuid], uuid))


def _roles(snapshot: Snapshot) -> Iterator[tuple[Role, Observation]]:
    if isinstance(snapshot.processes, Failure):
        return
    for role in Role:
        processes = tuple(process for process in snapshot.processes if process.role is role)
        if processes:
            yield role, host_observation(processes, snapshot)
