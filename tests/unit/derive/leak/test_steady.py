"""Runs of small rises: what they are called, and what is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Final

import pytest

from vllm_headroom.derive.leak.facts import MIB, Verdict
from vllm_headroom.derive.leak.inside import LEAKING_SECONDS, MOST_POINTS, Floor, Steady, estimated, followed

BLOCK: Final = 20.0
RPS: Final = 10.0
EACH: Final = 12_800.0
"""Bytes a request, as in the post-mortem: 2.56 MB a block."""

BASE: Final = 70e9


def floors(count: int, grown: Callable[[int], float], running: Callable[[int], float] = lambda _: 30.0) -> list[Floor]:
    return [Floor(BLOCK * n, BLOCK * n * RPS, running(n), BASE + grown(n)) for n in range(count)]


def run(blocks: Iterable[Floor]) -> Steady:
    steady = Steady()
    for block in blocks:
        steady = followed(steady, block)
    return steady


def leak(block: int) -> float:
    return block * BLOCK * RPS * EACH


def test_a_leak_is_growing_at_25_megabytes_and_leaking_at_250() -> None:
    said: dict[Verdict, float] = {}
    steady = Steady()
    for block in floors(120, leak):
        steady = followed(steady, block)
        said.setdefault(steady.verdict, block.held_bytes - BASE)

    assert said[Verdict.GROWING] <= 25e6
    assert said[Verdict.LEAKING] <= 250e6


def test_its_figures_are_those_of_the_leak() -> None:
    found = estimated(run(floors(100, leak)), 1e9)

    assert found is not None
    assert found.bytes_per_second == pytest.approx(RPS * EACH, rel=0.01)
    assert found.bytes_per_request == pytest.approx(EACH, rel=0.01)
    assert found.leaked_bytes == pytest.approx(leak(99))
    assert found.lower < RPS * EACH < found.upper
    assert found.oom_seconds == pytest.approx(1e9 / (RPS * EACH), rel=0.01)
    assert found.oom_seconds_lower is not None
    assert found.oom_seconds_lower < 1e9 / (RPS * EACH)
    assert estimated(run(floors(3, leak)), 1e9) is None


def test_kernels_that_are_used_for_the_first_time_meanwhile_do_not_move_the_rate_beyond_its_interval() -> None:
    def beside(block: int) -> float:
        return leak(block) + 32 * MIB * sum(block > used for used in (12, 30, 44))

    found = estimated(run(floors(100, beside)), None)

    assert found is not None
    assert found.bytes_per_second == pytest.approx(RPS * EACH, rel=0.05)
    assert found.lower < RPS * EACH < found.upper < 2 * RPS * EACH


@pytest.mark.parametrize("seed", range(20))
def test_uneven_arrivals_hide_no_leak(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - a test draws the same numbers every time
    done, blocks = 0.0, []
    for n in range(20):
        blocks.append(Floor(BLOCK * n, done, 30.0, BASE + done * EACH))
        done += max(0.0, rng.gauss(BLOCK * RPS, 60))

    assert run(blocks).verdict is Verdict.GROWING


@pytest.mark.parametrize("seed", range(20))
def test_a_cache_that_fills_by_megabytes_at_a_time_is_not_called_growing(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - a test draws the same numbers every time
    grown, steady = 0.0, Steady()
    for n in range(100):
        steady = followed(steady, Floor(BLOCK * n, BLOCK * n * RPS, 30.0, BASE + grown))
        grown += sum(rng.lognormvariate(0, 0.6) * 2 * MIB for _ in range(rng.randint(1, 5)))
        assert steady.verdict is Verdict.NONE


def test_a_larger_step_among_small_ones_ends_nothing() -> None:
    steady = run(floors(40, lambda n: leak(n) + (n > 20) * 30 * MIB))

    assert steady.verdict is Verdict.GROWING
    assert len(steady.points) == 40


def test_memory_that_is_given_back_ends_the_run() -> None:
    assert run([*floors(20, leak), Floor(400, 4000, 30, BASE + leak(19) - MIB)]) == Steady(
        latest=(Floor(400, 4000, 30, BASE + leak(19) - MIB),), points=(Floor(400, 4000, 30, BASE + leak(19) - MIB),)
    )


def test_growth_that_stops_while_work_goes_on_ends_the_run() -> None:
    assert run(floors(24, lambda n: leak(min(n, 19)))).verdict is Verdict.NONE


def test_a_pause_without_requests_ends_nothing() -> None:
    before = floors(20, leak)
    pause = [Floor(before[-1].seconds + BLOCK * n, before[-1].requests, 0, before[-1].held_bytes) for n in range(1, 90)]
    after = [
        Floor(pause[-1].seconds + BLOCK * n, before[-1].requests + BLOCK * RPS * n, 30, BASE + leak(19 + n))
        for n in range(1, 4)
    ]

    assert run([*before, *pause]).verdict is Verdict.GROWING
    assert len(run([*before, *pause, *after]).points) == 23


def test_memory_that_follows_the_running_requests_is_no_leak() -> None:
    ramp = floors(60, leak, running=lambda n: 10.0 + 2 * n)

    assert run(ramp).verdict is Verdict.NONE


def test_growth_that_fades_is_not_called_leaking() -> None:
    fading = run(floors(150, lambda n: leak(100) * (1 - 0.97**n)))

    assert fading.points[-1].seconds - fading.points[0].seconds > LEAKING_SECONDS
    assert fading.verdict is not Verdict.LEAKING


def test_growth_without_counted_requests_is_told_by_time() -> None:
    blocks = [Floor(block.seconds, 0.0, 0.0, block.held_bytes) for block in floors(100, leak)]
    found = estimated(run(blocks), None)

    assert run(blocks).verdict is Verdict.LEAKING
    assert found is not None
    assert (found.bytes_per_request, found.oom_seconds, found.by_requests) == (None, None, False)


def test_what_is_remembered_is_bounded() -> None:
    steady = run(floors(5000, leak))

    assert len(steady.points) <= MOST_POINTS
    assert (steady.points[0].seconds, steady.points[-1].seconds) == (0.0, 4999 * BLOCK)
    assert steady.verdict is Verdict.LEAKING
