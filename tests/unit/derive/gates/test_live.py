"""When an engine that leaks is begun anew."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from tests.samples import A_GPU, engine, page, snapshot
from vllm_headroom import catalog
from vllm_headroom.derive.gates import FAILS_SECONDS, HOUR_SECONDS, MARGIN_SECONDS, Live, Rules, live
from vllm_headroom.model import Life, Sample, Snapshot, Values
from vllm_headroom.vocabulary import EngineState, LeakState

DAY: Final = 24 * HOUR_SECONDS
MIDNIGHT: Final = 1_760_000_000.0 // DAY * DAY
BETWEEN: Final = 6 * HOUR_SECONDS
TURN: Final = 900.0


def rules(name: str = "vllm-0") -> Rules:
    return Rules(ready_seconds=None, ready_most_seconds=TURN, live_seconds=BETWEEN, name=name)


STEP: Final = 60.0


def load(hour: float) -> float:
    """Return requests that run at an hour of the day, the fewest half past four in the morning."""
    return 20.0 + 2.0 * abs((hour - 4.5 + 12.0) % 24.0 - 12.0)


def at(seconds: float, *, life: float = 1.0) -> Snapshot:
    running = load(seconds % DAY / HOUR_SECONDS)
    made = replace(snapshot(at=seconds, engines=page(engine(running=running))), time_seconds=MIDNIGHT + seconds)
    return replace(made, life=Life(state=EngineState.SERVING, began_seconds=life))


def leak(seconds: float, state: LeakState = LeakState.LEAKING) -> Values:
    return Values([Sample(catalog.LEAK_STATE, (*A_GPU, state), 1.0), Sample(catalog.TIME_TO_OOM_LOWER, A_GPU, seconds)])


QUIET: Final = Values(())


def follow(
    until: float,
    *,
    end: float,
    name: str = "vllm-0",
    state: Live | None = None,
    begin: float = 0.0,
    leaks: LeakState = LeakState.LEAKING,
    known_from: float = 0.0,
) -> tuple[float | None, Live]:
    """Return when the gate first fails, and its state; the leak is seen from `begin` on and ends at `end`."""
    following, now = state or Live(), known_from
    while now < until:
        values = leak(end - now, leaks) if now >= begin else QUIET
        following = live(following, at(now), values, rules(name))
        if following.reason is not None:
            return now, following
        now += STEP
    return None, following


def test_a_leak_of_the_hosts_memory_is_as_bad() -> None:
    leaking = (Sample(catalog.HOST_LEAK_STATE, ("worker", LeakState.LEAKING), 1.0),)
    near = Sample(catalog.HOST_TIME_TO_OOM_LOWER, (), 200.0)
    before = live(Live(), at(0.0), QUIET, rules())

    def failed(*samples: Sample) -> bool:
        seen = live(before, at(BETWEEN), Values(samples), rules())
        return seen.reason is not None

    assert failed(*leaking, near)
    assert not failed(near)
    assert not failed(*leaking)


def test_a_healthy_engine_lives() -> None:
    assert follow(3 * DAY, end=9e9, begin=9e9)[0] is None


def test_a_leak_is_ended_at_the_quietest_hour_before_its_end() -> None:
    failed, state = follow(3 * DAY, end=2.5 * DAY, begin=DAY + 10 * HOUR_SECONDS)

    assert failed is not None
    assert 4 * HOUR_SECONDS <= failed % DAY < 5 * HOUR_SECONDS
    assert failed < 2.5 * DAY
    assert state.reason is not None
    assert state.reason.startswith("the engine leaks and may be out of memory in")


def test_replicas_do_not_fall_together() -> None:
    moments = {
        follow(3 * DAY, end=2.5 * DAY, begin=DAY + 10 * HOUR_SECONDS, name=f"vllm-{each}")[0] for each in range(8)
    }

    assert None not in moments
    assert len(moments) == 8


def test_with_less_than_an_hour_left_each_goes_in_another_moment_of_the_others_turns() -> None:
    for phase in range(0, int(2 * TURN), 300):
        end, moments = 1.5 * DAY + phase, set()
        for name in ("vllm-1", "vllm-2", "vllm-3", "vllm-5"):
            failed, _ = follow(3 * DAY, end=end, begin=end - HOUR_SECONDS - MARGIN_SECONDS, name=name)

            assert failed is not None
            assert end - failed > MARGIN_SECONDS
            assert rules(name).may_leave(MIDNIGHT + failed)
            moments.add(failed)
        assert len(moments) >= 3


def test_of_two_that_are_late_one_stays_until_the_other_is_back() -> None:
    end = 1.5 * DAY
    first, second = (follow(3 * DAY, end=end, begin=end - 1200.0, name=f"vllm-{number}")[0] for number in (1, 2))

    assert first is not None
    assert second is not None
    assert abs(first - second) >= TURN / 2


def test_minutes_before_its_end_none_stays() -> None:
    for number in range(8):
        failed, _ = follow(3 * DAY, end=1.5 * DAY, begin=1.5 * DAY - 290.0, name=f"vllm-{number}")

        assert failed is not None
        assert failed < 1.5 * DAY - 200.0


def test_growth_that_is_not_sure_ends_nothing() -> None:
    assert follow(3 * DAY, end=2.5 * DAY, begin=DAY, leaks=LeakState.GROWING)[0] is None


def test_hours_that_were_never_seen_are_not_known_to_be_busier() -> None:
    begin = 10 * HOUR_SECONDS

    assert follow(13 * HOUR_SECONDS, end=1.5 * DAY, begin=begin, known_from=9 * HOUR_SECONDS)[0] is None


def test_a_daemon_that_just_began_fails_nothing_for_a_while() -> None:
    failed, _ = follow(BETWEEN, end=BETWEEN, begin=0.0)

    assert failed is None


def test_it_fails_until_a_new_life_begins_and_not_again_soon() -> None:
    failed, state = follow(3 * DAY, end=2.5 * DAY, begin=DAY + 10 * HOUR_SECONDS)
    assert failed is not None

    still = live(state, at(failed + STEP), leak(9e5), rules())
    anew = live(still, at(failed + 2 * STEP, life=2.0), QUIET, rules())

    assert still.reason is not None
    assert anew.reason is None
    assert (
        follow(failed + BETWEEN - HOUR_SECONDS, end=failed + 400, begin=0.0, state=anew, known_from=failed)[0] is None
    )


def test_a_kubelet_that_does_not_act_is_not_asked_for_ever() -> None:
    failed, state = follow(3 * DAY, end=2.5 * DAY, begin=DAY + 10 * HOUR_SECONDS)
    assert failed is not None

    after = live(state, at(failed + FAILS_SECONDS), leak(9e5), rules())

    assert after.reason is None
