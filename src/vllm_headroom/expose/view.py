"""The state that the page and snapshot show, and the last week's history."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from math import isfinite, isnan, nan
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.expose.drawing import Curve
from vllm_headroom.model import (
    NO_VERDICT,
    EnginePod,
    EngineStatus,
    GpuReading,
    Snapshot,
    Values,
    Verdict,
)
from vllm_headroom.units import DAY_SECONDS
from vllm_headroom.vocabulary import EngineState, Level, Situation

CURVE_STEP_SECONDS: Final = 60
"""The time between two points of a curve."""

CURVE_POINTS: Final = 1440
"""The number of points per day. The day curves of eight GPUs take 109 kB in memory. On disk, they
take 146 kB.
"""

WEEK_STEP_MINUTES: Final = 10
"""The number of minutes between two points of a week curve. One point per minute would take ten
times the memory. A picture has fewer than a thousand columns.
"""

WEEK_POINTS: Final = 7 * 24 * 60 // WEEK_STEP_MINUTES
"""The number of points per week. The week curves of eight GPUs take 77 kB in memory. On disk, they
take 102 kB.
"""

MOST_MINUTES_BACK: Final = 5
"""The history is kept if the clock is set back by at most this. After such a change, samples are
added to the newest minute until the clock has caught up.
"""

MOST_CURVE_GPUS: Final = 64
"""The maximum number of GPUs, or parts of GPUs, with curves (our choice)."""

MOST_CURVES: Final = 2 * MOST_CURVE_GPUS + 3
"""Each GPU has two curves. The host, the running requests and the KV cache have one each."""

MOST_HISTORY_EVENTS: Final = 50
"""The number of events kept (our choice). The page shows the newest ten, and the snapshot shows
all.
"""

MOST_KEPT_STARTS: Final = 5
"""The number of engine starts whose durations are kept (our choice)."""

FLOAT_TYPECODE: Final = "f"
"""The type of a curve's values: four bytes, accurate to 8 KiB at 80 GiB."""


class HistoryEvent(Struct, frozen=True, kw_only=True):
    """A verdict that first appeared in a sample."""

    seconds: float
    """The time of the sample, in seconds since the epoch."""
    level: Level
    text: str
    """The verdict's sentence."""


VerdictKey = tuple[str, Level, str | None]
"""The subject, level and alert of a verdict. Without an alert, the third value of an engine's
verdict is its state. For any other verdict without an alert, it is None.
"""


class VerdictStart(Struct, frozen=True, kw_only=True):
    """The start of a verdict."""

    key: VerdictKey
    seconds: float
    """The time of the first sample with the verdict, in seconds since the epoch."""
    is_exact: bool
    """Whether the verdict began with that sample. False for the very first sample, because the
    verdict may have begun earlier.
    """


class SavedHistory(Struct, frozen=True, kw_only=True):
    """The history as saved in a state file."""

    minute: int | None = None
    """The newest minute, counted since the epoch, or None before the first sample."""
    curves: dict[str, bytes] = field(default_factory=dict)
    """The values of each curve for a day, as 32-bit floats, by the curve's name."""
    week_curves: dict[str, bytes] = field(default_factory=dict)
    """The values for a week, in the same form."""
    events: tuple[HistoryEvent, ...] = ()
    verdict_starts: tuple[VerdictStart, ...] | None = None
    """The verdicts of the last sample, or None before the first sample."""
    start_durations_seconds: tuple[float, ...] = ()
    """How long the engine's last starts took, oldest first."""


