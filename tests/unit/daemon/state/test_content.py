from __future__ import annotations

import pytest

from tests.samples import failure, gpu
from tests.unit.daemon.state.engine import (
    ALARM_STEPS,
    GIB,
    STEP_SECONDS,
    after,
    count_held_bytes,
    device,
    followed,
    make_snapshot,
    make_state,
    reading,
)
from vllm_headroom.daemon.state.file import STATE
from vllm_headroom.daemon.state.saved import DerivationStates, restore_memory
from vllm_headroom.derive.leak.inside import move_track
from vllm_headroom.derive.stability import LoadState
from vllm_headroom.model import Snapshot
from vllm_headroom.vocabulary import Source

SHIFT = 123_456.0
"""How much further the next process's monotonic clock is; a whole number, so that sums stay exact."""


@pytest.mark.parametrize("stopped", [10, 620, 1100])
@pytest.mark.parametrize("shift", [SHIFT, -4096.0])
def test_the_samples_after_a_restart_are_those_of_a_process_that_never_stopped(stopped: int, shift: float) -> None:
    saved = make_state(after(make_snapshot(step) for step in range(1, stopped + 1)), make_snapshot(stopped))
    steps = range(stopped + 1, stopped + 121)

    memory = restore_memory(STATE.decode(STATE.encode(saved)), make_snapshot(stopped + 1, shift=shift))
    through = [samples for _, samples in followed(memory, (make_snapshot(step, shift=shift) for step in steps))]
    unbroken = [samples for _, samples in followed(saved.memory, (make_snapshot(step) for step in steps))]

    assert through == unbroken


def test_what_was_kept_asleep_is_taken_up() -> None:
    def rollout(step: int, shift: float = 0.0) -> Snapshot:
        asleep = step % 96 >= 72
        gpus = (gpu(total=60 * GIB, used=GIB + count_held_bytes(step) // 16 if asleep else count_held_bytes(step)),)
        return make_snapshot(step, shift=shift, engines=(reading(step, awake=not asleep),), gpus=gpus)

    saved = make_state(after(map(rollout, range(1, 600))), rollout(599))
    memory = restore_memory(STATE.decode(STATE.encode(saved)), rollout(600, SHIFT))

    through = after((rollout(step, SHIFT) for step in range(600, 900)), memory).leak.asleep["GPU-a"]
    unbroken = after(map(rollout, range(600, 900)), saved.memory).leak.asleep["GPU-a"]
    assert through == move_track(unbroken, SHIFT)
    assert len(through.history.rings[0].blocks) > 1


def test_the_time_the_process_was_down_is_a_gap(alarmed: DerivationStates) -> None:
    saved = make_state(alarmed, make_snapshot(ALARM_STEPS))
    back = ALARM_STEPS + 720

    memory = restore_memory(saved, make_snapshot(back, shift=SHIFT))
    track = after([make_snapshot(back, shift=SHIFT)], memory).leak.gpus["GPU-a"]
    unbroken = after([make_snapshot(back)], alarmed).leak.gpus["GPU-a"]

    assert track == move_track(unbroken, SHIFT)
    assert track.clock.now_seconds == alarmed.leak.gpus["GPU-a"].clock.now_seconds + 720 * STEP_SECONDS


def test_a_clock_set_back_is_no_gap(alarmed: DerivationStates) -> None:
    saved = make_state(
        alarmed, make_snapshot(ALARM_STEPS), saved_at_seconds=make_snapshot(ALARM_STEPS + 20).time_seconds
    )

    track = restore_memory(saved, make_snapshot(ALARM_STEPS, shift=SHIFT)).leak.gpus["GPU-a"]

    assert track.clock.snapshot_seconds == make_snapshot(ALARM_STEPS, shift=SHIFT).monotonic_seconds


def test_load_that_was_not_seen_is_not_called_level(alarmed: DerivationStates) -> None:
    saved = make_state(alarmed, make_snapshot(ALARM_STEPS))

    assert restore_memory(saved, make_snapshot(ALARM_STEPS + 12)).leak.load.is_stable is True
    assert restore_memory(saved, make_snapshot(ALARM_STEPS + 13)).leak.load == LoadState()


def test_only_gpus_that_are_visible_are_taken_up() -> None:
    both = [make_snapshot(step, gpus=(device(step, "GPU-a"), device(step, "GPU-b"))) for step in range(1, 100)]
    saved = make_state(after(both), both[-1])
    assert set(saved.memory.baseline.bands) == {"GPU-a", "GPU-b"}

    memory = restore_memory(saved, make_snapshot(100, gpus=(device(100, "GPU-b"), device(100, "GPU-c"))))

    assert set(memory.leak.gpus) == {"GPU-b"}
    assert set(memory.baseline.bands) == {"GPU-b"}
    assert set(memory.leak.host) == {"worker"}
    assert restore_memory(saved, make_snapshot(100, gpus=failure(Source.NVML))).leak.gpus == {}
