"""The readiness and liveness gates, each only where it is configured."""

from __future__ import annotations

import re
from functools import partial
from typing import Final
from zlib import crc32

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive import Derivation
from vllm_headroom.derive.readings import count_finished, count_running, list_engines, sum_known
from vllm_headroom.model import Metric, Sample, Snapshot, Values, name_device
from vllm_headroom.units import format_duration, format_size
from vllm_headroom.vocabulary import EngineState, GateName, LeakState

GROUPS: Final = 2
"""Half of the replicas stay open in turn, whatever happens to all: with more groups, one of few would have no
replica."""

GOLDEN: Final = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are evenly spread over 0 to 1, however many there are."""

FIRST_PART: Final = 0.4
HALF: Final = 0.5
"""Restarts are spread over two fifths of a turn; the last tenth of the half, 90 s, remains for the restart itself."""

_ORDINAL: Final = re.compile(r"-(\d{1,4})$")
"""The suffix of a StatefulSet's pod: replicas with neighbouring numbers are in different groups."""


def number_replica(name: str) -> int:
    """Return the ordinal of a StatefulSet's replica, or an evenly spread hash of any other name."""
    ordinal = _ORDINAL.search(name)
    return int(ordinal[1]) if ordinal else crc32(name.encode())


class Rules(Struct, frozen=True, kw_only=True):
    """When the gates close; None where a gate is not configured.

    `ready_seconds` is the time to out-of-memory that must be left, `ready_most_seconds` the longest closure and the
    length of a turn, `live_seconds` the least time between restarts, `name` the replica's name.
    """

    ready_seconds: float | None
    ready_most_seconds: float
    live_seconds: float | None
    name: str

    @property
    def share(self) -> float:
        """A number from 0 to 1, far apart for neighbours in a StatefulSet."""
        return number_replica(self.name) * GOLDEN % 1.0

    def has_turn(self, time_seconds: float) -> bool:
        """Return whether this replica must stay open now; all replicas compute the same turn from the time."""
        return number_replica(self.name) % GROUPS == int(time_seconds // self.ready_most_seconds) % GROUPS

    def can_leave(self, time_seconds: float) -> bool:
        """Return whether it may restart now: in the first half of the others' turn, from its share of it on."""
        passed = time_seconds % self.ready_most_seconds / self.ready_most_seconds
        return not self.has_turn(time_seconds) and FIRST_PART * self.share <= passed < HALF


WIDER: Final = 1.5
"""A closed gate opens when things are half as good again as what closed it."""

BURST_SECONDS: Final = 600.0
PEAK_SECONDS: Final = 60.0
"""How long a peak stays visible (`headroom_gpu_memory_used_peak_bytes`)."""

LEAST_BURST_BYTES: Final = 64 * 2**20
RATE_SECONDS: Final = 120.0
WAIT_SECONDS: Final = 300.0
"""Longer than any client waits for the last request in the queue."""

URGENT_SECONDS: Final = 300.0
"""With minutes left a replica does not stay open for the others."""


class Danger(Struct, frozen=True, kw_only=True):
    """Why traffic should stay away; `urgent` when the end is minutes away."""

    text: str
    urgent: bool = False


class GateHistory(Struct, frozen=True, kw_only=True):
    """Recent memory in use and bursts above it per GPU, and finished requests, each with monotonic seconds."""

    used: tuple[tuple[float, str, int], ...] = ()
    bursts: tuple[tuple[float, str, int], ...] = ()
    finished: tuple[tuple[float, float], ...] = ()


def update_history(before: GateHistory, snapshot: Snapshot) -> GateHistory:
    """Return the history after a sample."""
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
    return GateHistory(used=tuple(used), bursts=tuple(bursts), finished=_add_finished(before, snapshot, now))


def find_danger(
    known: GateHistory, snapshot: Snapshot, values: Values, *, least_seconds: float, closed: bool
) -> Danger | None:
    """Return why traffic should stay away; None while nothing known demands it.

    `least_seconds` is the time that must be left by the lower bound; to open a `closed` gate, more must be left.
    """
    wanted = least_seconds * (WIDER if closed else 1.0)
    times = [(left, name_device(*gpu)) for gpu, left in values.of(catalog.TIME_TO_OOM_LOWER).items()]
    times += [(left, "the host") for left in values.of(catalog.HOST_TIME_TO_OOM_LOWER).values()]
    for left, whose in sorted(times):
        if left < wanted:
            return Danger(text=f"{whose} may be out of memory in {format_duration(left)}", urgent=left < URGENT_SECONDS)
    return _find_burst(known, snapshot, WIDER if closed else 1.0) or _find_queue(known, snapshot)


def _find_burst(known: GateHistory, snapshot: Snapshot, factor: float) -> Danger | None:
    for gpu in snapshot.owned:
        memory, uuid = gpu.reading.memory, gpu.reading.uuid
        most = max((burst for _, whose, burst in known.bursts if whose == uuid), default=0)
        if memory is not None and memory.free_bytes < factor * most:
            free = format_size(memory.free_bytes)
            text = f"{gpu.reading.called} has {free} free, and a burst took {format_size(most)} within ten minutes"
            return Danger(text=text)
    return None


def _find_queue(known: GateHistory, snapshot: Snapshot) -> Danger | None:
    if snapshot.life is not None and snapshot.life.state is EngineState.STALLED:
        return Danger(text="the engine should make progress and makes none")
    waiting = sum_known(each.waiting for each in list_engines(snapshot.page))
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


def _add_finished(before: GateHistory, snapshot: Snapshot, now: float) -> tuple[tuple[float, float], ...]:
    total = count_finished(snapshot.page)
    kept = tuple(each for each in before.finished if now - RATE_SECONDS <= each[0] <= now)
    if total is None or not snapshot.in_service or (kept and total < kept[-1][1]):
        return ()
    return (*kept, (now, total))


CLOSE_AFTER_SECONDS: Final = 10.0
"""Two samples at the default interval: a single one closes nothing."""

OPEN_AFTER_SECONDS: Final = 60.0
OVER: Final = "its cause has ended: the gate opens when that has held for a minute"


class ReadyGate(Struct, frozen=True, kw_only=True):
    """The readiness gate: `reason` is why it is closed, None while it is open; times are monotonic."""

    reason: str | None = None
    closed_at: float | None = None
    bad_since: float | None = None
    good_since: float | None = None
    rests_until: float | None = None
    known: GateHistory = field(default_factory=GateHistory)


def update_ready(
    state: ReadyGate, snapshot: Snapshot, values: Values, rules: Rules, *, ending: str | None = None
) -> ReadyGate:
    """Return the gate after a sample; `ending` is why the engine is to be restarted.

    With `ending` it is closed: a kubelet leaves a container that it ends in its Service, where it would still receive
    requests. Otherwise it is closed for at most `ready_most_seconds`, and then stays open for as long. During its turn
    it stays open unless its own end is minutes away: what affects all replicas at once must not empty their Service.
    Without configuration it never closes.
    """
    if rules.ready_seconds is None:
        return state
    most_seconds = rules.ready_most_seconds
    known, now, closed = update_history(state.known, snapshot), snapshot.monotonic_seconds, state.reason is not None
    if ending is not None:
        return replace(state, known=known, reason=ending, closed_at=now if state.closed_at is None else state.closed_at)
    found = find_danger(known, snapshot, values, least_seconds=rules.ready_seconds, closed=closed)
    if found is not None and not found.urgent and rules.has_turn(snapshot.time_seconds):
        found = None
    state = replace(
        state,
        known=known,
        bad_since=None if found is None else _find_since(state.bad_since, now),
        good_since=None if found is not None else _find_since(state.good_since, now),
    )
    return _update_closed(state, found, now, most_seconds) if closed else _update_open(state, found, now)


def _update_open(state: ReadyGate, found: Danger | None, now: float) -> ReadyGate:
    rests = state.rests_until is not None and now < state.rests_until
    if found is None or state.bad_since is None or rests or now - state.bad_since < CLOSE_AFTER_SECONDS:
        return state
    return replace(state, reason=found.text, closed_at=now)


def _update_closed(state: ReadyGate, found: Danger | None, now: float, most_seconds: float) -> ReadyGate:
    opened = replace(state, reason=None, closed_at=None, bad_since=None)
    if state.closed_at is None or now - state.closed_at >= most_seconds:
        return replace(opened, rests_until=now + most_seconds)
    if found is None and state.good_since is not None and now - state.good_since >= OPEN_AFTER_SECONDS:
        return opened
    return replace(state, reason=OVER if found is None else found.text)


def _find_since(before: float | None, now: float) -> float:
    return now if before is None or before > now else before


HOUR_SECONDS: Final = 3600.0
HOURS: Final = 24
MARGIN_SECONDS: Final = 300.0
"""Time for a drain and the kubelet's reaction before the end may come."""

FAILS_SECONDS: Final = 600.0
"""A kubelet that has not acted by then does not use this gate."""

WEIGHT: Final = 0.02
"""Weight of a sample in an hour's load: it settles after some fifty samples, minutes."""


class LiveGate(Struct, frozen=True, kw_only=True):
    """The liveness gate: `reason` is why the engine is to be restarted, None if not; `life` is when its run began.

    `loads` are the running requests in each hour of the day in UTC, None where unknown. `failed_at` is when it last
    failed, initially when the daemon started: earlier failures are unknown.
    """

    reason: str | None = None
    failed_at: float | None = None
    life: float | None = None
    loads: tuple[float | None, ...] = (None,) * HOURS


def update_live(state: LiveGate, snapshot: Snapshot, values: Values, rules: Rules) -> LiveGate:
    """Return the gate after a sample; unknown values never fail it, and an unconfigured gate never fails.

    Replicas in their turn to stay open do not fail before their end is minutes away.
    """
    if rules.live_seconds is None:
        return state
    now, began = snapshot.monotonic_seconds, None if snapshot.life is None else snapshot.life.began_seconds
    failed_at = now if state.failed_at is None or state.failed_at > now else state.failed_at
    following = replace(state, failed_at=failed_at, life=began, loads=_add_load(state.loads, snapshot))
    if state.reason is not None:
        over = began != state.life or now - failed_at >= FAILS_SECONDS
        return replace(following, reason=None) if over else following
    if now - failed_at < rules.live_seconds:
        return following
    left = _find_time_left(values)
    if left is None or not _is_time(following.loads, snapshot.time_seconds, left, rules):
        return following
    if left > MARGIN_SECONDS and not rules.can_leave(snapshot.time_seconds):
        return following
    text = f"the engine leaks and may be out of memory in {format_duration(left)}: restart while load is low"
    return replace(following, reason=text, failed_at=now)


def _find_time_left(values: Values) -> float | None:
    """Return the lower bound of the time left at the worst leak of a GPU or the host; None without a leak."""
    leaking = [values.value(catalog.TIME_TO_OOM_LOWER, *gpu) for gpu in _find_leaking(values, catalog.LEAK_STATE)]
    if _find_leaking(values, catalog.HOST_LEAK_STATE):
        leaking.append(values.value(catalog.HOST_TIME_TO_OOM_LOWER))
    return min((left for left in leaking if left is not None), default=None)


def _find_leaking(values: Values, states: Metric) -> list[tuple[str, ...]]:
    """Return the labels, without the state, of what is leaking."""
    return [labels[:-1] for labels, held in values.of(states).items() if held and labels[-1] == LeakState.LEAKING]


def _is_time(loads: tuple[float | None, ...], now: float, left: float, rules: Rules) -> bool:
    """Return whether to restart now: replicas are spread over half an hour, and over the last hour by time left.

    The other half of the hour, or two turns of the last, is reserved for their turns to stay open; a replica with only
    minutes left goes although others may be gone.
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


def _add_load(before: tuple[float | None, ...], snapshot: Snapshot) -> tuple[float | None, ...]:
    running = count_running(snapshot.page)
    if running is None:
        return before
    hour = int(snapshot.time_seconds // HOUR_SECONDS) % HOURS
    old = before[hour]
    new = running if old is None else old + WEIGHT * (running - old)
    return (*before[:hour], new, *before[hour + 1 :])


GATES = "gates"


class Gates(Struct, frozen=True, kw_only=True):
    """The state of both gates, open at first."""

    ready: ReadyGate = field(default_factory=ReadyGate)
    live: LiveGate = field(default_factory=LiveGate)

    def reason(self, name: GateName) -> str | None:
        """Return why a gate is closed, None while it is open."""
        return self.ready.reason if name is GateName.READY else self.live.reason


def build_gates(rules: Rules, values: Values) -> Derivation[Gates]:
    """Build the derivation of the gates, which runs after all others have filled `values`."""
    return Derivation(name=GATES, initial=Gates(), step=partial(_step, rules, values))


def _step(rules: Rules, values: Values, state: Gates, snapshot: Snapshot) -> tuple[Gates, tuple[Sample, ...]]:
    dying = update_live(state.live, snapshot, values, rules)
    state = Gates(ready=update_ready(state.ready, snapshot, values, rules, ending=dying.reason), live=dying)
    configured = {GateName.LIVE: rules.live_seconds, GateName.READY: rules.ready_seconds}
    return state, tuple(
        Sample(catalog.GATE_OPEN, (str(name),), float(state.reason(name) is None))
        for name, seconds in configured.items()
        if seconds is not None
    )