class _Rings:
    """The curves over the newest `points` steps.

    Each curve is a ring of floats. NaN means that there is no value.
    """

    def __init__(self, step_minutes: int, points: int) -> None:
        self._step_minutes = step_minutes
        self._points = points
        self._newest_step: int | None = None
        """The newest minute's step, counted since the epoch. None before the first minute."""
        self.curves: dict[str, array[float]] = {}
        """The curves by name. A step's value is at the index of its number modulo the number of
        points.
        """

    def move_to(self, minute: int) -> None:
        """Make `minute` the newest minute. Skipped steps have no value."""
        step = minute // self._step_minutes
        newest_step = step if self._newest_step is None else self._newest_step
        # If the pause is longer than the ring, each point is cleared only once.
        first_step = max(newest_step, step - self._points) + 1
        skipped_steps = range(first_step, step + 1)
        for curve in self.curves.values():
            for skipped_step in skipped_steps:
                curve[skipped_step % self._points] = nan
        self._newest_step = step

    def add(self, name: str, value: float, choose: Callable[[float, float], float]) -> None:
        """Add a value to a curve's newest step.

        If the step already has a value, `choose` picks which of the two is kept.
        """
        if name not in self.curves:
            self.curves[name] = array(FLOAT_TYPECODE, [nan]) * self._points
        curve = self.curves[name]
        slot = (self._newest_step or 0) % self._points
        if isnan(curve[slot]):
            curve[slot] = value
        else:
            curve[slot] = choose(curve[slot], value)

    def read(self, name: str) -> Curve:
        """Return a curve from its first known value on.

        The curve is empty if nothing is known.
        """
        ring = self.curves.get(name)
        newest_step = self._newest_step
        if ring is None or newest_step is None:
            return (), ()
        oldest_step = newest_step - self._points + 1
        start = oldest_step % self._points
        floats = (ring[start:] + ring[:start]).tolist()
        values: Sequence[float | None] = floats
        # This is the fast path: usually, no value is missing. An infinite value, for example if a
        # page reports 1e39 requests, is treated as missing.
        if not isfinite(sum(floats)):
            values = [value if isfinite(value) else None for value in floats]
        unknown_points = next(
            (place for place, value in enumerate(values) if value is not None), self._points
        )
        step_seconds = CURVE_STEP_SECONDS * self._step_minutes
        times = range(
            (oldest_step + unknown_points) * step_seconds,
            (newest_step + 1) * step_seconds,
            step_seconds,
        )
        return times, values[unknown_points:]

    def save(self) -> dict[str, bytes]:
        """Return the curves' values by name."""
        return {name: curve.tobytes() for name, curve in self.curves.items()}

    def restore(self, saved: dict[str, bytes], minute: int | None) -> None:
        """Continue saved curves, whose newest minute is `minute`; drop curves of another length."""
        self._newest_step = None if minute is None else minute // self._step_minutes
        curve_bytes = self._points * array(FLOAT_TYPECODE).itemsize
        self.curves = {
            name: array(FLOAT_TYPECODE, values)
            for name, values in saved.items()
            if len(values) == curve_bytes
        }

    def clear(self) -> None:
        """Drop all curves."""
        self._newest_step = None
        self.curves = {}


