"""Leaks whose memory is partly released, pauses or comes in few steps; and growth that is no concern."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from msgspec.structs import replace

from tests.unit.derive.leak.stretches import BASE, HOUR, Shape, readings, segments
from vllm_headroom.derive.leak.facts import Certainty, Track, start_track
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.units import GIB, MIB


def followed(shape: Shape, hours: float, room_bytes: float, *, host: bool = False) -> Iterator[tuple[float, Track]]:
    """Yield the seconds and the track after each reading in a room of this size; host memory varies by a few MiB."""
    chance = random.Random(7)  # noqa: S311 - it plays a process
    track: Track | None = None
    for reading in readings(shape, hours):
        held_bytes = int(BASE + shape(reading.seconds) + (chance.uniform(0, 3 * MIB) if host else 0.0))
        left_bytes = max(0, int(BASE + room_bytes) - held_bytes)
        track = observe(
            track or start_track(reading.seconds), replace(reading, held_bytes=held_bytes, room_bytes=left_bytes)
        )
        yield reading.seconds, track


def flushed(bytes_per_second: float, flush_hours: float, released_bytes: float) -> Shape:
    def shape(seconds: float) -> float:
        grown_bytes = 50 * MIB + seconds * bytes_per_second
        return segments(max(0.0, grown_bytes - (released_bytes if seconds >= flush_hours * HOUR else 0.0)))

    return shape


@pytest.mark.parametrize(
    ("bytes_per_second", "flush_hours", "released_mib"), [(42e3, 14, 1500), (90e3, 8, 2000), (300e3, 5, 3500)]
)
def test_a_flush_is_cut_out_of_the_rate(bytes_per_second: float, flush_hours: float, released_mib: float) -> None:
    room_bytes = flush_hours * HOUR * bytes_per_second + 200 * MIB
    shape = flushed(bytes_per_second, flush_hours, released_mib * MIB)
    late = [
        track for seconds, track in followed(shape, flush_hours + 4, room_bytes) if seconds > (flush_hours + 0.5) * HOUR
    ]

    assert {track.verdict for track in late} == {Certainty.LEAKING}
    for track in late:
        assert track.estimate is not None
        assert track.estimate.bytes_per_second > 0.6 * bytes_per_second


@pytest.mark.parametrize(
    ("megabytes_per_second", "burst_minutes", "pause_hours"), [(16, 35, 2), (4, 50, 3), (8, 40, 1)]
)
def test_the_last_burst_of_a_leak_that_pauses_leaves_minutes(
    megabytes_per_second: float, burst_minutes: float, pause_hours: float
) -> None:
    burst_seconds = burst_minutes * 60
    period_seconds = burst_seconds + pause_hours * HOUR
    begin_seconds = 1.5 * HOUR

    def shape(seconds: float) -> float:
        if seconds < begin_seconds:
            return 0.0
        bursts, since_seconds = divmod(seconds - begin_seconds, period_seconds)
        return (bursts * burst_seconds + min(since_seconds, burst_seconds)) * megabytes_per_second * 1e6

    room_bytes = 2.8 * burst_seconds * megabytes_per_second * 1e6
    end_seconds = begin_seconds + 2 * period_seconds + 0.8 * burst_seconds
    last_tracks = [
        (end_seconds - seconds, track)
        for seconds, track in followed(shape, end_seconds / HOUR, room_bytes, host=True)
        if end_seconds - seconds < 600
    ]

    for left_seconds, track in last_tracks:
        assert track.verdict is Certainty.LEAKING
        assert track.estimate is not None
        assert track.estimate.oom_seconds is not None
        assert track.estimate.oom_seconds < 1800
        assert (track.estimate.oom_seconds_lower or 0.0) <= left_seconds + 60


@pytest.mark.parametrize(("kilobytes_per_second", "room_gb"), [(3000, 4), (1000, 4), (5000, 6), (2000, 3)])
def test_the_lower_bound_of_an_even_leak_is_of_the_order_of_the_time_left(
    kilobytes_per_second: float, room_gb: float
) -> None:
    def shape(seconds: float) -> float:
        return segments(seconds * kilobytes_per_second * 1e3)

    for seconds, track in followed(shape, 0.6, room_gb * 1e9):
        estimate = track.estimate
        if seconds > 660 and estimate is not None and estimate.oom_seconds and estimate.oom_seconds > 60:
            assert (estimate.oom_seconds_lower or 0.0) > 0.3 * estimate.oom_seconds


def saw(leak_bytes_per_second: float, tooth_hours: float, height_bytes: float) -> Shape:
    def shape(seconds: float) -> float:
        tooth = (seconds / (tooth_hours * HOUR)) % 1
        return segments(100 * MIB + seconds * leak_bytes_per_second + height_bytes * tooth)

    return shape


@pytest.mark.parametrize(("leak_bytes_per_second", "tooth_hours"), [(30e3, 6), (20e3, 9), (50e3, 5)])
def test_a_release_does_not_end_an_alarm_while_the_lows_rise(leak_bytes_per_second: float, tooth_hours: float) -> None:
    shape = saw(leak_bytes_per_second, tooth_hours, 1000 * MIB)
    verdicts = [
        track.verdict
        for seconds, track in followed(shape, 3.5 * tooth_hours, 6e9)
        if seconds > 0.9 * tooth_hours * HOUR
    ]

    assert set(verdicts) == {Certainty.LEAKING}


def test_a_saw_whose_lows_do_not_rise_is_no_alarm_after_its_second_release() -> None:
    def shape(seconds: float) -> float:
        return 200 * MIB + saw(0.0, 8, 1500 * MIB)(seconds)

    verdicts = {seconds: track.verdict for seconds, track in followed(shape, 25, 8e9)}

    assert verdicts[7.5 * HOUR] is Certainty.LEAKING
    assert {verdicts[hours * HOUR] for hours in (17, 24.5)} == {Certainty.NONE}


def hold(held_bytes: Shape, hours: float, total_bytes: float | None) -> Iterator[tuple[float, Track]]:
    """Yield the hours and the track after each reading; `held_bytes` is all that is held, `total_bytes` the device."""
    track: Track | None = None
    for reading in readings(held_bytes, hours):
        held = int(held_bytes(reading.seconds))
        room_bytes = None if total_bytes is None else int(total_bytes) - held
        track = observe(track or start_track(reading.seconds), replace(reading, held_bytes=held, room_bytes=room_bytes))
        yield reading.seconds / HOUR, track


def work(begin_hours: float, size_bytes: float) -> Shape:
    """Return what a job takes evenly within an hour, holds for another, and releases."""

    def shape(seconds: float) -> float:
        since_hours = seconds / HOUR - begin_hours
        return size_bytes * min(1.0, since_hours) if 0 <= since_hours < 2 else 0.0

    return shape


@pytest.mark.parametrize("again", [1.0, 2.0], ids=["as much", "twice as much"])
def test_what_was_released_is_no_alarm_when_it_is_taken_again(again: float) -> None:
    """A host process of 4 GiB takes 8 GiB for a job. What exceeds the first job is growth."""
    jobs = (work(2, 8 * GIB), work(8, again * 8 * GIB))
    verdicts = list(hold(lambda seconds: 4 * GIB + sum(job(seconds) for job in jobs), 10.0, None))

    assert max(track.verdict for hours, track in verdicts if hours < 6) is Certainty.LEAKING
    later = max(track.verdict for hours, track in verdicts if hours >= 6)
    assert (later is Certainty.LEAKING) is (again > 1)


def test_a_process_that_starts_on_a_card_whose_holders_are_unknown_is_no_alarm() -> None:
    """It loads 14 GiB of weights in four minutes, beside 24 GiB of the engine."""
    parts_mib = (2981, 2702, 1613, 1091, 1905, 1562, 2786)

    def held(seconds: float) -> float:
        loaded = int(max(0.0, seconds - 1.5 * HOUR) // 30)
        return 24 * GIB + MIB * sum(parts_mib[:loaded])

    verdicts = [track.verdict for _, track in hold(held, 2.0, 47 * GIB)]

    assert max(verdicts) < Certainty.LEAKING


def test_an_alarm_ends_when_memory_was_lower_for_half_a_day() -> None:
    def shape(seconds: float) -> float:
        if seconds < 9 * HOUR:
            return segments(seconds * 60e3)
        return segments(9 * HOUR * 60e3 - 300 * MIB + 2 * MIB * (seconds / HOUR - 9))

    verdicts = {seconds: track.verdict for seconds, track in followed(shape, 24, 10e9)}

    assert verdicts[9 * HOUR] is Certainty.LEAKING
    assert verdicts[23.5 * HOUR] is Certainty.NONE


@pytest.mark.parametrize("rate_after", [1000.0, 300.0])
def test_growth_that_would_take_a_year_to_fill_the_room_is_no_alarm(rate_after: float) -> None:
    def shape(seconds: float) -> float:
        return min(seconds, 6 * HOUR) * 200e3 + max(0.0, seconds - 6 * HOUR) * rate_after

    verdicts = {seconds: track.verdict for seconds, track in followed(shape, 26, 64e9)}

    assert verdicts[6 * HOUR] is Certainty.LEAKING
    assert verdicts[25.5 * HOUR] is Certainty.NONE


@pytest.mark.parametrize(
    ("step_mib", "hours"),
    [(2360, (2.1, 12.5, 13.3, 31.6)), (900, (3.0, 7.0, 12.5, 15.0)), (1500, (2.0, 9.0, 11.0, 20.0))],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_step_that_does_not_fit_is_an_alarm_with_the_time_until_it_comes(
    step_mib: float, hours: tuple[float, ...], parts: int
) -> None:
    """A step is one buffer, or several segments within minutes."""

    def shape(seconds: float) -> float:
        part_count = sum(seconds >= hour * HOUR + 60 * part for hour in hours for part in range(parts))
        return part_count / parts * step_mib * MIB

    room_bytes = 4.8 * step_mib * MIB
    *_, (_, last_track) = followed(shape, hours[-1] + 2.5, room_bytes)

    assert last_track.verdict is Certainty.LEAKING
    assert last_track.estimate is not None
    assert last_track.estimate.oom_seconds is not None
    shortest_hours = min(later - hour for hour, later in pairwise(hours))
    assert last_track.estimate.oom_seconds == pytest.approx(max(0.0, shortest_hours - 2.5) * HOUR, abs=300)


@pytest.mark.parametrize(("size_mib", "lag_minutes"), [(1100, 4), (900, 6)])
def test_memory_that_follows_a_record_of_load_is_no_alarm(size_mib: float, lag_minutes: float) -> None:
    """It rises ever more slowly for ten minutes, and nearly fills the card; the engine has served for a day."""
    begin_seconds = 20 * HOUR

    def shape(seconds: float) -> float:
        # A wave each hour, in which memory has been seen to rise and to fall.
        usual = 150 * MIB * abs((seconds / HOUR) % 2 - 1)
        if seconds < begin_seconds:
            return segments(usual, 2 * MIB)
        lasted_seconds = min(600.0, seconds - begin_seconds)
        share = 1 - math.exp(-lasted_seconds / (60 * lag_minutes))
        share *= math.exp(-max(0.0, seconds - begin_seconds - 600) / (60 * lag_minutes))
        return segments(usual + size_mib * MIB * share, 2 * MIB)

    track: Track | None = None
    verdicts: set[Certainty] = set()
    finished = 0.0
    for reading in readings(shape, 21):
        is_busy = begin_seconds <= reading.seconds < begin_seconds + 600
        finished += 15 * (18 if is_busy else 8)
        room_bytes = int((1.1 * size_mib + 150) * MIB - shape(reading.seconds))
        busy = replace(reading, finished_total=finished, running=128.0, room_bytes=room_bytes)
        track = observe(track or start_track(reading.seconds), busy)
        verdicts.add(track.verdict)

    assert Certainty.LEAKING not in verdicts


def test_what_fills_again_after_a_release_does_not_bring_the_end_nearer() -> None:
    """A tenth of the leak's pace is added by torch's cache, which fills again within half an hour."""

    def shape(seconds: float) -> float:
        leaked = 100 * MIB + 60e3 * seconds
        if seconds < 8 * HOUR:
            return segments(leaked)
        refilled = min(1.0, (seconds - 8 * HOUR) / 2400)
        return segments(leaked - 1300 * MIB + 700 * MIB * refilled)

    late = [track for seconds, track in followed(shape, 10.5, 6e9) if seconds > 8.2 * HOUR]

    assert {track.verdict for track in late} == {Certainty.LEAKING}
    assert max(track.estimate.bytes_per_second for track in late if track.estimate) < 130e3
