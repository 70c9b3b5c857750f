"""Engines minute by minute as promtool's input: what a sidecar, and kube-state-metrics, show of each phase of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

GIB: Final = 2**30
CARD_GIB: Final = 79.65
RANK: Final = 'engine="0"'
HALF: Final = 0.5
LOADED_GIB: Final = 1.0
"""What a process holds before it has a page."""

HOST_GIB: Final = 64.0
"""The limit of every container."""

Level = float | tuple[float, float]
"""A level, or the two ends of a straight line through the phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """So many minutes in which nothing changes but lines and counters, which have what comes in a minute.

    `outside` are the GiB that the engine holds beyond its budget, `held` all it holds where that is another figure,
    `burst` what the highest second of a minute holds above that, `others` what other processes hold. `ended` are the
    reasons of the exits at its beginning. `state` None is a target that is gone; one that is not `up` does not answer,
    and one that is `missed` is not scraped at all. `sidecar` is every how many minutes the sidecar restarts.
    """

    minutes: float
    state: str | None = "serving"
    up: bool = True
    missed: bool = False
    outside: Level = 2.0
    held: Level | None = None
    burst: float = 0.0
    others: Level = 0.0
    host: Level = 30.0
    shm: Level = 1.0
    running: Level = 0
    waiting: Level = 0
    kv: Level = 0.0
    finished: float = 0
    preempted: float = 0
    leak: str | None = None
    left: Level | None = None
    per_request: Level | None = None
    ended: tuple[str, ...] = ()
    gpu_up: bool = True
    nvml: bool = True
    xids: int = 0
    ooms: int = 0
    kills: int = 0
    busy: float = HALF
    sidecar: int = 0
    new_pod: bool = False
    ready: bool | None = None
    completed: bool = False

    @property
    def has_page(self) -> bool:
        """Return whether vLLM answers."""
        return self.state in {"serving", "stalled", "asleep"}

    @property
    def is_seen(self) -> bool:
        """Return whether the sidecar answers."""
        return self.state is not None and self.up


