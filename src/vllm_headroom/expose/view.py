"""The data that the page and the snapshot show, and the history of the last day."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from math import isfinite, isnan, nan
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.expose.drawing import Curve
from vllm_headroom.model import NO_VERDICT, EnginePod, GpuReading, Snapshot, Values, Verdict
from vllm_headroom.vocabulary import EngineState, Level, Situation

CURVE_STEP_SECONDS: Final = 60
"""The time between two points of a curve."""

CURVE_POINTS: Final = 1440
"""The points of a day. The curves of eight GPUs take 98 kB, and 131 kB on disk."""

MOST_MINUTES_BACK: Final = 5
"""How far the clock may be set back without losing the history: until the clock has caught up,
samples are added to the newest minute.
"""

MOST_CURVE_GPUS: Final = 64
"""Our choice: how many GPUs, or parts of GPUs, have curves."""

MOST_CURVES: Final = 2 * MOST_CURVE_GPUS + 3
"""Two curves for each GPU, and those of the host, the running requests and the KV cache."""

MOST_HISTORY_EVENTS: Final = 50
"""Our choice: how many events are kept. The page shows the newest ten, the snapshot all."""

FLOAT_TYPECODE: Final = "f"
"""The type of a curve's values: four bytes, exact to 8 KiB at 80 GiB."""


class HistoryEvent(Struct, frozen=True, kw_only=True):
    """A verdict that is new at a sample."""

    seconds: float
    """The time of the sample, since the epoch."""
    level: Level
    text: str
    """The verdict's sentence."""


VerdictKey = tuple[str, Level, str | None]
"""The subject of a verdict, its level, and its alert. Without an alert, the third is the state of
the engine for a verdict on the engine, and None for any other verdict.
"""


class SavedHistory(Struct, frozen=True, kw_only=True):
    """The history as it is saved in a state file."""

    minute: int | None = None
    """The newest minute, counted since the epoch; None before the first sample."""
    curves: dict[str, bytes] = field(default_factory=dict)
    """A day's values of each curve, as floats of 32 bits, by the curve's name."""
    events: tuple[HistoryEvent, ...] = ()
    verdict_keys: frozenset[VerdictKey] | None = field(default=None, name="said")
    """The verdicts of the last sample; None before the first. In state files its name is `said`."""


