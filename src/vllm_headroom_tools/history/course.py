"""The states one series of memory readings went through."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from vllm_headroom.vocabulary import LeakLocation, LeakState

Interval = tuple[float, float | None]
"""From and to, in the trace's seconds; the end is None where the state lasts to the end of the trace."""

COLLECTED: Final = (LeakState.GROWING, LeakState.LEAKING)


class Moment(Struct, frozen=True, kw_only=True):
    """What the detector said at one sample; None where it did not say. The rate's interval is of 95 %."""

    seconds: float
    bytes_per_second: float | None = None
    bytes_per_second_lower: float | None = None
    bytes_per_second_upper: float | None = None
    bytes_per_request: float | None = None
    leaked_bytes: float | None = None
    time_to_oom_seconds: float | None = None
    time_to_oom_seconds_lower: float | None = None
    by_requests: bool | None = None
    location: LeakLocation | None = None


class Course:
    """Follows the states of one series.

    `state` is the newest; `first` and `last` are the samples in state leaking. `settled` is whether the detector ever
    had seen enough to say that nothing grows.
    """

    def __init__(self) -> None:
        self.state = LeakState.UNKNOWN
        self.first: Moment | None = None
        self.last: Moment | None = None
        self.settled = False
        self._warning: Moment | None = None
        self._cut_off = False
        self._known = LeakState.UNKNOWN
        self._intervals: dict[LeakState, list[Interval]] = {state: [] for state in COLLECTED}

    @property
    def growing(self) -> tuple[Interval, ...]:
        """The intervals of the early warning."""
        return tuple(self._intervals[LeakState.GROWING])

    @property
    def leaking(self) -> tuple[Interval, ...]:
        """The intervals of the alarm."""
        return tuple(self._intervals[LeakState.LEAKING])

    @property
    def warning(self) -> Moment | None:
        """The newest sample of an early warning that is open at the end."""
        return self._warning if self._known is LeakState.GROWING else None

    @property
    def undecided(self) -> bool:
        """Whether an early warning was left open: at the end, or when the engine began anew."""
        return self._cut_off or self.warning is not None

    def step(self, state: LeakState, moment: Moment, *, anew: bool = False) -> None:
        """Go on to the next sample, of another life if `anew`; one that could not be read ends no interval."""
        self.state = state
        self.settled = self.settled or state in (LeakState.STABLE, LeakState.UNSETTLED)
        self._cut_off = self._cut_off or (anew and self._known is LeakState.GROWING)
        if state is LeakState.GROWING:
            self._warning = moment
        if state is LeakState.LEAKING:
            self.first = self.first or moment
            self.last = moment
        if state in (LeakState.UNKNOWN, self._known):
            return
        if left := self._intervals.get(self._known):
            left[-1] = (left[-1][0], moment.seconds)
        if state in COLLECTED:
            self._intervals[state].append((moment.seconds, None))
        self._known = state
