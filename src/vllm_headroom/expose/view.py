"""What the page and the snapshot show at one moment."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import isfinite, isnan, nan
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.expose.drawing import Curve
from vllm_headroom.model import NO_VERDICT, GpuReading, Snapshot, Values, Verdict
from vllm_headroom.vocabulary import EngineState, Level, Situation

CURVE_STEP_SECONDS: Final = 60
POINTS: Final = 1440
"""A day: for eight GPUs 98 kB, and 131 kB on disk."""

MOST_BACK: Final = 5
"""Minutes by which a clock may be corrected: the newest minute continues until the clock has caught up."""

MOST_CURVE_GPUS: Final = 64
MOST_CURVES: Final = 2 * MOST_CURVE_GPUS + 2
MOST_HISTORY_EVENTS: Final = 50

TYPE: Final = "f"
"""Four bytes a value, exact to 8 KiB at 80 GiB."""


class HistoryEvent(Struct, frozen=True, kw_only=True):
    """A change, in seconds since the epoch."""

    seconds: float
    level: Level
    text: str


VerdictKey = tuple[str, Level, str | None]
"""The subject of a verdict, its level, and its alert or, without one, the engine's state."""


class SavedHistory(Struct, frozen=True, kw_only=True):
    """The saved history: the newest minute, a day's curves as floats of 32 bits, events and the last verdicts."""

    minute: int | None = None
    curves: dict[str, bytes] = field(default_factory=dict)
    events: tuple[HistoryEvent, ...] = ()
    said: frozenset[VerdictKey] | None = None


