"""Engines minute by minute, as promtool's input: what a sidecar shows of each phase of a life."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

GIB: Final = 2**30
STATES: Final = ("unknown", "down", "starting", "serving", "stalled", "asleep")
REQUESTS: Final = ("requests_running", "requests_waiting", "kv_cache_usage", "preemptions")
"""Inputs that a V0 engine has from its first request on."""

GPU: Final = 'gpu="0",uuid="GPU-0"'
RANK: Final = 'model_name="m",engine="0"'
HOST_GIB: Final = 64.0
"""The limit of every container."""

LOADED_GIB: Final = 1.0
"""What a process holds before it has a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """So many minutes in which nothing changes but counters, which say how much comes in a minute.

    `outside` are the GiB that the engine holds beyond its budget, `held` all it holds where that is another figure.
    `host` are the GiB of host memory in use, without what the kernel takes back: a page cache may fill the rest.
    `state` None is a target that is gone, `missed` one that Prometheus does not scrape meanwhile.
    """

    minutes: int
    state: str | None = "serving"
    outside: float = 0.0
    held: float | None = None
    host: float = 30.0
    running: float = 0
    waiting: float = 0
    kv: float = 0.0
    finished: float = 0
    preempted: float = 0
    ended: int = 0
    missed: bool = False

    @property
    def has_page(self) -> bool:
        """Tell whether vLLM answers."""
        return self.state in {"serving", "stalled", "asleep"}


Value = Callable[[Phase], float | None]
Row = tuple[str, str, Value]
Series = tuple[str, str]
"""A series and its values in promtool's notation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A target: a card of `card` GiB, the share of it that is the budget, and a life; `starting` begins a new one."""

    name: str
    card: float
    share: float
    phases: Sequence[Phase]
    was_asked: bool = True

    def series(self) -> Iterator[Series]:
        """Yield all that a sidecar shows of it."""
        for metric, labels, value in (*self._target(), *self._host(), *self._memory(), *self._page()):
            yield self._named(metric, labels), levels(self.phases, value)
        yield self._named("headroom_engine_start_timestamp_seconds"), starts(self.phases)
        exits = self._named("headroom_engine_exits_total", 'reason="gone"')
        yield exits, levels(self.phases, lambda at: sum(each.ended for each in self.phases[: self._until(at)]))
        for metric, rate in (("preemptions", lambda at: at.preempted), ("requests_finished", lambda at: at.finished)):
            yield self._named(f"headroom_engine_{metric}_total", RANK), counts(self.phases, rate)

    def _until(self, at: Phase) -> int:
        return next(index for index, each in enumerate(self.phases) if each is at) + 1

    def _named(self, metric: str, labels: str = "") -> str:
        target = f'job="ml/vllm-headroom",namespace="ml",pod="{self.name}",instance="{self.name}:9839"'
        return f"{metric}{{{target}{',' if labels else ''}{labels}}}"

    def _target(self) -> Iterator[Row]:
        yield "up", "", lambda _: 1
        yield "process_start_time_seconds", "", lambda _: -9000
        yield "headroom_sample_age_seconds", "", lambda _: 4
        yield "headroom_source_up", 'source="engine"', lambda at: int(at.has_page)
        yield "headroom_source_up", 'source="nvml"', lambda _: 1
        yield "headroom_source_up", 'source="process"', lambda _: 1
        for state in STATES:
            yield "headroom_engine_state", f'state="{state}"', is_state(state)

    def _host(self) -> Iterator[Row]:
        yield "headroom_host_memory_bytes", 'process="engine_core"', lambda at: None if at.state == "down" else 6e9
        for state in ("growing", "leaking"):
            yield "headroom_host_leak_state", f'process="engine_core",state="{state}"', lambda _: 0
        yield "headroom_host_memory_used_bytes", "", lambda at: None if at.state == "down" else at.host * GIB
        yield "headroom_host_memory_limit_bytes", "", lambda _: HOST_GIB * GIB
        yield "headroom_host_shm_used_bytes", "", lambda _: GIB
        yield "headroom_host_shm_limit_bytes", "", lambda _: 8 * GIB
        yield "headroom_host_oom_kills_total", "", lambda _: 0
        yield "headroom_sleep_residue_bytes", GPU, self._residue

    def _residue(self, at: Phase) -> float | None:
        """Return what the last sleep of this life left, once it has slept; it stays until the next."""
        so_far = self.phases[: self._until(at)]
        begun = max((place for place, each in enumerate(so_far) if each.state in {None, "down", "starting"}), default=0)
        slept = [each for each in so_far[begun:] if each.state == "asleep"]
        return self._held(slept[-1]) if slept and at.has_page else None

    def _memory(self) -> Iterator[Row]:
        card = self.card * GIB
        yield "headroom_gpu_info", f'{GPU},name="card",attribution="process"', lambda _: 1
        yield "headroom_gpu_up", GPU, lambda _: 1
        yield "headroom_gpu_temperature_celsius", GPU, lambda _: 80
        yield "headroom_gpu_memory_total_bytes", GPU, lambda _: card
        yield "headroom_gpu_memory_used_bytes", GPU, self._held
        yield "headroom_gpu_memory_used_peak_bytes", GPU, self._held
        yield "headroom_gpu_memory_free_bytes", GPU, lambda at: card - self._held(at)
        yield "headroom_gpu_memory_held_bytes", f'{GPU},holder="engine"', self._held
        yield "headroom_gpu_memory_held_bytes", f'{GPU},holder="unattributed"', lambda _: 0
        for state in ("growing", "leaking"):
            yield "headroom_leak_state", f'{GPU},state="{state}"', lambda _: 0
        budget = card * self.share
        basis = f'{GPU},basis="budget"'
        yield "headroom_memory_discrepancy_bytes", basis, shown(lambda at: self._held(at) - budget)
        yield "headroom_memory_discrepancy_ratio", basis, shown(lambda at: self._held(at) / budget - 1)

    def _held(self, at: Phase) -> float:
        if at.held is not None:
            return at.held * GIB
        return (self.card * self.share + at.outside) * GIB if at.has_page else LOADED_GIB * GIB * (at.state != "down")

    def _page(self) -> Iterator[Row]:
        asked = shown if self.was_asked else lambda _: lambda _: None
        yield "headroom_engine_info", f'{RANK},profile="vllm"', shown(lambda _: 1)
        yield "headroom_engine_awake", RANK, shown(lambda at: int(at.state != "asleep"))
        yield "headroom_engine_requests_running", RANK, asked(lambda at: at.running)
        yield "headroom_engine_requests_waiting", RANK, asked(lambda at: at.waiting)
        yield "headroom_engine_kv_cache_used_ratio", RANK, asked(lambda at: at.kv)
        yield "headroom_engine_kv_cache_stranded_ratio", RANK, asked(lambda at: None if at.running else 0)
        yield "headroom_input_available", 'input="gpu_memory_utilization"', shown(lambda _: 1)
        for each in REQUESTS:
            yield "headroom_input_available", f'input="{each}"', shown(lambda _: int(self.was_asked))


