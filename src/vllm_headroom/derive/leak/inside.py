"""Growth inside the engine, from the probe: all memory in use without torch's cache, and where it grows."""

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import Estimate, Observation, Track, observe_gpus
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.derive.readings import limit_remembered
from vllm_headroom.model import Gpu, Snapshot
from vllm_headroom.vocabulary import LeakLocation, MemoryPart

BLOCK_SECONDS: Final = 20.0
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
    thinned out. `in_use` is the track of held memory without torch's cache: it shows what the cache absorbs.
    """

    clock: float
    restarts: int
    began_seconds: float
    in_use: Track
    block: Mark | None = None
    marks: tuple[Mark, ...] = ()


InsideTracks = dict[str, InsideTrack]
"""A track by the UUID of its GPU."""


def update_insides(tracks: InsideTracks, snapshot: Snapshot) -> InsideTracks:
    """Return the tracks after one more sample; a sleeping or restarted engine starts its comparison over."""
    now = snapshot.monotonic_seconds
    tracks = limit_remembered(tracks, {gpu.reading.uuid for gpu in snapshot.devices})
    kept = {uuid: track for uuid, track in tracks.items() if 0 <= now - track.clock < FORGET_SECONDS}
    watched = tuple(gpu for gpu in snapshot.devices if gpu.inside is not None)
    restarts = 0 if snapshot.life is None else snapshot.life.restarts
    for gpu, seen in observe_gpus(snapshot, watched):
        uuid, mark = gpu.reading.uuid, _make_mark(gpu, now)
        if seen.awake is False:
            kept.pop(uuid, None)
        elif mark is not None:
            track = kept.get(uuid)
            if track is None or track.restarts != restarts:
                track = InsideTrack(clock=now, restarts=restarts, began_seconds=now, in_use=Track(clock=now))
            kept[uuid] = _update_track(track, mark, seen)
    return kept


def _make_mark(gpu: Gpu, now: float) -> Mark | None:
    inside, held = gpu.inside, gpu.held_bytes
    if inside is None or inside.allocated_bytes is None or inside.reserved_bytes is None or held is None:
        return None
    free_bytes = inside.reserved_bytes - inside.allocated_bytes
    fragmented_bytes = dict(inside.parts).get(MemoryPart.FRAGMENTED, free_bytes)
    return Mark(now, inside.allocated_bytes, fragmented_bytes, held - inside.reserved_bytes)


def _update_track(track: InsideTrack, mark: Mark, seen: Observation) -> InsideTrack:
    """Return the track with one more mark; the cache is room, since torch gives it back."""
    block = track.block
    if block is None or mark.seconds - track.began_seconds < BLOCK_SECONDS:
        began_seconds = mark.seconds if block is None else track.began_seconds
        least = mark if block is None else _take_least(block, mark)
        return replace(track, clock=mark.seconds, began_seconds=began_seconds, block=least)
    used_bytes = int(block.allocated_bytes + block.outside_bytes)
    room_bytes = None if seen.room_bytes is None else seen.room_bytes + (seen.held_bytes or 0) - used_bytes
    in_use = observe(track.in_use, replace(seen, held_bytes=used_bytes, neighbours=None, room_bytes=room_bytes))
    marks = (*track.marks, block)
    marks = marks if len(marks) <= MOST_MARKS else (*marks[0:-1:2], block)
    return replace(track, clock=mark.seconds, began_seconds=mark.seconds, block=mark, marks=marks, in_use=in_use)


def _take_least(block: Mark, mark: Mark) -> Mark:
    return Mark(
        mark.seconds,
        min(block.allocated_bytes, mark.allocated_bytes),
        min(block.fragmented_bytes, mark.fragmented_bytes),
        min(block.outside_bytes, mark.outside_bytes),
    )


def sharpen_track(track: Track, asleep: Track | None, inside: InsideTrack | None) -> Track:
    """Return the track of held memory with the most certain verdict: its own, of sleep, or of the memory in use.

    Its own time to out-of-memory includes the next peak, which the memory kept in sleep does not show.
    """
    others = (asleep, None if inside is None else inside.in_use)
    for other in others:
        if other is not None and other.verdict > track.verdict:
            track = replace(track, verdict=other.verdict, estimate=other.estimate)
    return track


def move_track(track: InsideTrack, shift: float) -> InsideTrack:
    """Return a track on another clock, with its marks."""
    return replace(
        track,
        clock=track.clock + shift,
        began_seconds=track.began_seconds + shift,
        block=None,
        marks=tuple(replace(mark, seconds=mark.seconds + shift) for mark in track.marks),
        in_use=replace(track.in_use, clock=track.in_use.clock + shift),
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