Value = Callable[[Phase], "Level | None"]
Series = tuple[str, str]
"""A series and its values in promtool's notation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A target: `gpus` cards of `card` GiB, the share of each that is the budget, and its phases."""

    name: str
    phases: Sequence[Phase]
    card: float = CARD_GIB
    share: float = 0.92
    gpus: int = 1
    uuid: str = "GPU"
    namespace: str = "ml"
    job: str = "ml/vllm-headroom"
    model: str = ""
    role: str = ""
    clock: int = 0
    """Seconds that the clock of its machine is ahead."""

    def __post_init__(self) -> None:
        """Take a copy of each phase that lasts, for the same may come twice."""
        object.__setattr__(self, "phases", tuple(replace(at) for at in self.phases if at.minutes))

    def series(self, interval: float = 1) -> Iterator[Series]:
        """Yield all that is scraped of it, each `interval` minutes."""
        lengths = _count_samples(self.phases, interval)
        for metric, labels, value in self._rows():
            values = [value(at) for at in self.phases]
            if any(each is not None for each in values):
                yield self._named(metric, labels), _levels(self.phases, values, lengths)
        yield self._named("headroom_engine_start_timestamp_seconds"), _levels(self.phases, self._starts(), lengths)
        yield self._named("process_start_time_seconds"), self._sidecar_starts(lengths, interval)
        for metric, rate in (("preemptions", "preempted"), ("requests_finished", "finished")):
            if any(getattr(at, rate) for at in self.phases):
                yield self._named(f"headroom_engine_{metric}_total", self._rank), self._counts(rate, lengths, interval)

    @property
    def _rank(self) -> str:
        return f'model_name="{self.model or self.name}",{RANK}'

    def _named(self, metric: str, labels: str = "") -> str:
        pod = f'namespace="{self.namespace}",pod="{self.name}"'
        if metric.startswith("kube_"):
            return f"{metric}{{{pod}{',' if labels else ''}{labels}}}"
        target = f'job="{self.job}",{pod},instance="{self.name}:9839"'
        return f"{metric}{{{target}{',' if labels else ''}{labels}}}"

    def _rows(self) -> Iterator[tuple[str, str, Value]]:
        yield "up", "", lambda at: None if at.state is None else int(at.up)
        yield from ((metric, labels, _seen(value)) for metric, labels, value in self._sidecar())
        for number in range(self.gpus):
            gpu = f'gpu="{number}",uuid="{self.uuid}-{number}"'
            yield from ((metric, labels, _seen(_answering(value))) for metric, labels, value in self._memory(gpu))
            yield (
                "headroom_gpu_info",
                f'{gpu},name="card",attribution="process"',
                _seen(lambda at: 1 if at.nvml else None),
            )
            if any(at.xids for at in self.phases):
                yield "headroom_gpu_xid_errors_total", f'{gpu},xid="79"', _seen(_some(self._count("xids")))
            if any(not at.gpu_up for at in self.phases):
                yield "headroom_gpu_up", gpu, _seen(lambda at: int(at.gpu_up) if at.nvml else None)
        yield from ((metric, labels, _paged(value)) for metric, labels, value in self._page())
        yield (
            "kube_pod_init_container_status_ready",
            'container="headroom"',
            lambda at: None if at.ready is None else int(at.ready),
        )
        completed = 'container="vllm",reason="Completed"'
        yield "kube_pod_container_status_terminated_reason", completed, lambda at: 1 if at.completed else None

    def _sidecar(self) -> Iterator[tuple[str, str, Value]]:
        if self.role:
            yield "headroom_role", f'role="{self.role}"', lambda _: 1
        yield "headroom_source_up", 'source="engine"', lambda at: int(at.has_page)
        yield "headroom_source_up", 'source="nvml"', lambda at: int(at.nvml)
        for state in sorted({"down", "serving"} | {at.state for at in self.phases if at.state}):
            yield "headroom_engine_state", f'state="{state}"', _is_state(state)
        for reason in sorted({reason for at in self.phases for reason in at.ended}):
            yield "headroom_engine_exits_total", f'reason="{reason}"', self._count("ended", reason)
        yield "headroom_host_memory_used_bytes", "", lambda at: None if at.state == "down" else _times(at.host, GIB)
        yield "headroom_host_memory_limit_bytes", "", lambda _: HOST_GIB * GIB
        yield "headroom_host_memory_bytes", 'process="engine_core"', lambda at: None if at.state == "down" else 6e9
        if any(at.shm != 1 for at in self.phases):
            yield "headroom_host_shm_used_bytes", "", lambda at: _times(at.shm, GIB)
            yield "headroom_host_shm_limit_bytes", "", lambda _: HOST_GIB * GIB
        if any(at.kills for at in self.phases):
            yield "headroom_host_oom_kills_total", "", self._count("kills")

    def _count(self, name: str, reason: str = "") -> Value:
        """Return the count of something up to and with a phase; a new pod has a new counter."""

        def so_far(at: Phase) -> int:
            place = next(index for index, each in enumerate(self.phases) if each is at)
            begun = max((i for i, each in enumerate(self.phases[: place + 1]) if each.new_pod), default=0)
            past = [getattr(phase, name) for phase in self.phases[begun : place + 1]]
            return sum(int(each.count(reason) if reason else each) for each in past)

        return so_far

    def _memory(self, gpu: str) -> Iterator[tuple[str, str, Value]]:
        card, budget = self.card * GIB, self.card * self.share * GIB
        yield "headroom_gpu_memory_total_bytes", gpu, lambda _: card
        yield "headroom_gpu_memory_used_bytes", gpu, lambda at: _plus(self._held(at), _times(at.others, GIB))
        yield (
            "headroom_gpu_memory_used_peak_bytes",
            gpu,
            lambda at: _plus(_plus(self._held(at), _times(at.others, GIB)), at.burst * GIB),
        )
        yield (
            "headroom_gpu_memory_free_bytes",
            gpu,
            lambda at: _plus(_times(_plus(self._held(at), _times(at.others, GIB)), -1), card),
        )
        yield "headroom_gpu_memory_held_bytes", f'{gpu},holder="engine"', self._held
        if any(at.others for at in self.phases):
            yield "headroom_gpu_memory_held_bytes", f'{gpu},holder="other"', lambda at: _times(at.others, GIB)
        for state in sorted({at.leak for at in self.phases if at.leak}):
            yield "headroom_leak_state", f'{gpu},state="{state}"', _is_leak(state)
        yield "headroom_time_to_oom_seconds", gpu, lambda at: at.left
        yield "headroom_memory_per_running_request_ratio", gpu, lambda at: at.per_request
        yield (
            "headroom_memory_discrepancy_bytes",
            f'{gpu},basis="budget"',
            _paged(lambda at: _plus(self._held(at), -budget)),
        )
        yield (
            "headroom_memory_discrepancy_ratio",
            f'{gpu},basis="budget"',
            _paged(lambda at: _plus(_times(self._held(at), 1 / budget), -1)),
        )
        yield "headroom_memory_reported_bytes", f'{gpu},basis="budget"', _paged(lambda _: budget)
        if any(at.busy != HALF for at in self.phases):
            yield "headroom_gpu_utilization_ratio", gpu, lambda at: at.busy
        if any(at.ooms for at in self.phases):
            yield "headroom_allocator_ooms_total", gpu, self._count("ooms")
            yield "headroom_allocator_retries_total", gpu, self._count("ooms")

    def _held(self, at: Phase) -> Level:
        if at.held is not None:
            return _times(at.held, GIB)
        if at.has_page:
            return _times(_plus(at.outside, self.card * self.share), GIB)
        return LOADED_GIB * GIB * (at.state == "starting")

    def _page(self) -> Iterator[tuple[str, str, Value]]:
        yield "headroom_engine_info", f'{self._rank},profile="vllm"', lambda _: 1
        yield "headroom_engine_awake", self._rank, lambda at: int(at.state != "asleep")
        yield "headroom_engine_requests_running", self._rank, lambda at: at.running
        yield "headroom_engine_requests_waiting", self._rank, lambda at: at.waiting
        yield "headroom_engine_kv_cache_used_ratio", self._rank, lambda at: at.kv

    def _starts(self) -> list[Level | None]:
        """Return when each run began; the first one ten minutes before all this, unless it is seen to start."""
        values: list[Level | None] = []
        minute, start, was = 0.0, -600.0, None
        for at in self.phases:
            if at.state == "starting" and (was != "starting" or at.ended):
                start = minute * 60.0 + self.clock
            values.append(start if at.is_seen and at.state != "down" else None)
            minute, was = minute + at.minutes, at.state
        return values

    def _sidecar_starts(self, lengths: Sequence[int], interval: float) -> str:
        parts, minute, start = [], 0.0, -9000.0
        for at, n in zip(self.phases, lengths, strict=True):
            start = minute * 60.0 + self.clock if at.new_pod else start
            if not at.is_seen or at.missed:
                parts.append(_gap(at, n))
            elif at.sidecar:
                every = int(at.sidecar // interval)
                parts += [_run(60.0 * (minute + at.sidecar * turn), every, 0) for turn in range(n // every)]
            else:
                parts.append(_run(start, n, 0))
            minute += at.minutes
        return " ".join(filter(None, parts))

    def _counts(self, name: str, lengths: Sequence[int], interval: float) -> str:
        """Return a counter's values; it begins again with each run."""
        parts, count = [], 0.0
        for at, n in zip(self.phases, lengths, strict=True):
            count = count if at.has_page and at.is_seen else 0
            rate = getattr(at, name) * interval
            shown = at.has_page and at.is_seen and not at.missed
            parts.append(_run(count, n, rate) if shown else _gap(at, n))
            count += rate * n
        return " ".join(filter(None, parts))


def _count_samples(phases: Sequence[Phase], interval: float) -> list[int]:
    """Return how many samples fall into each phase."""
    ends = list(accumulate(at.minutes for at in phases))
    return [int(-(-end // interval) + (at.minutes - end) // interval) for at, end in zip(phases, ends, strict=True)]


def _seen(value: Value) -> Value:
    return lambda at: value(at) if at.is_seen else None


def _answering(value: Value) -> Value:
    """Return the same where the driver answers for the GPU."""
    return lambda at: value(at) if at.nvml and at.gpu_up else None


def _paged(value: Value) -> Value:
    return lambda at: value(at) if at.is_seen and at.has_page else None


def _some(value: Value) -> Value:
    """Return the same where there is one: a kind of event has no series before its first."""
    return lambda at: value(at) or None


def _is_leak(state: str) -> Value:
    return lambda at: int(at.leak == state)


def _is_state(state: str) -> Value:
    return lambda at: int(at.state == state)


def _times(level: Level, factor: float) -> Level:
    return (level[0] * factor, level[1] * factor) if isinstance(level, tuple) else level * factor


def _plus(level: Level, more: Level) -> Level:
    if not isinstance(level, tuple) and not isinstance(more, tuple):
        return level + more
    (a, b), (c, d) = (each if isinstance(each, tuple) else (each, each) for each in (level, more))
    return a + c, b + d


def _levels(phases: Sequence[Phase], values: Sequence[Level | None], lengths: Sequence[int]) -> str:
    parts = []
    for at, value, n in zip(phases, values, lengths, strict=True):
        if value is None or (at.missed and at.state is not None):
            parts.append(_gap(at, n))
        elif isinstance(value, tuple):
            parts.append(_run(value[0], n, (value[1] - value[0]) / max(n, 1)))
        else:
            parts.append(_run(value, n, 0))
    return " ".join(filter(None, parts))


def _gap(at: Phase, n: int) -> str:
    """Return no values; they begin with a staleness marker, unless Prometheus misses the target."""
    if at.missed:
        return f"_x{n}" if n else ""
    return f"stale _x{n - 1}" if n > 1 else "stale" * n


def _run(value: float, n: int, step: float) -> str:
    return f"{_plain(value)}{'+' if step >= 0 else '-'}{_plain(abs(step))}x{n - 1}" if n else ""


def _plain(value: float) -> str:
    """Return a number without an exponent, which promtool's notation does not have."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