def shown(value: Value) -> Value:
    """Return the same where there is a page."""
    return lambda at: value(at) if at.has_page else None


def is_state(state: str) -> Value:
    """Return 1 in this state, else 0."""
    return lambda at: int(at.state == state)


def levels(phases: Sequence[Phase], value: Value) -> str:
    """Return a gauge's values; absent begins with a staleness marker, unless Prometheus misses it."""
    return " ".join(
        run(None if at.state is None else value(at), at) if at.state is None or not at.missed else f"_x{at.minutes - 1}"
        for at in phases
    )


def run(value: float | None, at: Phase, step: float = 0) -> str:
    """Return what is shown for the minutes of a phase."""
    if value is None:
        return "stale" if at.minutes == 1 else f"stale _x{at.minutes - 2}"
    return f"{plain(value)}+{plain(step)}x{at.minutes - 1}"


def plain(value: float) -> str:
    """Return a number without an exponent, which promtool's notation does not have."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def counts(phases: Sequence[Phase], rate: Callable[[Phase], float]) -> str:
    """Return a counter's values; it begins anew with each life."""
    parts, count = [], 0.0
    for at in phases:
        count = count if at.has_page else 0
        parts.append(f"_x{at.minutes - 1}" if at.missed else run(count if at.has_page else None, at, rate(at)))
        count += rate(at) * at.minutes
    return " ".join(parts)


def starts(phases: Sequence[Phase]) -> str:
    """Return when each life began; the first one ten minutes before all this, unless it is seen to start."""
    parts, minute, start = [], 0, -600.0
    for at in phases:
        start = minute * 60.0 if at.state == "starting" else start
        parts.append(f"_x{at.minutes - 1}" if at.missed else run(start if at.state not in {None, "down"} else None, at))
        minute += at.minutes
    return " ".join(parts)
