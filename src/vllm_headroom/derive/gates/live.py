"""When an engine that leaks is best begun anew: at the lowest load before its end, one replica after the other."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.gates.rules import Rules
from vllm_headroom.derive.page_facts import running_requests
from vllm_headroom.model import Metric, Snapshot, Values
from vllm_headroom.units import duration
from vllm_headroom.vocabulary import LeakState

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
