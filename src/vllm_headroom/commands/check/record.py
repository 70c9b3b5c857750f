"""Everything about a trace that a limit may be set on."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom.commands.check.excess import Report, excesses
from vllm_headroom.commands.check.series import Counted, Coverage, Series
from vllm_headroom.derive.leak.baseline import WARM_REQUESTS
from vllm_headroom.derive.leak.facts import Observation
from vllm_headroom.derive.leak.gpus import observation
from vllm_headroom.derive.leak.host import host_observations
from vllm_headroom.derive.page_facts import begun_anew, finished, life, named, running_requests, together
from vllm_headroom.model import EnginePage, Gpu, GpuReading, Snapshot
from vllm_headroom.trace.replay import Watch
from vllm_headroom.vocabulary import Role


class Record:
    """A trace, read to its end.

    `host` is by role, `capacity_tokens` (the least seen) by engine. `restarts` counts how often the engine began anew.
    """

    def __init__(self, report: Report, *, keeps_gpus: bool, keeps_host: bool) -> None:
        self.restarts = 0
        self.watched, self.engine = Coverage(), Coverage()
        self.finished, self.preemptions = Counted(), Counted()
        self.host: dict[Role, Series] = {}
        self.capacity_tokens: dict[str, float] = {}
        self.models: set[str] = set()
        self._report = report
        self._keeps_gpus, self._keeps_host = keeps_gpus, keeps_host
        self._gpus: dict[str, Series] = {}
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

    @property
    def gpus(self) -> tuple[Series, ...]:
        """The GPUs, in the order of their indices."""
        return tuple(self._gpus[uuid] for _, uuid, _ in self._detector.gpus if uuid in self._gpus)

    @property
    def expects(self) -> bool:
        """Whether anybody, the operator or the engine, says what the engine should use."""
        return self._report != Report() or any(gpu.excess for gpu in self._gpus.values())

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample."""
        now = snapshot.time_seconds
        self._detector.step(snapshot)
        self.watched.step(now)
        page = snapshot.page
        if page is not None and named(page):
            self._engines(page, now)
        running = None if page is None or (finished(page) or 0.0) < WARM_REQUESTS else running_requests(page)
        for gpu in snapshot.devices:
            self._gpu(gpu, observation(gpu, snapshot), running)
        for uuid, excess in excesses(snapshot, self._report):
            self._gpus[uuid].exceeds(excess)
        for role, seen in host_observations(snapshot):
            new = Series(role, role, self._detector.course(role), keeps=self._keeps_host)
            self.host.setdefault(role, new).step(seen, running)

    def _gpu(self, gpu: Gpu, seen: Observation, running: float | None) -> None:
        reading, uuid = gpu.reading, gpu.reading.uuid
        new = Series(uuid, _name(reading), self._detector.course(uuid), keeps=self._keeps_gpus)
        series = self._gpus.setdefault(uuid, new)
        series.total_bytes = series.total_bytes if reading.memory is None else reading.memory.total_bytes
        series.step(seen, running)
        if running is not None and gpu.inside is not None:
            series.parts.step(gpu.inside)

    def _engines(self, page: EnginePage, now: float) -> None:
        self.engine.step(now)
        now_life, now_finished = life(page), finished(page)
        anew = begun_anew(self._life, now_life, self._finished_total, now_finished)
        self.restarts += anew
        self._life = (anew and now_life) or self._life or now_life
        self._finished_total = self._finished_total if now_finished is None else now_finished
        self.finished.step(now_finished, anew=anew)
        self.preemptions.step(together(engine.preemptions_total for engine in named(page)), anew=anew)
        for engine in named(page):
            self.models.add(engine.model_name)
            if engine.kv_capacity_tokens is not None:
                least = self.capacity_tokens.get(engine.engine, engine.kv_capacity_tokens)
                self.capacity_tokens[engine.engine] = min(least, engine.kv_capacity_tokens)


def paired(record: Record, before: Record | None) -> Iterator[tuple[Series, Series | None]]:
    """Yield each GPU and its like in another trace, or None.

    They are alike by UUID, else by their place among the indices: another machine's GPUs have other UUIDs.
    """
    old = () if before is None else before.gpus
    same = {gpu.key: gpu for gpu in old}
    for place, gpu in enumerate(record.gpus):
        yield gpu, same.get(gpu.key) or (old[place] if place < len(old) else None)


def _name(reading: GpuReading) -> str:
    return reading.uuid if reading.uuid.startswith("MIG-") else f"GPU {reading.index}"