class History:
    """The curves of the last day, with a point for each minute, and the newest events.

    Each point of a curve is an extreme of its minute: the lowest free memory of a GPU, at samples
    and at the peaks between them; the lowest free memory of the host; the highest number of running
    requests; and the highest use of a KV cache.
    """

    def __init__(self) -> None:
        self.events: tuple[HistoryEvent, ...] = ()
        """The oldest event first."""
        self._minute: int | None = None
        """The newest minute, counted since the epoch; None before the first sample."""
        self._curves: dict[str, array[float]] = {}
        """The curves by their names, see `read_curve`. Each is a ring buffer, in which a minute has
        the index of its number modulo CURVE_POINTS. NaN is a minute without a value.
        """
        self._verdict_keys: frozenset[VerdictKey] | None = None
        """The verdicts of the last sample; None before the first."""

    def step(
        self,
        snapshot: Snapshot,
        verdicts: Iterable[Verdict],
        running: float | None,
        kv_used_ratio: float | None = None,
    ) -> None:
        """Add one tick, with the running requests and the use of the fullest KV cache.

        Either is None where unknown. Where the clock was set back by more than MOST_MINUTES_BACK,
        all curves start over.
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
        self._add_events(snapshot, verdicts)

    def read_curve(self, name: str) -> Curve:
        """Return one curve from its first known value on; empty where nothing is known.

        `free UUID` and `peak UUID` are the free memory of a GPU in bytes, `host` that of the host,
        `running` is the number of running requests, and `kv_cache` the use of the fullest KV cache
        as a ratio.
        """
        ring = self._curves.get(name)
        newest_minute = self._minute
        if ring is None or newest_minute is None:
            return (), ()
        oldest_minute = newest_minute - CURVE_POINTS + 1
        start = oldest_minute % CURVE_POINTS
        floats = (ring[start:] + ring[:start]).tolist()
        values: Sequence[float | None] = floats
        # Fast path: usually no value is missing. An infinite value, such as for a page with 1e39
        # requests, counts as missing.
        if not isfinite(sum(floats)):
            values = [value if isfinite(value) else None for value in floats]
        unknown_points = next(
            (place for place, value in enumerate(values) if value is not None), CURVE_POINTS
        )
        first_minute = oldest_minute + unknown_points
        times = range(
            first_minute * CURVE_STEP_SECONDS,
            (newest_minute + 1) * CURVE_STEP_SECONDS,
            CURVE_STEP_SECONDS,
        )
        return times, values[unknown_points:]

    def save(self) -> SavedHistory:
        """Return the history for a later process."""
        return SavedHistory(
            minute=self._minute,
            curves={name: curve.tobytes() for name, curve in self._curves.items()},
            events=self.events,
            verdict_keys=self._verdict_keys,
        )

    def restore(self, saved: SavedHistory) -> None:
        """Continue the history of an earlier daemon; curves of another length are left out."""
        self._minute = saved.minute
        self.events = saved.events[-MOST_HISTORY_EVENTS:]
        self._verdict_keys = saved.verdict_keys
        curve_bytes = CURVE_POINTS * array(FLOAT_TYPECODE).itemsize
        self._curves = {
            name: array(FLOAT_TYPECODE, values)
            for name, values in saved.curves.items()
            if len(values) == curve_bytes
        }

    def _move_to(self, minute: int) -> None:
        """Make this the newest minute; skipped minutes have no value.

        If it is a few minutes back, the newest minute stays. If it is far back, all curves are
        dropped.
        """
        if self._minute is None or minute < self._minute - MOST_MINUTES_BACK:
            self._curves = {}
            self._minute = minute
            return
        if minute <= self._minute:
            return
        # After a pause of more than a day, each point of the ring is cleared once.
        first_minute = max(self._minute, minute - CURVE_POINTS) + 1
        skipped_minutes = range(first_minute, minute + 1)
        for curve in self._curves.values():
            for skipped_minute in skipped_minutes:
                curve[skipped_minute % CURVE_POINTS] = nan
        self._minute = minute

    def _drop_curves_of_others(self, uuids: set[str]) -> None:
        """If there are too many curves, drop those of all other GPUs, or parts of GPUs."""
        if len(self._curves) <= MOST_CURVES:
            return
        # A curve's name is "free UUID" or "peak UUID", or one word without a UUID.
        kept_uuids = {"", *uuids}
        self._curves = {
            name: curve
            for name, curve in self._curves.items()
            if name.partition(" ")[2] in kept_uuids
        }

    def _add_gpu(self, gpu: GpuReading) -> None:
        """Add the free memory of a GPU, now and at its peak, as far as known."""
        if gpu.memory is None:
            return
        self._add(f"free {gpu.uuid}", gpu.memory.free_bytes, min)
        if gpu.used_peak_bytes is None:
            return
        rise_bytes = max(0, gpu.used_peak_bytes - gpu.memory.used_bytes)
        free_at_peak_bytes = max(0, gpu.memory.free_bytes - rise_bytes)
        self._add(f"peak {gpu.uuid}", free_at_peak_bytes, min)

    def _add(self, name: str, value: float | None, choose: Callable[[float, float], float]) -> None:
        """Add a value to a curve's newest minute; None adds nothing.

        `choose` returns which of two values of one minute is kept.
        """
        if value is None:
            return
        if name not in self._curves:
            self._curves[name] = array(FLOAT_TYPECODE, [nan]) * CURVE_POINTS
        curve = self._curves[name]
        slot = (self._minute or 0) % CURVE_POINTS
        if isnan(curve[slot]):
            curve[slot] = value
        else:
            curve[slot] = choose(curve[slot], value)

    def _add_events(self, snapshot: Snapshot, verdicts: Iterable[Verdict]) -> None:
        """Add an event for each verdict that the last sample did not have, by its key.

        A verdict keeps its key if only its figures have changed. The first sample adds no events.
        """
        state = None if snapshot.engine_status is None else snapshot.engine_status.state
        verdicts_by_key = {_build_verdict_key(verdict, state): verdict for verdict in verdicts}
        previous_keys = self._verdict_keys or frozenset()
        if self._verdict_keys is not None:
            events = [
                HistoryEvent(
                    seconds=snapshot.time_seconds, level=verdict.level, text=verdict.sentence
                )
                for key, verdict in verdicts_by_key.items()
                if key not in previous_keys
            ]
            self.events = (*self.events, *events)[-MOST_HISTORY_EVENTS:]
        self._verdict_keys = frozenset(verdicts_by_key)
        if state is EngineState.ASLEEP:
            # These alerts pause while the engine sleeps, so they are not new when it wakes up.
            self._verdict_keys |= {key for key in previous_keys if _is_paused_by_sleep(key)}


def _build_verdict_key(verdict: Verdict, state: EngineState | None) -> VerdictKey:
    distinction = verdict.alert
    if distinction is None and verdict.subject == "engine":
        distinction = state
    return verdict.subject, verdict.level, distinction


def _is_paused_by_sleep(key: VerdictKey) -> bool:
    """Return whether a verdict has an alert that does not fire while the engine sleeps."""
    subject, _, alert = key
    return subject != "engine" and alert is not None


class LastIncident(Struct, frozen=True, kw_only=True):
    """The newest incident on disk."""

    seconds: float
    """When it began, since the epoch."""
    kind: str
    reason: str | None
    """The reason of an exit; None for a stall."""
    sentence: str | None
    """Its cause, and how certain the cause is; None where unknown."""
    file: str
    """The path of its file."""

    @property
    def command(self) -> str:
        """The command that explains it, to run where the file is."""
        return f"vllm-headroom postmortem {self.file}"


class View(Struct, frozen=True, kw_only=True):
    """The newest sample, and everything else that the page and the snapshot show with it."""

    version: str
    interval_seconds: float
    history: History
    host: str = ""
    """The name of the sidecar's pod or machine."""
    pod: EnginePod | None = None
    """None outside of Kubernetes, and where it is not known."""
    engine_url: str = ""
    snapshot: Snapshot | None = None
    """None before the first sample."""
    values: Values = Values(())
    verdicts: tuple[Verdict, ...] = (NO_VERDICT,)
    age_seconds: float = 0.0
    """The time since the sample was read."""
    stall_reason: str | None = None
    """Why the sampling loop is unhealthy; None while it is healthy."""
    notice: str = ""
    """A line for people at the top of the page; empty without one."""
    runbooks: str | None = None
    """The URL of the runbooks. The alert's name replaces `{alert}` in the URL, or is appended to a
    URL without it. None where no URL is configured.
    """
    last_incident: LastIncident | None = None

    @property
    def shown_verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts to show now.

        While the sampling loop is unhealthy, the first verdict is an alarm about that, and all
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
        """Return the URL of an alert's runbook; None without an alert or a configured URL."""
        if alert is None or self.runbooks is None:
            return None
        if "{alert}" in self.runbooks:
            return self.runbooks.replace("{alert}", alert)
        return f"{self.runbooks}/{alert}"
