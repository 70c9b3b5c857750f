"""Tensors, fragments or outside torch: the track of what is inside, through lives, sleep and silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from tests.samples import A_GPU, engine, failure, gpu, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.leak.facts import Estimate, Track, Verdict
from vllm_headroom.derive.leak.gpus import Tracks, gpu_leaks
from vllm_headroom.derive.leak.inside import MOST_MARKS, InsideTracks, insides, location, moved, sharpened
from vllm_headroom.derive.leak.steady import estimated
from vllm_headroom.model import Inside, Life, Snapshot
from vllm_headroom.vocabulary import EngineState, LeakLocation, Source

SECONDS: Final = 5.0
LEAK: Final = 640_000
"""The post-mortem's leak, in each reading of five seconds."""

BASE: Final = 70 * 10**9
TOTAL: Final = 85 * 10**9

Grown = tuple[float, float, float]
"""What tensors, fragments and what is outside torch have grown by."""


def look(at: int, grown: Grown, *, awake: bool = True, restarts: int = 0, known: bool = True) -> Snapshot:
    tensors, fragments, outside = (int(part) for part in grown)
    allocated, reserved = BASE + tensors, BASE + 10**9 + tensors + fragments
    held = reserved + 10**9 + outside
    inside = Inside(allocated_bytes=allocated, reserved_bytes=reserved) if known else None
    seen = snapshot(
        at=at * SECONDS,
        engines=page(engine(running=30.0, finished_total=at * 50.0, awake=awake)),
        gpus=(gpu(total=TOTAL, used=held, inside=inside),),
    )
    return replace(seen, life=Life(state=EngineState.SERVING, restarts=restarts))


def followed(looks: int, grown: Callable[[int], Grown], tracks: InsideTracks | None = None) -> InsideTracks:
    tracks = {} if tracks is None else tracks
    for at in range(looks):
        tracks = insides(tracks, look(at, grown(at)))
    return tracks


def tensors(at: int) -> Grown:
    return at * LEAK, 0, 0


def verdict(tracks: InsideTracks) -> Verdict:
    return tracks["GPU-a"].surest.verdict


@pytest.mark.parametrize("place", range(3))
def test_growth_is_found_in_tensors_and_outside_and_located_everywhere(place: int) -> None:
    def grown(at: int) -> Grown:
        parts = [0.0, 0.0, 0.0]
        parts[place] = at * LEAK
        return parts[0], parts[1], parts[2]

    tracks = followed(60, grown)
    found = Estimate(
        bytes_per_second=LEAK / SECONDS,
        lower=0,
        upper=0,
        bytes_per_request=None,
        by_requests=False,
        leaked_bytes=40.0 * LEAK,
        pace=None,
        fastest=None,
        oom_seconds=None,
        oom_seconds_lower=None,
    )

    assert verdict(tracks) is (Verdict.NONE if place == 1 else Verdict.GROWING)
    assert location(found, tracks["GPU-a"]) is list(LeakLocation)[place]
    assert location(replace(found, leaked_bytes=1e15), tracks["GPU-a"]) is list(LeakLocation)[place]


def test_what_demand_leaves_cached_is_not_where_it_leaks() -> None:
    """Outside grows slowly and evenly, the allocator's cache by more and in one step."""
    found = Estimate(
        bytes_per_second=20_000,
        lower=0,
        upper=0,
        bytes_per_request=None,
        by_requests=False,
        leaked_bytes=12e6,
        pace=None,
        fastest=None,
        oom_seconds=None,
        oom_seconds_lower=None,
    )
    tracks = followed(200, lambda at: (0, 900e6 * (at > 150), at * 100_000.0))

    assert location(found, tracks["GPU-a"]) is LeakLocation.OUTSIDE_TORCH


def test_small_tensors_that_keep_large_segments_are_fragmentation() -> None:
    track = followed(200, lambda at: (at * 130_000.0, at * 2_400_000.0, 0))["GPU-a"]
    found = estimated(track.surest, None)

    assert found is not None
    assert track.surest is track.tensors
    assert location(found, track) is LeakLocation.FRAGMENTATION


def test_what_has_just_begun_is_located_by_the_whole_of_it() -> None:
    track = followed(60, lambda at: (max(0, at - 50) * 50e6, 0, 0))["GPU-a"]
    found = Estimate(
        bytes_per_second=1e7,
        lower=0,
        upper=0,
        bytes_per_request=None,
        by_requests=False,
        leaked_bytes=1e8,
        pace=None,
        fastest=None,
        oom_seconds=None,
        oom_seconds_lower=None,
    )

    assert location(found, track) is LeakLocation.TENSORS


