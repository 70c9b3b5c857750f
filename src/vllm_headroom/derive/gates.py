"""Both gates together, each only where it is configured."""

from __future__ import annotations

import re
from functools import partial
from typing import Final
from zlib import crc32

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.derivation import Derivation
from vllm_headroom.derive.readings import engines, finished, running_requests, together
from vllm_headroom.model import Metric, Sample, Snapshot, Values, called
from vllm_headroom.units import duration, size
from vllm_headroom.vocabulary import EngineState, GateName, LeakState

GROUPS: Final = 2
"""In turn, half of the replicas stays open whatever happens to all: with more groups one of few had no replica."""

GOLDEN: Final = (5**0.5 - 1) / 2
"""Multiples of it, less what is whole, fill the stretch from 0 to 1 evenly, however many there are."""

FIRST_PART: Final = 0.4
HALF: Final = 0.5
"""The moments are spread over two fifths of a turn; the last of them is a tenth long, 90 s."""

_ORDINAL: Final = re.compile(r"-(\d{1,4})$")
"""What a StatefulSet appends: replicas with neighbouring numbers are never in one group."""


def place(name: str) -> int:
    """Return a number that differs between the replicas of a StatefulSet, and is spread evenly among others."""
    ordinal = _ORDINAL.search(name)
    return int(ordinal[1]) if ordinal else crc32(name.encode())