class History:
    """The day and week curves, the newest events, and how long starts took.

    A day curve has one point per minute. A week curve has one per ten minutes. The curves of a
    history are:
    - Each GPU's lowest free memory, in samples and at peaks between samples.
    - The host's lowest free memory.
    - The highest number of running requests.
    - The highest KV cache usage.
    """

    def __init__(self) -> None:
        self.events: tuple[HistoryEvent, ...] = ()
        """The events, oldest first."""
        self.start_durations_seconds: tuple[float, ...] = ()
        """How long the engine's last starts took, oldest first."""
        self._minute: int | None = None
        """The newest minute, counted since the epoch, or None before the first sample."""
        self._day = _Rings(1, CURVE_POINTS)
        self._week = _Rings(WEEK_STEP_MINUTES, WEEK_POINTS)
        self._verdict_starts: dict[VerdictKey, VerdictStart] | None = None
        """The verdicts of the last sample, or None before the first sample."""
        self._state: EngineState | None = None
        """The engine's state in the last sample, or None if unknown."""

    def step(
        self,
        snapshot: Snapshot,
        verdicts: Iterable[Verdict],
        running: float | None,
        kv_used_ratio: float | None = None,
    ) -> None:
        """Add one tick: the running requests and the fullest KV cache's usage.

        `running` and `kv_used_ratio` are None if unknown. If the clock was set back by more than
        MOST_MINUTES_BACK, all curves start over.
        """
        self._move_to(int(snapshot.time_seconds // CURVE_STEP_SECONDS))
        gpus = snapshot.owned_gpus[:MOST_CURVE_GPUS]
        self._drop_curves_of_others({gpu.reading.uuid for gpu in gpus})
        for gpu in gpus:
            self._add_gpu(gpu.reading)
        if snapshot.host is not None:
            self._add("host", snapshot.host.room_bytes, min)
        self._add("running", running, max)
        self._add("kv_cache", kv_used_ratio, max)
        self._add_start_duration(snapshot)
        self._add_events(snapshot, verdicts)

    def read_curve(self, name: str, past_seconds: float | None = None) -> Curve:
        """Return a curve from its first known value on.

        The curve is empty if nothing is known. If `past_seconds` is more than a day, the result is
        the week curve. In any other case, the result is the day curve. The names of the curves:

        - `free UUID` and `peak UUID`: a GPU's free memory in bytes.
        - `host`: the host's free memory in bytes.
        - `running`: the number of running requests.
        - `kv_cache`: the usage of the fullest KV cache, as a ratio.
        """
        if past_seconds is not None and past_seconds > DAY_SECONDS:
            return self._week.read(name)
        return self._day.read(name)

    def find_start(self, verdict: Verdict, state: EngineState | None) -> VerdictStart | None:
        """Return when a verdict in the last sample began, or None if unknown.

        `state` is the engine's state.
        """
        return (self._verdict_starts or {}).get(_build_verdict_key(verdict, state))

    def save(self) -> SavedHistory:
        """Return the history in the form in which it is saved."""
        verdict_starts = None
        if self._verdict_starts is not None:
            verdict_starts = tuple(self._verdict_starts.values())
        return SavedHistory(
            minute=self._minute,
            curves=self._day.save(),
            week_curves=self._week.save(),
            events=self.events,
            verdict_starts=verdict_starts,
            start_durations_seconds=self.start_durations_seconds,
        )

    def restore(self, saved: SavedHistory) -> None:
        """Continue the history of an earlier process; drop curves of another length."""
        self._minute = saved.minute
        self._day.restore(saved.curves, saved.minute)
        self._week.restore(saved.week_curves, saved.minute)
        self.events = saved.events[-MOST_HISTORY_EVENTS:]
        self.start_durations_seconds = saved.start_durations_seconds[-MOST_KEPT_STARTS:]
        if saved.verdict_starts is None:
            self._verdict_starts = None
        else:
            self._verdict_starts = {start.key: start for start in saved.verdict_starts}

    def _move_to(self, minute: int) -> None:
        """Make this the newest minute.

        Skipped minutes have no value. If `minute` is up to MOST_MINUTES_BACK before the newest
        minute, nothing changes. If `minute` is even earlier, all curves are dropped.
        """
        if self._minute is not None and minute < self._minute - MOST_MINUTES_BACK:
            self._day.clear()
            self._week.clear()
        elif self._minute is not None:
            minute = max(minute, self._minute)
        self._minute = minute
        self._day.move_to(minute)
        self._week.move_to(minute)

    def _drop_curves_of_others(self, uuids: set[str]) -> None:
        """If there are too many curves, drop those with UUIDs not in `uuids`."""
        # A curve's name is "free UUID", "peak UUID" or a word such as "host".
        kept_uuids = {"", *uuids}
        for rings in (self._day, self._week):
            if len(rings.curves) > MOST_CURVES:
                rings.curves = {
                    name: curve
                    for name, curve in rings.curves.items()
                    if name.partition(" ")[2] in kept_uuids
                }

    def _add_gpu(self, gpu: GpuReading) -> None:
        """Add a GPU's free memory, now and at the usage peak, as far as known."""
        if gpu.memory is None:
            return
        self._add(f"free {gpu.uuid}", gpu.memory.free_bytes, min)
        if gpu.used_peak_bytes is None:
            return
        rise_bytes = max(0, gpu.used_peak_bytes - gpu.memory.used_bytes)
        free_at_peak_bytes = max(0, gpu.memory.free_bytes - rise_bytes)
        self._add(f"peak {gpu.uuid}", free_at_peak_bytes, min)

    def _add(self, name: str, value: float | None, choose: Callable[[float, float], float]) -> None:
        """Add a value to the newest point of the day and week curves.

        A value of None is ignored. If the point already has a value, `choose` picks which of the
        two is kept.
        """
        if value is None:
            return
        self._day.add(name, value, choose)
        self._week.add(name, value, choose)

    def _add_start_duration(self, snapshot: Snapshot) -> None:
        """If the engine has just started to serve, add how long its start took."""
        status = snapshot.engine_status
        state = None if status is None else status.state
        has_started = self._state is EngineState.STARTING and state is EngineState.SERVING
        if has_started and status is not None and status.began_seconds is not None:
            duration_seconds = snapshot.time_seconds - status.began_seconds
            durations_seconds = (*self.start_durations_seconds, duration_seconds)
            self.start_durations_seconds = durations_seconds[-MOST_KEPT_STARTS:]
        self._state = state

    def _add_events(self, snapshot: Snapshot, verdicts: Iterable[Verdict]) -> None:
        """Add an event for each verdict whose key was not in the last sample.

        A verdict keeps its key if only its figures have changed. The first sample does not add any
        events.
        """
        state = None if snapshot.engine_status is None else snapshot.engine_status.state
        verdicts_by_key = {_build_verdict_key(verdict, state): verdict for verdict in verdicts}
        is_first = self._verdict_starts is None
        previous_starts = self._verdict_starts or {}
        if not is_first:
            events = [
                HistoryEvent(
                    seconds=snapshot.time_seconds, level=verdict.level, text=verdict.sentence
                )
                for key, verdict in verdicts_by_key.items()
                if key not in previous_starts
            ]
            self.events = (*self.events, *events)[-MOST_HISTORY_EVENTS:]
        starts = {}
        for key in verdicts_by_key:
            starts[key] = previous_starts.get(key) or VerdictStart(
                key=key, seconds=snapshot.time_seconds, is_exact=not is_first
            )
        if state is EngineState.ASLEEP:
            # These alerts pause while the engine is asleep. An alert that was paused is therefore
            # not new when the engine wakes up.
            starts |= {
                key: start for key, start in previous_starts.items() if _is_paused_by_sleep(key)
            }
        self._verdict_starts = starts


def _build_verdict_key(verdict: Verdict, state: EngineState | None) -> VerdictKey:
    distinction = verdict.alert
    if distinction is None and verdict.subject == "engine":
        distinction = state
    return verdict.subject, verdict.level, distinction


def _is_paused_by_sleep(key: VerdictKey) -> bool:
    """Return whether a verdict's alert is paused while the engine is asleep."""
    subject, _, alert = key
    return subject != "engine" and alert is not None


class LastIncident(Struct, frozen=True, kw_only=True):
    """The newest incident on disk."""

    seconds: float
    """When the incident began, in seconds since the epoch."""
    kind: str
    reason: str | None
    """The reason for an exit, or None for a stall."""
    sentence: str | None
    """The cause of the incident and how certain it is, or None if unknown."""
    file: str
    """The path of the incident's file."""

    @property
    def command(self) -> str:
        """Return the command that explains the incident, to be run where its file is."""
        return f"vllm-headroom postmortem {self.file}"


def find_no_name(_pid: int) -> None:
    """Return None, because the names of processes are not available."""


class View(Struct, frozen=True, kw_only=True):
    """The latest sample, and everything else that the page and the snapshot show."""

    version: str
    interval_seconds: float
    history: History
    host: str = ""
    """The name of the sidecar's pod or machine."""
    pod: EnginePod | None = None
    """The engine's pod, or None outside Kubernetes or if unknown."""
    engine_url: str = ""
    snapshot: Snapshot | None = None
    """The snapshot of the sample, or None before the first sample."""
    values: Values = Values(())
    verdicts: tuple[Verdict, ...] = (NO_VERDICT,)
    age_seconds: float = 0.0
    """The time since the sample was read."""
    stall_reason: str | None = None
    """Why the sampling loop is unhealthy, or None while it is healthy."""
    notice: str = ""
    """A line for people at the top of the page; empty if there is none."""
    runbooks: str | None = None
    """The URL of the runbooks, or None if not configured. If the URL contains `{alert}`, this is
    replaced with the alert's name. If the URL does not contain `{alert}`, the name is appended.
    """
    last_incident: LastIncident | None = None
    find_process_name: Callable[[int], str | None] = find_no_name
    """Returns the name of a process, with its pod if known. Returns None if the process is not
    visible.
    """

    @property
    def engine_status(self) -> EngineStatus | None:
        """Return the engine's status in the latest sample, or None if unknown."""
        return None if self.snapshot is None else self.snapshot.engine_status

    def find_start(self, verdict: Verdict) -> VerdictStart | None:
        """Return when a verdict began, or None if unknown."""
        status = self.engine_status
        return self.history.find_start(verdict, None if status is None else status.state)

    @property
    def shown_verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts to show now.

        While the sampling loop is unhealthy, the first verdict is an alarm about the loop. All
        others have the level UNKNOWN.
        """
        if self.stall_reason is None:
            return self.verdicts
        stall = Verdict(
            subject="sidecar",
            level=Level.ALARM,
            sentence=f"The sidecar does not sample: {self.stall_reason}; the values below are old.",
            alert="HeadroomSampleStale",
            situation=Situation.BLIND,
        )
        # Verdicts from before the stall may no longer be true.
        outdated = [replace(verdict, level=Level.UNKNOWN) for verdict in self.verdicts]
        return (stall, *outdated)

    def find_runbook(self, alert: str | None) -> str | None:
        """Return an alert's runbook URL.

        Returns None if there is no alert or no configured URL.
        """
        if alert is None or self.runbooks is None:
            return None
        if "{alert}" in self.runbooks:
            return self.runbooks.replace("{alert}", alert)
        return f"{self.runbooks}/{alert}"