class History:
    """A day in a ring, by the minute: the lowest free memory of GPUs, at peaks too, and host, the most requests."""

    def __init__(self) -> None:
        self.events: tuple[HistoryEvent, ...] = ()
        self._minute: int | None = None
        self._curves: dict[str, array[float]] = {}
        self._said: frozenset[VerdictKey] | None = None

    def step(self, snapshot: Snapshot, verdicts: Iterable[Verdict], running: float | None) -> None:
        """Add one tick; after a large step back of the clock the day starts over."""
        minute = int(snapshot.time_seconds // CURVE_STEP_SECONDS)
        if self._minute is None or minute < self._minute - MOST_BACK:
            self._curves, self._minute = {}, minute
        elif minute > self._minute:
            skipped = range(max(self._minute, minute - POINTS) + 1, minute + 1)
            for curve, passed in product(self._curves.values(), skipped):
                curve[passed % POINTS] = nan
            self._minute = minute
        gpus = snapshot.owned_gpus[:MOST_CURVE_GPUS]
        if len(self._curves) > MOST_CURVES:  # of GPUs, or parts of them, that are gone
            shown = {"", *(gpu.reading.uuid for gpu in gpus)}
            self._curves = {
                name: curve
                for name, curve in self._curves.items()
                if name.partition(" ")[2] in shown
            }
        for gpu in gpus:
            self._add_gpu(gpu.reading)
        self._add("host", None if snapshot.host is None else snapshot.host.room_bytes, min)
        self._add("running", running, max)
        self._note(snapshot, verdicts)

    def read_curve(self, name: str) -> Curve:
        """Return `free UUID` or `peak UUID`, the free memory of a GPU in bytes, or that of the `host`, or `running`."""
        curve, newest = self._curves.get(name), self._minute
        if curve is None or newest is None:
            return (), ()
        oldest = newest - POINTS + 1
        floats = (curve[oldest % POINTS :] + curve[: oldest % POINTS]).tolist()
        values: Sequence[float | None] = floats
        if not isfinite(
            sum(floats)
        ):  # 1e39 requests, which a page may claim, are infinite as these floats
            values = [value if isfinite(value) else None for value in floats]
        first = next((place for place, value in enumerate(values) if value is not None), POINTS)
        times = range(
            (oldest + first) * CURVE_STEP_SECONDS,
            (newest + 1) * CURVE_STEP_SECONDS,
            CURVE_STEP_SECONDS,
        )
        return times, values[first:]

    def save(self) -> SavedHistory:
        """Return the history for a later process."""
        curves = {name: curve.tobytes() for name, curve in self._curves.items()}
        return SavedHistory(minute=self._minute, curves=curves, events=self.events, said=self._said)

    def restore(self, kept: SavedHistory) -> None:
        """Continue the history of an earlier process; curves of another length are left out."""
        self._minute, self.events, self._said = (
            kept.minute,
            kept.events[-MOST_HISTORY_EVENTS:],
            kept.said,
        )
        whole = {
            name: values
            for name, values in kept.curves.items()
            if len(values) == POINTS * array(TYPE).itemsize
        }
        self._curves = {name: array(TYPE, values) for name, values in whole.items()}

    def _add_gpu(self, gpu: GpuReading) -> None:
        if gpu.memory is not None:
            self._add(f"free {gpu.uuid}", gpu.memory.free_bytes, min)
            if gpu.used_peak_bytes is not None:
                rise_bytes = max(0, gpu.used_peak_bytes - gpu.memory.used_bytes)
                self._add(f"peak {gpu.uuid}", max(0, gpu.memory.free_bytes - rise_bytes), min)

    def _add(self, name: str, value: float | None, chosen: Callable[[float, float], float]) -> None:
        if value is None:
            return
        curve = self._curves.setdefault(name, array(TYPE, [nan]) * POINTS)
        slot = (self._minute or 0) % POINTS
        curve[slot] = value if isnan(curve[slot]) else chosen(curve[slot], value)

    def _note(self, snapshot: Snapshot, verdicts: Iterable[Verdict]) -> None:
        """Add an event for each new verdict, without regard to figures; after a sleep those from before are not new."""
        state = None if snapshot.engine_status is None else snapshot.engine_status.state
        said = {
            (
                each.subject,
                each.level,
                each.alert or (state if each.subject == "engine" else None),
            ): each
            for each in verdicts
        }
        if self._said is not None:
            new = [each for what, each in said.items() if what not in self._said]
            events = [
                HistoryEvent(seconds=snapshot.time_seconds, level=each.level, text=each.sentence)
                for each in new
            ]
            self.events = (*self.events, *events)[-MOST_HISTORY_EVENTS:]
        asleep = state is EngineState.ASLEEP
        slept_on = {
            each
            for each in self._said or ()
            if asleep and each[0] != "engine" and each[2] is not None
        }
        self._said = frozenset(slept_on | said.keys())


class LastIncident(Struct, frozen=True, kw_only=True):
    """An incident on disk, in seconds since the epoch; `sentence` is its cause and how sure it is, None if unknown."""

    seconds: float
    what: str
    reason: str | None
    sentence: str | None
    file: str

    @property
    def command(self) -> str:
        """The command that explains it, where the file is."""
        return f"vllm-headroom postmortem {self.file}"


class View(Struct, frozen=True, kw_only=True):
    """The last sample with its values and verdicts, none before the first; `age_seconds` is its age.

    `host` is the sidecar's pod or machine, `stall_reason` why the sampling loop does not run, `notice` is for people,
    `runbooks` is their URL.
    """

    version: str
    interval_seconds: float
    history: History
    host: str = ""
    engine_url: str = ""
    snapshot: Snapshot | None = None
    values: Values = Values(())
    verdicts: tuple[Verdict, ...] = (NO_VERDICT,)
    age_seconds: float = 0.0
    stall_reason: str | None = None
    notice: str = ""
    runbooks: str | None = None
    last_incident: LastIncident | None = None

    @property
    def shown_verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts to show now: while the loop does not run, nothing is known."""
        if self.stall_reason is None:
            return self.verdicts
        text = f"The sidecar does not sample: {self.stall_reason}; the values below are old."
        stopped = Verdict(
            subject="sidecar",
            level=Level.ALARM,
            sentence=text,
            alert="HeadroomSampleStale",
            situation=Situation.BLIND,
        )
        return (stopped, *(replace(each, level=Level.UNKNOWN) for each in self.verdicts))

    def find_runbook(self, alert: str | None) -> str | None:
        """Return the URL of an alert's runbook, None where unknown."""
        if alert is None or self.runbooks is None:
            return None
        return (
            self.runbooks.replace("{alert}", alert)
            if "{alert}" in self.runbooks
            else f"{self.runbooks}/{alert}"
        )