def test_where_nothing_is_known_nothing_is_located() -> None:
    flat = followed(60, lambda _: (0, 0, 0))["GPU-a"]
    found = Estimate(
        bytes_per_second=1e5,
        lower=0,
        upper=0,
        bytes_per_request=None,
        by_requests=False,
        leaked_bytes=1e7,
        pace=None,
        fastest=None,
        oom_seconds=None,
        oom_seconds_lower=None,
    )

    assert location(None, flat) is None
    assert location(found, None) is None
    assert location(found, flat) is None
    assert location(replace(found, bytes_per_second=0.0), flat) is None


def test_the_page_shows_the_early_warning_with_its_figures_and_its_place() -> None:
    tracks = followed(60, tensors)
    seen = look(59, tensors(59))
    state, samples = gpu_leaks(Tracks(), seen, settled=True, inside=tracks)
    _, samples = gpu_leaks(
        state, replace(seen, monotonic_seconds=seen.monotonic_seconds + 1), settled=True, inside=tracks
    )

    assert values(samples, catalog.LEAK_STATE)[(*A_GPU, "growing")] == 1.0
    assert values(samples, catalog.LEAK_RATE)[A_GPU] == pytest.approx(LEAK / SECONDS, rel=0.01)
    assert values(samples, catalog.TIME_TO_OOM)[A_GPU] > 0
    assert values(samples, catalog.LEAK_LOCATION) == {
        (*A_GPU, "tensors"): 1.0,
        (*A_GPU, "fragmentation"): 0.0,
        (*A_GPU, "outside_torch"): 0.0,
    }


def test_the_surer_verdict_stands() -> None:
    growing = followed(60, tensors)["GPU-a"]
    alarmed = Track(clock=0.0, verdict=Verdict.LEAKING)

    assert sharpened(alarmed, growing) is alarmed
    assert sharpened(alarmed, None) is alarmed
    assert sharpened(Track(clock=0.0), growing).verdict is Verdict.GROWING


def test_sleep_and_a_new_life_begin_the_comparison_anew() -> None:
    tracks = followed(60, tensors)

    assert insides(tracks, look(60, tensors(60), awake=False)) == {}
    anew = insides(tracks, look(60, tensors(60), restarts=1))
    assert verdict(anew) is Verdict.NONE
    assert anew["GPU-a"].marks == ()


def test_a_silence_of_the_probe_ends_a_run_and_keeps_the_marks() -> None:
    tracks = followed(60, tensors)
    short = insides(insides(tracks, look(70, tensors(70), known=False)), look(80, tensors(80)))
    long = insides(tracks, look(90, tensors(90)))

    assert verdict(short) is Verdict.GROWING
    assert verdict(long) is Verdict.NONE
    assert long["GPU-a"].marks == tracks["GPU-a"].marks


def test_while_the_page_is_missing_a_block_goes_on() -> None:
    tracks = followed(60, tensors)
    without = replace(look(66, tensors(66)), engines=failure(Source.ENGINE))

    assert insides(tracks, without)["GPU-a"].marks == tracks["GPU-a"].marks


def test_a_spike_between_two_readings_is_not_held() -> None:
    """The probe's file is seconds old: a segment that NVML shows already seems to be outside torch."""
    tracks = followed(60, lambda at: (0, 0, 20e6 * (at % 3 == 0)))

    assert {mark.outside_bytes for mark in tracks["GPU-a"].marks} == {10**9}


def test_what_is_not_seen_for_a_day_is_forgotten_and_what_is_remembered_is_bounded() -> None:
    tracks = followed(4 * MOST_MARKS + 60, tensors)
    later = look(40_000, (0, 0, 0), known=False)

    assert len(tracks["GPU-a"].marks) <= MOST_MARKS
    assert insides(tracks, later) == {}


def test_a_track_taken_up_by_another_process_keeps_its_marks_on_its_clock() -> None:
    track = followed(60, tensors)["GPU-a"]
    taken = moved(track, 1000.0)

    assert taken.clock == track.clock + 1000
    assert [mark.seconds - 1000 for mark in taken.marks] == [mark.seconds for mark in track.marks]
    assert taken.surest.verdict is Verdict.NONE
