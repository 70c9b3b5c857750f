"""Tensors, fragments or outside torch: the track of what is inside, through runs, sleep and silence."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.samples import A_GPU, values
from tests.unit.derive.leak.probed import LEAK, SECONDS, Grown, follow, followed, look, tensors
from vllm_headroom import catalog
from vllm_headroom.derive.leak.facts import Certainty, Observation, start_track
from vllm_headroom.derive.leak.inside import MOST_MARKS, InsideTracks, move_inside_track, sharpen_track
from vllm_headroom.derive.leak.leak import Tracks, derive_gpu_leaks, observe_gpus
from vllm_headroom.model import Gpu, Snapshot


def list_inside_observations(snapshot: Snapshot) -> tuple[tuple[Gpu, Observation], ...]:
    return tuple(observe_gpus(snapshot, snapshot.owned_gpus))


def verdict(tracks: InsideTracks) -> Certainty:
    return tracks["GPU-a"].in_use.verdict


def test_the_page_shows_the_early_warning_with_its_figures_and_its_place() -> None:
    tracks = followed(300, tensors)
    survey = look(299, tensors(299))
    state, _ = derive_gpu_leaks({}, list_inside_observations(survey), is_settled=True, inside=tracks, asleep={})
    later = replace(survey, monotonic_seconds=survey.monotonic_seconds + 1)
    _, samples = derive_gpu_leaks(state, list_inside_observations(later), is_settled=True, inside=tracks, asleep={})

    assert values(samples, catalog.LEAK_STATE)[(*A_GPU, "growing")] == 1.0
    assert values(samples, catalog.LEAK_RATE)[A_GPU] == pytest.approx(LEAK / SECONDS, rel=0.01)
    assert values(samples, catalog.TIME_TO_OOM)[A_GPU] > 0
    assert values(samples, catalog.LEAK_LOCATION) == {
        (*A_GPU, "tensors"): 1.0,
        (*A_GPU, "fragmentation"): 0.0,
        (*A_GPU, "outside_torch"): 0.0,
    }


def test_the_surer_verdict_stands() -> None:
    growing = followed(300, tensors)["GPU-a"]
    alarmed = replace(start_track(0.0), verdict=Certainty.LEAKING)

    assert sharpen_track(alarmed, None, growing) is alarmed
    assert sharpen_track(alarmed, None, None) is alarmed
    assert sharpen_track(start_track(0.0), None, growing).verdict is Certainty.GROWING


def test_sleep_and_a_new_run_begin_the_comparison_again() -> None:
    tracks = followed(60, tensors)

    assert follow(tracks, look(60, tensors(60), awake=False)) == {}
    anew = follow(tracks, look(60, tensors(60), restarts=1))
    assert verdict(anew) is Certainty.NONE
    assert anew["GPU-a"].marks == ()


def test_a_spike_between_two_readings_is_not_held() -> None:
    """The probe's file is seconds old: a segment that NVML shows already seems to be outside torch."""
    tracks = followed(60, lambda at: (0, 0, 20e6 * (at % 3 == 0)))

    assert {mark.held_bytes[-1] for mark in tracks["GPU-a"].marks} == {10**9}


def test_what_is_not_seen_for_a_day_is_forgotten_and_what_is_remembered_is_bounded() -> None:
    tracks = followed(4 * MOST_MARKS + 60, tensors)
    later = look(40_000, (0, 0, 0), is_known=False)

    assert len(tracks["GPU-a"].marks) <= MOST_MARKS
    assert follow(tracks, later) == {}


def test_a_track_taken_up_by_another_process_keeps_its_marks_on_its_clock() -> None:
    track = followed(60, tensors)["GPU-a"]
    moved_track = move_inside_track(track, 1000.0)

    assert moved_track.in_use.clock.snapshot_seconds == track.in_use.clock.snapshot_seconds + 1000
    assert [mark.seconds - 1000 for mark in moved_track.marks] == [mark.seconds for mark in track.marks]


def lost_from_the_cache(at: int) -> Grown:
    """A gigabyte every two hours, of six that torch had cached: what the engine holds stays as it was."""
    return at * SECONDS // 7000 * 10**9, 0, 0


def test_large_steps_that_the_cache_takes_in_are_a_leak_of_what_is_in_use() -> None:
    tracks: InsideTracks = {}
    gpu_tracks: Tracks = {}
    for at in range(int(6.5 * 3600 / SECONDS)):
        grown = lost_from_the_cache(at)
        survey = look(at, grown, cached=6e9 - grown[0])
        tracks = follow(tracks, survey)
        gpu_tracks, samples = derive_gpu_leaks(
            gpu_tracks, list_inside_observations(survey), is_settled=True, inside=tracks, asleep={}
        )

    assert gpu_tracks["GPU-a"].verdict is Certainty.NONE
    assert values(samples, catalog.LEAK_STATE)[(*A_GPU, "leaking")] == 1.0
    assert 1.9e9 < values(samples, catalog.LEAKED)[A_GPU] < 3.1e9
    assert values(samples, catalog.LEAK_LOCATION)[(*A_GPU, "tensors")] == 1.0


def test_what_comes_and_goes_within_a_block_is_no_step_of_what_is_in_use() -> None:
    tracks = followed(3001, lambda at: (5e8 * (at % 3 == 0), 0, 0))

    assert tracks["GPU-a"].in_use.history.steps == ()
