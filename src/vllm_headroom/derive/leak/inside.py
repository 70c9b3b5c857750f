"""Growth inside the engine, from the probe: all memory in use without torch's cache, and where it grows."""

from bisect import bisect_left
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
"""A device or role not seen for a day is dropped: this bounds memory while pods and MIG instances change."""


class Mark(Struct, frozen=True, gc=False):
    """The least since `seconds` of what torch has allocated, of its fragments, and of what is held outside torch."""

    seconds: float
    held_bytes: tuple[float, ...]


class InsideTrack(Struct, frozen=True, kw_only=True):
    """The detector's memory of one GPU's inside in one run of the engine.

    `block` is the mark of the present block, `marks` are those since the run began, thinned out. `in_use` is the track
    of held memory without torch's cache: it shows what the cache absorbs.
    """

    restarts: int
    in_use: Track
    block: Mark
    marks: tuple[Mark, ...] = ()


InsideTracks = dict[str, InsideTrack]
"""A track by the UUID of its GPU."""


def update_insides(tracks: InsideTracks, snapshot: Snapshot) -> InsideTracks:
    """Return the tracks after one more sample; a sleeping or restarted engine starts its comparison over."""
    now = snapshot.monotonic_seconds
    tracks = limit_remembered(tracks, {gpu.reading.uuid for gpu in snapshot.devices})
    kept = {
        uuid: track
        for uuid, track in tracks.items()
        if 0 <= now - track.in_use.clock < FORGET_SECONDS
    }
    restarts = 0 if snapshot.engine_status is None else snapshot.engine_status.restarts
    for gpu, seen in observe_gpus(snapshot, snapshot.devices):
        uuid, mark = gpu.reading.uuid, _make_mark(gpu, now)
        if gpu.inside is not None and seen.awake is False:
            kept.pop(uuid, None)
        elif mark is not None:
            track = kept.get(uuid)
            if track is None or track.restarts != restarts:
                track = InsideTrack(restarts=restarts, block=mark, in_use=Track(clock=now))
            kept[uuid] = _update_track(track, mark, seen)
    return kept


def _make_mark(gpu: Gpu, now: float) -> Mark | None:
    inside, held = gpu.inside, gpu.held_bytes
    if (
        inside is None
        or inside.allocated_bytes is None
        or inside.reserved_bytes is None
        or held is None
    ):
        return None
    fragmented_bytes = dict(inside.parts).get(
        MemoryPart.FRAGMENTED, inside.reserved_bytes - inside.allocated_bytes
    )
    return Mark(now, (inside.allocated_bytes, fragmented_bytes, held - inside.reserved_bytes))


def _update_track(track: InsideTrack, mark: Mark, seen: Observation) -> InsideTrack:
    """Return the track with one more mark; the cache is room, since torch gives it back."""
    block = track.block
    if mark.seconds - block.seconds < BLOCK_SECONDS:
        least = tuple(map(min, block.held_bytes, mark.held_bytes))
        return replace(track, block=replace(block, held_bytes=least))
    used_bytes = int(block.held_bytes[0] + block.held_bytes[-1])
    room_bytes = (
        None if seen.room_bytes is None else seen.room_bytes + (seen.held_bytes or 0) - used_bytes
    )
    in_use = observe(
        track.in_use, replace(seen, held_bytes=used_bytes, neighbours=None, room_bytes=room_bytes)
    )
    marks = (*track.marks, block)
    marks = marks if len(marks) <= MOST_MARKS else (*marks[0:-1:2], block)
    return replace(track, block=mark, marks=marks, in_use=in_use)


def sharpen_track(track: Track, asleep: Track | None, inside: InsideTrack | None) -> Track:
    """Return the track of held memory with the most certain verdict: its own, of sleep, or of the memory in use.

    Its own time to out-of-memory includes the next peak, which the memory kept in sleep does not show.
    """
    for other in (asleep, None if inside is None else inside.in_use):
        if other is not None and other.verdict > track.verdict:
            track = replace(track, verdict=other.verdict, estimate=other.estimate)
    return track


def move_track(track: InsideTrack, shift: float) -> InsideTrack:
    """Return a track on another clock, with its marks."""
    block, *marks = (
        replace(mark, seconds=mark.seconds + shift) for mark in (track.block, *track.marks)
    )
    in_use = replace(track.in_use, clock=track.in_use.clock + shift)
    return replace(track, block=block, marks=tuple(marks), in_use=in_use)


PARTS: Final = 6
"""Parts of a leak's time, in each of which it must have grown; thirds misplaced one simulated leak in ten."""

STEADY_SHARE: Final = 0.01
"""Steady growth below this share of the largest growth is not the leak."""

PLACES: Final = {
    LeakLocation.TENSORS: "tensors",
    LeakLocation.FRAGMENTATION: "what torch has reserved and cannot use",
    LeakLocation.OUTSIDE_TORCH: "what torch knows nothing of",
}
"""The places as used in a sentence after "in", in the order of a mark's bytes."""


def find_location(found: Estimate | None, inside: InsideTrack | None) -> LeakLocation | None:
    """Return where memory grows: where most was added in every sixth of the leak's time.

    First uses come in steps, and a sixth without one excludes them. If almost nothing grew in every sixth, the whole
    time counts. Cache left over from peak demand is no location: torch gives it back.
    """
    if found is None or inside is None or found.bytes_per_second <= 0:
        return None
    began = inside.in_use.clock - found.leaked_bytes / found.bytes_per_second
    marks = inside.marks[bisect_left(inside.marks, began, key=lambda mark: mark.seconds) :]
    marks = marks if len(marks) > PARTS else inside.marks[-PARTS - 1 :]
    if not marks:
        return None
    ends = [marks[round(part * (len(marks) - 1) / PARTS)].held_bytes for part in range(PARTS + 1)]
    held = dict(zip(PLACES, zip(*ends, strict=True), strict=True))
    whole = {place: each[-1] - each[0] for place, each in held.items()}
    steady = {
        place: PARTS * min(after - before for before, after in pairwise(each))
        for place, each in held.items()
    }
    most = max(steady, key=lambda place: steady[place])
    if steady[most] <= STEADY_SHARE * max(whole.values()):
        most = max(whole, key=lambda place: whole[place])
    return most if max(steady[most], whole[most]) > 0 else None
