"""Whether the pod should stand in its Service: closed while memory is about to run out, and never for long."""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.gates.danger import Danger, Watched, danger, watched
from vllm_headroom.derive.gates.rules import Rules
from vllm_headroom.model import Snapshot, Values

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