class Rules(Struct, frozen=True, kw_only=True):
    """When the gates close; None where a gate is not configured.

    `ready_seconds` is the time to out-of-memory that must be left, `ready_most_seconds` the longest that the gate is
    closed, and a replica's turn, `live_seconds` the least time from one restart to the next, `name` the replica's.
    """

    ready_seconds: float | None
    ready_most_seconds: float
    live_seconds: float | None
    name: str

    @property
    def share(self) -> float:
        """A number from 0 to 1; those of neighbours in a StatefulSet are far apart."""
        return place(self.name) * GOLDEN % 1.0

    def has_the_watch(self, time_seconds: float) -> bool:
        """Return whether it is this replica's turn to stay open; all replicas' clocks tell the same turn."""
        return place(self.name) % GROUPS == int(time_seconds // self.ready_most_seconds) % GROUPS

    def may_leave(self, time_seconds: float) -> bool:
        """Return whether it may be gone for minutes: in the first half of others' turn, from its own moment on."""
        passed = time_seconds % self.ready_most_seconds / self.ready_most_seconds
        return not self.has_the_watch(time_seconds) and FIRST_PART * self.share <= passed < HALF


WIDER: Final = 1.5
"""A gate that is closed opens when things are half as well again as what closed it."""

BURST_SECONDS: Final = 600.0
PEAK_SECONDS: Final = 60.0
"""How long a peak is seen for (`headroom_gpu_memory_used_peak_bytes`)."""

LEAST_BURST_BYTES: Final = 64 * 2**20
RATE_SECONDS: Final = 120.0
WAIT_SECONDS: Final = 300.0
"""Whoever comes last would wait for longer than any client does."""

URGENT_SECONDS: Final = 300.0
"""With minutes left a replica does not stay open for the others' sake."""


class Danger(Struct, frozen=True, kw_only=True):
    """Why traffic should stay away; `urgent` where the end is minutes away."""

    text: str
    urgent: bool = False


class Watched(Struct, frozen=True, kw_only=True):
    """What is remembered: of each GPU what was used and what bursts took above it, and the requests finished.

    Each is a tuple of monotonic seconds and a value, as old as it is of use.
    """

    used: tuple[tuple[float, str, int], ...] = ()
    bursts: tuple[tuple[float, str, int], ...] = ()
    finished: tuple[tuple[float, float], ...] = ()


def watched(before: Watched, snapshot: Snapshot) -> Watched:
    """Return what is remembered after a sample."""
    now = snapshot.monotonic_seconds
    used = [each for each in before.used if now - PEAK_SECONDS <= each[0] <= now]
    bursts = [each for each in before.bursts if now - BURST_SECONDS <= each[0] <= now]
    for gpu in snapshot.owned:
        memory, uuid = gpu.reading.memory, gpu.reading.uuid
        if memory is None:
            continue
        used.append((now, uuid, memory.used_bytes))
        burst = (gpu.reading.used_peak_bytes or 0) - max(n_bytes for _, whose, n_bytes in used if whose == uuid)
        if burst >= LEAST_BURST_BYTES and snapshot.in_service:
            bursts.append((now, uuid, burst))
    return Watched(used=tuple(used), bursts=tuple(bursts), finished=_finished(before, snapshot, now))


def danger(known: Watched, snapshot: Snapshot, values: Values, *, least_seconds: float, closed: bool) -> Danger | None:
    """Return why traffic should stay away, None while nothing is known that says so.

    `least_seconds` is the time that must be left by the lower bound; of a gate that is `closed` more is asked.
    """
    wanted = least_seconds * (WIDER if closed else 1.0)
    times = [(left, called(*gpu)) for gpu, left in values.of(catalog.TIME_TO_OOM_LOWER).items()]
    times += [(left, "the host") for left in values.of(catalog.HOST_TIME_TO_OOM_LOWER).values()]
    for left, whose in sorted(times):
        if left < wanted:
            return Danger(text=f"{whose} may be out of memory in {duration(left)}", urgent=left < URGENT_SECONDS)
    return _burst(known, snapshot, WIDER if closed else 1.0) or _queue(known, snapshot)


def _burst(known: Watched, snapshot: Snapshot, factor: float) -> Danger | None:
    for gpu in snapshot.owned:
        memory, uuid = gpu.reading.memory, gpu.reading.uuid
        most = max((burst for _, whose, burst in known.bursts if whose == uuid), default=0)
        if memory is not None and memory.free_bytes < factor * most:
            free = size(memory.free_bytes)
            text = f"{gpu.reading.called} has {free} free, and a burst took {size(most)} within ten minutes"
            return Danger(text=text)
    return None


def _queue(known: Watched, snapshot: Snapshot) -> Danger | None:
    if snapshot.life is not None and snapshot.life.state is EngineState.STALLED:
        return Danger(text="the engine should make progress and makes none")
    waiting = together(each.waiting for each in engines(snapshot.page))
    if not waiting or len(known.finished) < 2:  # noqa: PLR2004 - a rate takes two
        return None
    (began, first), (now, last) = known.finished[0], known.finished[-1]
    if now - began < 0.75 * RATE_SECONDS:
        return None
    rate = (last - first) / (now - began)
    if waiting <= rate * WAIT_SECONDS:
        return None
    text = f"{waiting:.0f} requests wait and {60 * rate:.1f} a minute are finished"
    return Danger(text=text)


def _finished(before: Watched, snapshot: Snapshot, now: float) -> tuple[tuple[float, float], ...]:
    total = finished(snapshot.page)
    kept = tuple(each for each in before.finished if now - RATE_SECONDS <= each[0] <= now)
    if total is None or not snapshot.in_service or (kept and total < kept[-1][1]):
        return ()
    return (*kept, (now, total))


CLOSE_AFTER_SECONDS: Final = 10.0
"""Two samples at the default interval: one alone closes nothing."""

OPEN_AFTER_SECONDS: Final = 60.0
OVER: Final = "nothing closes it any more: it opens when that has held for a minute"


class Ready(Struct, frozen=True, kw_only=True):
    """The gate: `reason` is why it is closed, None while it is open; times are monotonic."""

    reason: str | None = None
    closed_at: float | None = None
    bad_since: float | None = None
    good_since: float | None = None
    rests_until: float | None = None
    known: Watched = field(default_factory=Watched)


def ready(state: Ready, snapshot: Snapshot, values: Values, rules: Rules, *, ending: str | None = None) -> Ready:
    """Return the gate after a sample; `ending` is why the engine is to be begun anew.

    Then it is closed: a kubelet leaves a container that it ends in its Service, where requests would go on to come.
    Else it is closed for so long at most as the rules say, and then stays open for as long. While it is this replica's
    turn it stays open, unless its own end is minutes away: what befalls all replicas at once does not empty their
    Service. Where it is not configured it is never closed.
    """
    if rules.ready_seconds is None:
        return state
    most_seconds = rules.ready_most_seconds
    known, now, closed = watched(state.known, snapshot), snapshot.monotonic_seconds, state.reason is not None
    if ending is not None:
        return replace(state, known=known, reason=ending, closed_at=now if state.closed_at is None else state.closed_at)
    found = danger(known, snapshot, values, least_seconds=rules.ready_seconds, closed=closed)
    if found is not None and not found.urgent and rules.has_the_watch(snapshot.time_seconds):
        found = None
    state = replace(
        state,
        known=known,
        bad_since=None if found is None else _since(state.bad_since, now),
        good_since=None if found is not None else _since(state.good_since, now),
    )
    return _closed(state, found, now, most_seconds) if closed else _open(state, found, now)


def _open(state: Ready, found: Danger | None, now: float) -> Ready:
    rests = state.rests_until is not None and now < state.rests_until
    if found is None or state.bad_since is None or rests or now - state.bad_since < CLOSE_AFTER_SECONDS:
        return state
    return replace(state, reason=found.text, closed_at=now)


def _closed(state: Ready, found: Danger | None, now: float, most_seconds: float) -> Ready:
    opened = replace(state, reason=None, closed_at=None, bad_since=None)
    if state.closed_at is None or now - state.closed_at >= most_seconds:
        return replace(opened, rests_until=now + most_seconds)
    if found is None and state.good_since is not None and now - state.good_since >= OPEN_AFTER_SECONDS:
        return opened
    return replace(state, reason=OVER if found is None else found.text)


def _since(before: float | None, now: float) -> float:
    return now if before is None or before > now else before


HOUR_SECONDS: Final = 3600.0
HOURS: Final = 24
MARGIN_SECONDS: Final = 300.0
"""What a drain and the kubelet's own patience take, before the end may come."""

FAILS_SECONDS: Final = 600.0
"""A kubelet that has not acted by then does not ask this gate."""

WEIGHT: Final = 0.02
"""Of a sample in an hour's load: some fifty samples, minutes, settle it."""


class Live(Struct, frozen=True, kw_only=True):
    """The gate: `reason` is why the engine is to be begun anew, None while it is not; `life` is when its life began.

    `loads` are the requests that run in each hour of the day in UTC, None where none was seen. `failed_at` is when it
    last failed, at first when it was made: a daemon that just began does not know when that was.
    """

    reason: str | None = None
    failed_at: float | None = None
    life: float | None = None
    loads: tuple[float | None, ...] = (None,) * HOURS


def live(state: Live, snapshot: Snapshot, values: Values, rules: Rules) -> Live:
    """Return the gate after a sample; what is not known never fails it, nor does anything where it is not configured.

    Replicas whose turn it is to stay open do not fail before their end is minutes away.
    """
    if rules.live_seconds is None:
        return state
    now, began = snapshot.monotonic_seconds, None if snapshot.life is None else snapshot.life.began_seconds
    failed_at = now if state.failed_at is None or state.failed_at > now else state.failed_at
    following = replace(state, failed_at=failed_at, life=began, loads=_loads(state.loads, snapshot))
    if state.reason is not None:
        over = began != state.life or now - failed_at >= FAILS_SECONDS
        return replace(following, reason=None) if over else following
    if now - failed_at < rules.live_seconds:
        return following
    left = _left(values)
    if left is None or not _is_time(following.loads, snapshot.time_seconds, left, rules):
        return following
    if left > MARGIN_SECONDS and not rules.may_leave(snapshot.time_seconds):
        return following
    text = f"the engine leaks and may be out of memory in {duration(left)}: begun anew while load is low"
    return replace(following, reason=text, failed_at=now)


def _left(values: Values) -> float | None:
    """Return the lower bound of the time that is left where a GPU or the host leaks worst; None without a leak."""
    leaking = [values.value(catalog.TIME_TO_OOM_LOWER, *gpu) for gpu in _leaking(values, catalog.LEAK_STATE)]
    if _leaking(values, catalog.HOST_LEAK_STATE):
        leaking.append(values.value(catalog.HOST_TIME_TO_OOM_LOWER))
    return min((left for left in leaking if left is not None), default=None)


def _leaking(values: Values, states: Metric) -> list[tuple[str, ...]]:
    """Return the labels, but for the state, of what surely leaks."""
    return [labels[:-1] for labels, held in values.of(states).items() if held and labels[-1] == LeakState.LEAKING]


def _is_time(loads: tuple[float | None, ...], now: float, left: float, rules: Rules) -> bool:
    """Return whether this is the moment: replicas are spread over half an hour, and over the last one by what is left.

    The other half of the hour, or two turns of the last, is for their turns, each of which then comes: whoever is left
    until the end is minutes away goes while others may be gone.
    """
    turns_seconds = 2 * rules.ready_most_seconds
    if left <= HOUR_SECONDS + MARGIN_SECONDS:
        return left <= MARGIN_SECONDS + turns_seconds + rules.share * max(0.0, HOUR_SECONDS - turns_seconds)
    hours = [int(now // HOUR_SECONDS) + ahead for ahead in range(int((left - MARGIN_SECONDS) // HOUR_SECONDS) + 1)]
    known = [loads[hour % HOURS] for hour in hours[:HOURS]]
    present, others = known[0], [load for load in known if load is not None]
    if present is None or len(others) < len(known):
        return False
    return present <= min(others) and now % HOUR_SECONDS >= rules.share * HOUR_SECONDS / 2


def _loads(before: tuple[float | None, ...], snapshot: Snapshot) -> tuple[float | None, ...]:
    running = running_requests(snapshot.page)
    if running is None:
        return before
    hour = int(snapshot.time_seconds // HOUR_SECONDS) % HOURS
    old = before[hour]
    new = running if old is None else old + WEIGHT * (running - old)
    return (*before[:hour], new, *before[hour + 1 :])


GATES = "gates"


class Gates(Struct, frozen=True, kw_only=True):
    """The state of both gates, open at first."""

    ready: Ready = field(default_factory=Ready)
    live: Live = field(default_factory=Live)

    def reason(self, name: GateName) -> str | None:
        """Return why a gate is closed, None while it is open."""
        return self.ready.reason if name is GateName.READY else self.live.reason


def gates(rules: Rules, values: Values) -> Derivation[Gates]:
    """Return the question of the gates, to be asked when all others have answered with `values`."""
    return Derivation(name=GATES, initial=Gates(), step=partial(_step, rules, values))


def _step(rules: Rules, values: Values, state: Gates, snapshot: Snapshot) -> tuple[Gates, tuple[Sample, ...]]:
    dying = live(state.live, snapshot, values, rules)
    state = Gates(ready=ready(state.ready, snapshot, values, rules, ending=dying.reason), live=dying)
    configured = {GateName.LIVE: rules.live_seconds, GateName.READY: rules.ready_seconds}
    return state, tuple(
        Sample(catalog.GATE_OPEN, (str(name),), float(state.reason(name) is None))
        for name, seconds in configured.items()
        if seconds is not None
    )
