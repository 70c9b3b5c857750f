"""Where it grows: what is steady counts before what comes in steps, and what torch can give back is no place."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.derive.leak.probed import LEAK, SECONDS, Grown, follow, followed, look, tensors
from vllm_headroom.derive.leak.facts import Estimate
from vllm_headroom.derive.leak.inside import InsideTracks, find_location
from vllm_headroom.vocabulary import LeakLocation


def estimate(bytes_per_second: float, leaked_bytes: float) -> Estimate:
    return Estimate(
        bytes_per_second=bytes_per_second,
        lower=0,
        upper=0,
        bytes_per_request=None,
        by_requests=False,
        leaked_bytes=leaked_bytes,
        pace=None,
        fastest=None,
    )


@pytest.mark.parametrize("place", range(3))
def test_growth_is_found_in_tensors_and_outside_and_located_everywhere(place: int) -> None:
    def grown(at: int) -> Grown:
        parts = [0.0, 0.0, 0.0]
        parts[place] = at * LEAK
        return parts[0], parts[1], parts[2]

    track = followed(60, grown)["GPU-a"]

    assert find_location(estimate(LEAK / SECONDS, 40.0 * LEAK), track) is list(LeakLocation)[place]
    assert find_location(estimate(LEAK / SECONDS, 1e15), track) is list(LeakLocation)[place]


def test_what_demand_leaves_cached_is_no_place() -> None:
    """The allocator's cache grows by more than what leaks, and as steadily."""
    tracks: InsideTracks = {}
    for at in range(200):
        tracks = follow(tracks, look(at, (0, 0, at * 100_000.0), cached=at * 1e6))

    assert find_location(estimate(20_000, 12e6), tracks["GPU-a"]) is LeakLocation.OUTSIDE_TORCH


@pytest.mark.parametrize("place", range(3))
def test_what_is_used_for_the_first_time_is_not_where_it_leaks(place: int) -> None:
    """Tensors grow slowly and evenly, elsewhere more is added in two steps."""

    def grown(at: int) -> Grown:
        parts = [at * 40_000.0, 0.0, 0.0]
        parts[place] += 100e6 * ((at > 50) + (at > 120))
        return parts[0], parts[1], parts[2]

    assert find_location(estimate(8_000, 8e6), followed(200, grown)["GPU-a"]) is LeakLocation.TENSORS


def test_lumps_are_where_most_is_added_in_all() -> None:
    track = followed(200, lambda at: (128e6 * (at // 70), at * 1_000.0, 0))["GPU-a"]

    assert find_location(estimate(256e6 / 1000, 256e6), track) is LeakLocation.TENSORS


def test_small_tensors_that_keep_large_segments_are_fragmentation() -> None:
    track = followed(200, lambda at: (at * 130_000.0, at * 2_400_000.0, 0))["GPU-a"]

    assert find_location(estimate(26_000, 25e6), track) is LeakLocation.FRAGMENTATION


def test_what_has_just_begun_is_located_by_the_whole_of_it() -> None:
    track = followed(60, lambda at: (max(0, at - 50) * 50e6, 0, 0))["GPU-a"]

    assert find_location(estimate(1e7, 1e8), track) is LeakLocation.TENSORS


def test_it_is_located_however_seldom_one_looks() -> None:
    tracks: InsideTracks = {}
    for at in range(40):
        tracks = follow(tracks, look(at, tensors(at), seconds=300.0))

    assert find_location(estimate(LEAK / 300, 30.0 * LEAK), tracks["GPU-a"]) is LeakLocation.TENSORS


def test_where_nothing_is_known_nothing_is_located() -> None:
    flat = followed(60, lambda _: (0, 0, 0))["GPU-a"]
    leak_estimate = estimate(1e5, 1e7)

    assert find_location(None, flat) is None
    assert find_location(leak_estimate, None) is None
    assert find_location(leak_estimate, flat) is None
    assert find_location(leak_estimate, replace(flat, marks=())) is None
    assert find_location(replace(leak_estimate, bytes_per_second=0.0), flat) is None
