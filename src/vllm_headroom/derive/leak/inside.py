"""Growth inside the engine, from the probe: tensors, memory outside torch, and all memory in use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, variance
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, Certainty, Estimate, Observation, Track, observe_gpus
from vllm_headroom.derive.leak.judge import forecast_certainty, measure_rate
from vllm_headroom.derive.leak.track import observe, take_surer
from vllm_headroom.derive.readings import limit_remembered
from vllm_headroom.model import Gpu, Snapshot
from vllm_headroom.vocabulary import LeakLocation, MemoryPart

KIB: Final = 1024

RISE_BYTES: Final = 64 * KIB
GIVEN_BACK_BYTES: Final = 512 * KIB
"""A smaller rise of a block is no evidence; a larger fall gave back memory, which no leak does."""

LEAST_BLOCKS: Final = 8
LEAST_GROWTH_BYTES: Final = 16 * MIB
"""Rises in a row, and growth, before a verdict: the post-mortem's leak grew 20 MB in two and a half minutes."""

EVENT_BYTES: Final = 32 * KIB
JITTER: Final = 0.1
"""Growth by events of one size has a variance of its mean times that size, and uneven reading times add a share of
the mean. An image's embeddings take megabytes, an adapter or a kernel's first workspace tens of them: growth in
smaller events is no cache of vLLM's."""

LATEST_RISES: Final = 24
LARGER: Final = 4
"""One rise in so many may be larger: kernels are still used for the first time during a leak."""

OVERDUE: Final = 2.0

LEAKING_SECONDS: Final = 1800.0
"""A leak is reported after this long: caches that fill as smoothly are full by then."""

PACE: Final = 0.6
"""The least share of the first third's pace in the last third; filling caches and warm-up fade."""

LOAD_SHARE, LOAD_REQUESTS = 0.15, 2.0
"""More running requests by this much, from one half to the other, explain growth of memory."""

MOST_POINTS: Final = 120


class Floor(Struct, frozen=True):
    """The least held in a block, its end, the requests finished by then and those running."""

    seconds: float
    requests: float
    running: float
    held_bytes: float


class Steady(Struct, frozen=True, kw_only=True):
    """Rises without a fall: `latest` are the newest floors, `points` all since the first, thinned out."""

    latest: tuple[Floor, ...] = ()
    points: tuple[Floor, ...] = ()
    verdict: Certainty = Certainty.NONE


def follow_floors(steady: Steady, floor: Floor) -> Steady:
    """Return the rises with one more block; a block without a rise is skipped while no rise was due."""
    if not steady.latest:
        return Steady(latest=(floor,), points=(floor,))
    rise = floor.held_bytes - steady.latest[-1].held_bytes
    if rise < RISE_BYTES:
        goes_on = rise > -GIVEN_BACK_BYTES and not _is_overdue(steady, floor)
        return steady if goes_on else Steady(latest=(floor,), points=(floor,))
    points = (*steady.points, floor)
    grown = replace(
        steady,
        latest=(*steady.latest, floor)[-LATEST_RISES - 1 :],
        points=points if len(points) <= MOST_POINTS else (*points[0:-1:2], floor),
    )
    return replace(grown, verdict=_judge_floors(grown))


def _is_overdue(steady: Steady, floor: Floor) -> bool:
    """Return whether twice the usual rise was due by now, at the measured pace."""
    if len(steady.latest) == 1:
        return True
    last, usual = steady.latest[-1], median(_list_rises(steady.latest))
    first = steady.points[0]
    done = last.requests - first.requests
    if done > 0:
        due = (last.held_bytes - first.held_bytes) / done * (floor.requests - last.requests)
    else:
        due = _measure_pace(steady.points) * (floor.seconds - last.seconds)
    return due >= OVERDUE * usual


def _list_rises(floors: tuple[Floor, ...]) -> list[float]:
    return [after.held_bytes - before.held_bytes for before, after in pairwise(floors)]


