from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_headroom.units import MIB
from vllm_headroom_tools.demo.world import (
    BUDGET_MIB,
    MAX_RUNNING,
    MAX_USED_BYTES,
    TABLE,
    World,
)

HOUR = 3_600

Picture = tuple[int, int, int, int, int, int]


def world(scenario: str, seed: int = 0) -> World:
    return World(TABLE[scenario], seed)


def watch(world: World, until_seconds: int, every_seconds: int = 5) -> Iterator[World]:
    for seconds in range(0, until_seconds + 1, every_seconds):
        world.advance(seconds)
        yield world


def picture(world: World) -> Picture:
    traffic = world.engine
    return (
        world.used_bytes,
        world.engine.number,
        traffic.finished_total,
        traffic.waiting,
        traffic.prefix_hits_total,
        world.active_requests,
    )


@pytest.mark.parametrize("scenario", list(TABLE))
def test_the_world_follows_from_scenario_and_seed_however_it_is_asked(scenario: str) -> None:
    in_one_leap, in_small_steps, other_seed = world(scenario, 7), world(scenario, 7), world(scenario, 8)
    in_one_leap.advance(3 * HOUR + 0.9)
    for tenth in range(0, 30 * HOUR + 10, 7):
        in_small_steps.advance(tenth / 10)
    in_small_steps.advance(3 * HOUR + 0.2)
    other_seed.advance(3 * HOUR)

    assert picture(in_one_leap) == picture(in_small_steps)
    assert picture(other_seed) != picture(in_one_leap)


def test_the_world_never_goes_back() -> None:
    now = world("healthy")
    now.advance(100)
    earlier_picture = picture(now)
    now.advance(50)

    assert now.seconds == 100
    assert picture(now) == earlier_picture


def test_the_leak_is_all_that_tells_a_leaking_engine_from_a_healthy_one() -> None:
    leaking, healthy = world("leak"), world("healthy")
    finished_before = leaking.engine.finished_total

    assert leaking.engine_bytes == healthy.engine_bytes

    leaking.advance(6 * HOUR)
    healthy.advance(6 * HOUR)
    finished = leaking.engine.finished_total - finished_before

    assert leaking.engine.finished_total == healthy.engine.finished_total
    assert (leaking.engine_bytes - healthy.engine_bytes) / finished == pytest.approx(12_800, rel=0.02)
    assert leaking.engine_bytes % (2 * MIB) == healthy.engine_bytes % (2 * MIB)


def test_a_leaking_engine_dies_when_the_card_is_full_and_leaks_again() -> None:
    now = world("leak")
    lives: dict[int, list[int]] = {}
    starts: dict[int, float] = {}
    down_seconds = 0
    for seen_world in watch(now, 30 * HOUR, 1):
        starts[seen_world.engine.number] = seen_world.engine.started_seconds
        down_seconds += not seen_world.is_serving
        if seen_world.is_serving:
            lives.setdefault(seen_world.engine.number, []).append(seen_world.engine_bytes)

    assert len(lives) >= 3
    assert starts[0] < starts[1] < starts[2]
    assert MAX_USED_BYTES - 200 * MIB < max(lives[0]) <= MAX_USED_BYTES
    assert lives[1][0] < lives[0][0]
    assert max(lives[1]) > MAX_USED_BYTES - 200 * MIB
    assert 60 <= down_seconds / (len(lives) - 1) <= 122


def test_bursts_queue_preempt_and_leave_their_peak_behind() -> None:
    bursting, healthy = world("burst"), world("healthy")
    waiting, kv_used = [], []
    for seen_world in watch(bursting, 2 * HOUR, 1):
        waiting.append(seen_world.engine.waiting)
        kv_used.append(seen_world.engine.kv_used_ratio)
    healthy.advance(2 * HOUR)

    assert max(waiting) > MAX_RUNNING
    assert sum(1 for queued in waiting if queued == 0) > len(waiting) / 2
    assert 0.95 < max(kv_used) <= 1.0
    assert bursting.engine.preemptions_total > 0
    assert healthy.engine.preemptions_total == 0
    assert bursting.engine_bytes > healthy.engine_bytes + 100 * MIB


def test_a_neighbour_comes_and_goes_and_leaves_the_engine_alone() -> None:
    together, alone = world("neighbour"), world("healthy")
    sizes = set()
    visits = set()
    for seen_world in watch(together, 12 * HOUR, 60):
        sizes.add(seen_world.neighbour_bytes // MIB)
        visits.add(seen_world.neighbours.number if seen_world.neighbour_bytes else None)
        alone.advance(seen_world.seconds)

        assert seen_world.engine_bytes == alone.engine_bytes
        assert seen_world.used_bytes - alone.used_bytes == seen_world.neighbour_bytes

    assert {None, 1, 2} <= visits
    assert 0 in sizes
    assert 1_024 < max(sizes) <= 3 * 1_024
    assert any(450 <= size < 1_000 for size in sizes)


def test_a_restart_frees_the_memory_loads_again_and_begins_to_count_again() -> None:
    now = world("restart")
    first_engine = now.engine
    while now.engine is first_engine:
        now.advance(now.seconds + 1)
    died = now.seconds

    assert 1.5 * HOUR < died < 2.5 * HOUR
    assert now.engine_bytes == 0
    assert now.engine.finished_total == 0
    assert now.engine.first_pid > first_engine.first_pid + 2

    loading = []
    while not now.is_serving:
        now.advance(now.seconds + 1)
        loading.append(now.engine_bytes)
    now.advance(now.seconds + 10)

    assert 60 <= now.engine.serving_seconds - died <= 120
    assert now.engine.started_seconds > died
    assert loading == sorted(loading)
    assert len(set(loading)) > 20
    assert now.engine_bytes > 0.97 * BUDGET_MIB * MIB
    assert 0 < now.engine.finished_total < 1_000
