"""Whether the pod should stand in its Service: closed while memory is about to run out, and never for long."""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.gates.rules import Rules
from vllm_headroom.derive.page_facts import engines, finished, together
from vllm_headroom.model import Snapshot, Values, called
from vllm_headroom.units import duration, size
from vllm_headroom.vocabulary import EngineState

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
