"""What is kept from sleep to sleep: cache is gone by then, and what has grown of the rest has leaked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tests.samples import A_GPU, engine, gpu, page, snapshot, values
from tests.unit.derive.leak.stretches import BASE, HOUR, LEAK, RATE, STEP, TOTAL, Shape, flat, leak, segments
from vllm_headroom import catalog
from vllm_headroom.derive.leak.leak import LeakMemory, derive_leaks
from vllm_headroom.model import EngineStatus, Sample, Snapshot
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import EngineState, LeakState

KEPT = 2_000 * MIB
EVERY, ASLEEP = 480.0, 120.0

Sleeps = Callable[[float], bool]


def cache(seconds: float) -> float:
    """Return what is cached: it fills in every rollout again, by another amount."""
    rollout, since = divmod(seconds, EVERY)
    return segments((400 + rollout * 811 % 1600) * MIB * min(1.0, since / 300))


def in_rollouts(seconds: float) -> bool:
    return seconds % EVERY >= EVERY - ASLEEP


def looks(hours: float, lost: Shape, cached: Shape, sleeps: Sleeps, *, started: float = 0.0) -> Iterator[Snapshot]:
    """Yield the readings of an engine that leaks while it serves; what is cached is given back as it falls asleep."""
    awake_seconds = 0.0
    for turn in range(int(hours * HOUR / STEP)):
        seconds = started + turn * STEP
        asleep = sleeps(seconds)
        awake_seconds += 0.0 if asleep else STEP
        size = int(lost(awake_seconds) + (KEPT if asleep else BASE + cached(seconds)))
        engine_reading = engine(running=0.0 if asleep else 80.0, finished_total=awake_seconds * RATE, awake=not asleep)
        gpu_sample = gpu(total=TOTAL, used=size, engine=size, other=0)
        engine_reading = replace(engine_reading, started_at_seconds=1.0 + started)
        yield snapshot(
            at=seconds,
            engines=page(engine_reading),
            gpus=(gpu_sample,),
            engine_status=EngineStatus(state=EngineState.SERVING),
        )


def derive_over_time(
    snapshots: Iterator[Snapshot], state: LeakMemory | None = None
) -> Iterator[tuple[LeakMemory, tuple[Sample, ...]]]:
    state = state or LeakMemory()
    for tick_snapshot in snapshots:
        state, samples = derive_leaks(state, tick_snapshot)
        yield state, samples


def states(snapshots: Iterator[Snapshot], state: LeakMemory | None = None) -> list[LeakState]:
    """Return the state after each reading, but for those asleep."""
    shown = (values(samples, catalog.LEAK_STATE) for _, samples in derive_over_time(snapshots, state))
    leak_states = [
        next(LeakState(labels[-1]) for labels, value in state_values.items() if value) for state_values in shown
    ]
    return [leak_state for leak_state in leak_states if leak_state is not LeakState.ASLEEP]


def test_a_leak_beneath_a_cache_that_each_sleep_empties_is_found_and_stays_one() -> None:
    leak_states = states(looks(7, leak, cache, in_rollouts))

    first_index = leak_states.index(LeakState.LEAKING)
    assert first_index < 0.8 * len(leak_states)
    assert leak_states[-1] is LeakState.LEAKING


def test_its_figures_are_those_of_what_is_kept() -> None:
    *_, (_, last_samples) = derive_over_time(looks(7, leak, cache, in_rollouts))

    awake = 1 - ASLEEP / EVERY
    assert values(last_samples, catalog.LEAK_RATE)[A_GPU] == pytest.approx(LEAK * RATE * awake, rel=0.1)


def test_a_cache_that_each_sleep_empties_is_no_leak() -> None:
    assert not {LeakState.GROWING, LeakState.LEAKING} & set(states(looks(7, flat, cache, in_rollouts)))


def test_the_room_is_what_is_left_awake() -> None:
    *_, (state, _) = derive_over_time(looks(1, leak, flat, in_rollouts))

    assert state.asleep["GPU-a"].history.capacity_bytes == pytest.approx(KEPT + TOTAL - BASE, abs=500 * MIB)


def test_where_another_process_may_hold_a_part_what_is_kept_says_nothing() -> None:
    def crowded(snapshots: Iterator[Snapshot]) -> Iterator[Snapshot]:
        for tick_snapshot in snapshots:
            yield replace(
                tick_snapshot,
                gpus=tuple(replace(gpu, engine_bytes=None, process_count=2) for gpu in tick_snapshot.owned_gpus),
            )

    *_, (state, _) = derive_over_time(crowded(looks(1, leak, cache, in_rollouts)))
    leak_states = states(crowded(looks(3.2, leak, flat, twice)))

    assert state.asleep["GPU-a"].history.anchor is None
    assert LeakState.LEAKING in leak_states, "the card fills, whoever holds it"


def test_another_run_has_kept_nothing_yet() -> None:
    *_, (state, _) = derive_over_time(looks(1, leak, cache, in_rollouts))
    assert set(state.asleep) == {"GPU-a"}

    *_, (anew, _) = derive_over_time(looks(0.02, leak, cache, in_rollouts, started=HOUR), state)

    assert not anew.asleep


def twice(seconds: float) -> bool:
    return HOUR / 4 <= seconds < HOUR / 3 or 2.5 * HOUR <= seconds < 2.6 * HOUR


def warm(seconds: float) -> float:
    """Return what is cached: all but a little comes back after a sleep."""
    return 2_000.0 * MIB if seconds < 2.5 * HOUR else 0.0


def test_what_grew_awake_counts_on_after_a_sleep_before_an_alarm_and_under_one() -> None:
    """Begun again, the alarm would come half an hour later, and be gone when it is held no longer."""
    leak_states = states(looks(4, leak, flat, lambda seconds: seconds % HOUR >= 0.95 * HOUR))

    first_index = leak_states.index(LeakState.LEAKING)
    assert first_index <= 1.7 * HOUR / STEP
    assert set(leak_states[first_index:]) == {LeakState.LEAKING}


def over_a_sleep(change: Callable[[Snapshot], Snapshot]) -> tuple[list[LeakState], list[LeakState]]:
    """Return what is said before the second sleep and after it, from which on the readings are changed."""
    all_snapshots = list(looks(3.2, leak, warm, twice))
    falls = int(2.5 * HOUR / STEP)
    leak_states = states(iter([*all_snapshots[:falls], *map(change, all_snapshots[falls:])]))
    readings_after = len(all_snapshots) - int(2.6 * HOUR / STEP)
    return leak_states[:-readings_after], leak_states[-readings_after:]


def test_an_alarm_ends_with_a_sleep_that_gave_back_what_had_grown() -> None:
    def given_back(sample: Snapshot) -> Snapshot:
        (sleeping_gpu,) = sample.owned_gpus
        assert sleeping_gpu.engine_bytes is not None
        size = KEPT if sleeping_gpu.engine_bytes < BASE / 2 else BASE
        return replace(sample, gpus=(gpu(total=TOTAL, used=size, engine=size, other=0),))

    states_before, states_after = over_a_sleep(given_back)

    assert states_before[-1] is LeakState.LEAKING
    assert LeakState.LEAKING not in states_after[int(600 / STEP) :]


def test_what_is_kept_before_the_engine_has_worked_is_reported_and_measures_nothing() -> None:
    """Its first use of kernels takes what the sleeps after it keep as well."""
    *asleep, awake = looks(0.1, flat, flat, lambda seconds: seconds < 0.1 * HOUR - STEP)
    unserved_snapshots = (
        replace(tick_snapshot, engine_status=EngineStatus(state=EngineState.ASLEEP, is_in_service=False))
        for tick_snapshot in asleep
    )
    *_, (memory_before, asleep_samples) = derive_over_time(unserved_snapshots)
    *_, (memory_after, _) = derive_over_time(iter([awake]), memory_before)

    assert values(asleep_samples, catalog.SLEEP_RESIDUE) == {A_GPU: KEPT}
    assert values(asleep_samples, catalog.LEAK_STATE)[(*A_GPU, "asleep")] == 1.0
    assert memory_after.sleep.least_bytes == {"GPU-a": KEPT}
    assert not memory_after.asleep