def _judge_floors(steady: Steady) -> Certainty:
    first, last = steady.points[0], steady.points[-1]
    if len(steady.latest) <= LEAST_BLOCKS or last.held_bytes - first.held_bytes < LEAST_GROWTH_BYTES:
        return Certainty.NONE
    if not _is_smooth(steady.latest) or _is_following_load(steady.points):
        return steady.verdict
    lasts = last.seconds - first.seconds >= LEAKING_SECONDS
    return Certainty.LEAKING if lasts and _is_keeping_pace(steady.points) else max(steady.verdict, Certainty.GROWING)


def _is_smooth(latest: tuple[Floor, ...]) -> bool:
    """Return whether the rises consist of many small events, by time or by requests, with few larger steps."""
    by_time = _is_in_pieces(latest, [after.seconds - before.seconds for before, after in pairwise(latest)])
    by_requests = _is_in_pieces(latest, [after.requests - before.requests for before, after in pairwise(latest)])
    return by_time or by_requests


def _is_in_pieces(latest: tuple[Floor, ...], lengths: list[float]) -> bool:
    if min(lengths) <= 0:
        return False
    rises = _list_rises(latest)
    pace = median(rise / length for rise, length in zip(rises, lengths, strict=True))
    beside = sorted(rise - pace * length for rise, length in zip(rises, lengths, strict=True))
    usual = pace * fmean(lengths)
    spread = sqrt(variance(beside[: len(beside) - len(beside) // LARGER]))
    return spread <= sqrt(EVENT_BYTES * usual + (JITTER * usual) ** 2)


def _is_following_load(points: tuple[Floor, ...]) -> bool:
    half = len(points) // 2
    before, after = (fmean(point.running for point in part) for part in (points[:half], points[half:]))
    return after > before * (1 + LOAD_SHARE) + LOAD_REQUESTS


def _is_keeping_pace(points: tuple[Floor, ...]) -> bool:
    third = len(points) // 3
    early, late = _measure_pace(points[: third + 1]), _measure_pace(points[-third - 1 :])
    return late >= PACE * early


def _measure_pace(points: tuple[Floor, ...]) -> float:
    """Return growth per request where requests are counted, else per second."""
    first, last = points[0], points[-1]
    done = last.requests - first.requests
    return (last.held_bytes - first.held_bytes) / (done if done > 0 else last.seconds - first.seconds)


def estimate_steady(steady: Steady, room_bytes: float | None) -> Estimate | None:
    """Return the growth rate and the time left; single first uses do not change the slope."""
    if not steady.verdict:
        return None
    points = steady.points
    first, last = points[0], points[-1]
    done = last.requests - first.requests
    held = tuple(point.held_bytes for point in points)
    step = median(_list_rises(steady.latest))
    rate, half_width, _ = measure_rate([point.seconds for point in points], held, step)
    per_request, _, _ = measure_rate([point.requests for point in points], held, step)
    half_width += JITTER * rate
    return Estimate(
        bytes_per_second=rate,
        lower=rate - half_width,
        upper=rate + half_width,
        bytes_per_request=per_request if done > 0 else None,
        by_requests=done > 0,
        leaked_bytes=last.held_bytes - first.held_bytes,
        pace=rate,
        fastest=rate + half_width,
        oom_seconds=None if room_bytes is None else max(0.0, room_bytes) / rate,
        oom_seconds_lower=None if room_bytes is None else max(0.0, room_bytes) / (rate + half_width),
    )


BLOCK_SECONDS: Final = 20.0
"""Four readings of each source: their least is what is held between two steps of the engine."""

GAP_SECONDS: Final = 120.0
"""After a longer silence of the probe the rises start over."""

MOST_MARKS: Final = 256
FORGET_SECONDS: Final = 86400.0


class Mark(Struct, frozen=True, gc=False):
    """The least of a block: torch's allocated bytes, its fragments, and what the engine holds outside torch."""

    seconds: float
    allocated_bytes: float
    fragmented_bytes: float
    outside_bytes: float


class InsideTrack(Struct, frozen=True, kw_only=True):
    """The detector's memory of one GPU's inside in one run of the engine.

    `block` is the least so far of the block that began at `began_seconds`; `marks` are the blocks since the run began,
    thinned out. `room_bytes` is what was left on the device. `in_use` is the track of held memory without torch's
    cache: it shows a leak in large steps, however much the cache absorbs.
    """

    clock: float
    restarts: int
    began_seconds: float
    room_bytes: float | None = None
    block: Mark | None = None
    marks: tuple[Mark, ...] = ()
    tensors: Steady = field(default_factory=Steady)
    outside: Steady = field(default_factory=Steady)
    in_use: Track | None = None

    @property
    def surest(self) -> Steady:
        """The rises with the most certain verdict."""
        return max(self.tensors, self.outside, key=lambda run: run.verdict)


InsideTracks = dict[str, InsideTrack]
"""A track by the UUID of its GPU."""


def update_insides(tracks: InsideTracks, snapshot: Snapshot) -> InsideTracks:
    """Return the tracks after one more sample; a sleeping or restarted engine starts its comparison over."""
    now = snapshot.monotonic_seconds
    tracks = limit_remembered(tracks, {gpu.reading.uuid for gpu in snapshot.devices})
    kept = {uuid: track for uuid, track in tracks.items() if 0 <= now - track.clock < FORGET_SECONDS}
    watched = tuple(gpu for gpu in snapshot.devices if gpu.inside is not None or gpu.reading.uuid in kept)
    for gpu, seen in observe_gpus(snapshot, watched):
        uuid, mark = gpu.reading.uuid, _make_mark(gpu, now)
        if seen.awake is False:
            kept.pop(uuid, None)
        elif mark is not None:
            kept[uuid] = replace(_update_track(kept.get(uuid), mark, snapshot, seen), room_bytes=seen.room_bytes)
    return kept


def _make_mark(gpu: Gpu, now: float) -> Mark | None:
    inside, held = gpu.inside, gpu.held_bytes
    if inside is None or inside.allocated_bytes is None or inside.reserved_bytes is None or held is None:
        return None
    free_bytes = inside.reserved_bytes - inside.allocated_bytes
    fragmented_bytes = dict(inside.parts).get(MemoryPart.FRAGMENTED, free_bytes)
    return Mark(now, inside.allocated_bytes, fragmented_bytes, held - inside.reserved_bytes)


def _update_track(track: InsideTrack | None, mark: Mark, snapshot: Snapshot, seen: Observation) -> InsideTrack:
    restarts = 0 if snapshot.life is None else snapshot.life.restarts
    if track is None or track.restarts != restarts:
        return InsideTrack(clock=mark.seconds, restarts=restarts, began_seconds=mark.seconds, block=mark)
    if track.block is not None and mark.seconds - track.began_seconds >= BLOCK_SECONDS:
        track = _close_block(track, track.block, snapshot, seen)
    if mark.seconds - track.clock > GAP_SECONDS:
        track = replace(track, tensors=Steady(), outside=Steady())
    if track.block is None:
        return replace(track, clock=mark.seconds, began_seconds=mark.seconds, block=mark)
    return replace(track, clock=mark.seconds, block=_take_least(track.block, mark))


def _take_least(block: Mark, mark: Mark) -> Mark:
    return Mark(
        mark.seconds,
        min(block.allocated_bytes, mark.allocated_bytes),
        min(block.fragmented_bytes, mark.fragmented_bytes),
        min(block.outside_bytes, mark.outside_bytes),
    )


def _close_block(track: InsideTrack, block: Mark, snapshot: Snapshot, seen: Observation) -> InsideTrack:
    if snapshot.page is None:  # how much was done is not known: the block goes on
        return track
    done, running = seen.finished_total or 0.0, seen.running or 0.0
    marks = (*track.marks, block)
    return replace(
        track,
        block=None,
        marks=marks if len(marks) <= MOST_MARKS else (*marks[0:-1:2], block),
        tensors=follow_floors(track.tensors, Floor(block.seconds, done, running, block.allocated_bytes)),
        outside=follow_floors(track.outside, Floor(block.seconds, done, running, block.outside_bytes)),
        in_use=_update_in_use(track.in_use, block, seen),
    )


def _update_in_use(track: Track | None, block: Mark, seen: Observation) -> Track:
    """Return the track of memory in use after a block; the cache is room, since torch gives it back."""
    used_bytes = int(block.allocated_bytes + block.outside_bytes)
    cached_bytes = (seen.held_bytes or 0) - used_bytes
    room_bytes = None if seen.room_bytes is None else seen.room_bytes + cached_bytes
    return observe(track or Track(clock=seen.seconds), replace(seen, held_bytes=used_bytes, room_bytes=room_bytes))


def sharpen_track(track: Track, asleep: Track | None, inside: InsideTrack | None) -> Track:
    """Return the track of held memory with the most certain verdict: its own, of sleep, or of the inside.

    Of all memory in use only the large steps count: a filling cache is as even there as a leak.
    """
    track = take_surer(track, asleep)
    if inside is None:
        return track
    if inside.surest.verdict > track.verdict:
        track = replace(
            track, verdict=inside.surest.verdict, estimate=estimate_steady(inside.surest, inside.room_bytes)
        )
    if inside.in_use is not None and (steps := forecast_certainty(inside.in_use)) > track.verdict:
        track = replace(track, verdict=steps, estimate=inside.in_use.estimate)
    return track


def move_track(track: InsideTrack, shift: float) -> InsideTrack:
    """Return a track on another clock, moving its marks; its rises start over."""
    in_use = track.in_use
    return InsideTrack(
        clock=track.clock + shift,
        restarts=track.restarts,
        began_seconds=track.began_seconds + shift,
        marks=tuple(replace(mark, seconds=mark.seconds + shift) for mark in track.marks),
        in_use=None if in_use is None else replace(in_use, clock=in_use.clock + shift),
    )


PARTS: Final = 6
"""Parts of a leak's time, in each of which it must have grown; thirds misplaced one simulated leak in ten."""

STEADY_SHARE: Final = 0.01
"""Steady growth below this share of the largest growth is not the leak."""

PLACES: Final = {
    LeakLocation.TENSORS: "tensors",
    LeakLocation.FRAGMENTATION: "what torch has reserved and cannot use",
    LeakLocation.OUTSIDE_TORCH: "what torch knows nothing of",
}
"""The places as used in a sentence after "in"."""

HELD: Final[dict[LeakLocation, Callable[[Mark], float]]] = {
    LeakLocation.TENSORS: lambda mark: mark.allocated_bytes,
    LeakLocation.FRAGMENTATION: lambda mark: mark.fragmented_bytes,
    LeakLocation.OUTSIDE_TORCH: lambda mark: mark.outside_bytes,
}


def find_location(found: Estimate | None, inside: InsideTrack | None) -> LeakLocation | None:
    """Return where memory grows: where most was added in every sixth of the leak's time.

    First uses come in steps, and a sixth without one excludes them. If almost nothing grew in every sixth, as with a
    leak in lumps or a new one, the whole time counts. Cache left over from peak demand is no location: torch gives it
    back.
    """
    if found is None or inside is None or found.bytes_per_second <= 0:
        return None
    began = inside.clock - found.leaked_bytes / found.bytes_per_second
    marks = inside.marks[bisect_left(inside.marks, began, key=lambda mark: mark.seconds) :]
    marks = marks if len(marks) > PARTS else inside.marks[-PARTS - 1 :]
    if not marks:
        return None
    whole = {place: held(marks[-1]) - held(marks[0]) for place, held in HELD.items()}
    steady = {
        place: PARTS * _find_least_growth([held(mark) for mark in _find_ends(marks)]) for place, held in HELD.items()
    }
    most = max(steady, key=lambda place: steady[place])
    if steady[most] <= STEADY_SHARE * max(whole.values()):
        most = max(whole, key=lambda place: whole[place])
    return most if max(steady[most], whole[most]) > 0 else None


def _find_ends(marks: tuple[Mark, ...]) -> list[Mark]:
    """Return the marks that separate the sixths of the time; none if there are too few."""
    return [marks[round(part * (len(marks) - 1) / PARTS)] for part in range(PARTS + 1)] if len(marks) > PARTS else []


def _find_least_growth(held_bytes: list[float]) -> float:
    return min((after - before for before, after in pairwise(held_bytes)), default=0.0)
