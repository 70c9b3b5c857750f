"""Does it grow in torch's tensors, in the allocator's fragments or outside torch?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import Estimate, Track, room
from vllm_headroom.derive.leak.steady import Floor, Steady, estimated, followed
from vllm_headroom.derive.page_facts import awake, finished, running_requests
from vllm_headroom.derive.readings import remembered
from vllm_headroom.model import Gpu, Snapshot
from vllm_headroom.vocabulary import LeakLocation, MemoryPart

BLOCK_SECONDS: Final = 20.0
"""Four readings of each side: the least of them is what is held between two steps of the engine."""

GAP_SECONDS: Final = 120.0
"""After a longer silence of the probe a run of rises begins anew."""

PARTS: Final = 6
"""Of a leak's time, in each of which it must have grown; thirds mistook one simulated leak in ten."""

STEADY_SHARE: Final = 0.01
"""Steady growth of less than this share of what grew most is not what leaks."""

MOST_MARKS: Final = 256
FORGET_SECONDS: Final = 86400.0

PLACES: Final = {
    LeakLocation.TENSORS: "tensors",
    LeakLocation.FRAGMENTATION: "what torch has reserved and cannot use",
    LeakLocation.OUTSIDE_TORCH: "what torch knows nothing of",
}
"""The places as sentences have them, after "in"."""


class Mark(Struct, frozen=True):
    """The least of a block: what torch has allocated, its fragments, and what the engine holds outside torch."""

    seconds: float
    allocated_bytes: float
    fragmented_bytes: float
    outside_bytes: float


HELD: Final[dict[LeakLocation, Callable[[Mark], float]]] = {
    LeakLocation.TENSORS: lambda mark: mark.allocated_bytes,
    LeakLocation.FRAGMENTATION: lambda mark: mark.fragmented_bytes,
    LeakLocation.OUTSIDE_TORCH: lambda mark: mark.outside_bytes,
}


class InsideTrack(Struct, frozen=True, kw_only=True):
    """What is remembered of one GPU's inside in one life of the engine.

    `block` is the least so far of the block that began at `began_seconds`; `marks` are the blocks since the life
    began, thinned out. `room_bytes` is what was left on the device.
    """

    clock: float
    restarts: int
    began_seconds: float
    room_bytes: float | None = None
    block: Mark | None = None
    marks: tuple[Mark, ...] = ()
    tensors: Steady = field(default_factory=Steady)
    outside: Steady = field(default_factory=Steady)

    @property
    def surest(self) -> Steady:
        """The run with the surest verdict."""
        return max(self.tensors, self.outside, key=lambda run: run.verdict)


InsideTracks = dict[str, InsideTrack]
"""A track by the UUID of its GPU."""


def insides(tracks: InsideTracks, snapshot: Snapshot) -> InsideTracks:
    """Return the tracks after one more look; what sleeps or begins anew is compared from there on."""
    now = snapshot.monotonic_seconds
    page = snapshot.page
    tracks = remembered(tracks, {gpu.reading.uuid for gpu in snapshot.devices})
    kept = {uuid: track for uuid, track in tracks.items() if 0 <= now - track.clock < FORGET_SECONDS}
    for gpu in snapshot.devices:
        if page is not None and awake(page) is False:
            kept.pop(gpu.reading.uuid, None)
            continue
        mark = _mark(gpu, now)
        if mark is not None:
            looked = _looked(kept.get(gpu.reading.uuid), mark, snapshot)
            kept[gpu.reading.uuid] = replace(looked, room_bytes=room(gpu))
    return kept


def _mark(gpu: Gpu, now: float) -> Mark | None:
    inside, held = gpu.inside, gpu.held_bytes
    if inside is None or inside.allocated_bytes is None or inside.reserved_bytes is None or held is None:
        return None
    free_bytes = inside.reserved_bytes - inside.allocated_bytes
    fragmented_bytes = dict(inside.parts).get(MemoryPart.FRAGMENTED, free_bytes)
    return Mark(now, inside.allocated_bytes, fragmented_bytes, held - inside.reserved_bytes)


def _looked(track: InsideTrack | None, mark: Mark, snapshot: Snapshot) -> InsideTrack:
    restarts = 0 if snapshot.life is None else snapshot.life.restarts
    if track is None or track.restarts != restarts:
        return InsideTrack(clock=mark.seconds, restarts=restarts, began_seconds=mark.seconds, block=mark)
    if track.block is not None and mark.seconds - track.began_seconds >= BLOCK_SECONDS:
        track = _closed(track, track.block, snapshot)
    if mark.seconds - track.clock > GAP_SECONDS:
        track = replace(track, tensors=Steady(), outside=Steady())
    if track.block is None:
        return replace(track, clock=mark.seconds, began_seconds=mark.seconds, block=mark)
    return replace(track, clock=mark.seconds, block=_least(track.block, mark))


def _least(block: Mark, mark: Mark) -> Mark:
    return Mark(
        mark.seconds,
        min(block.allocated_bytes, mark.allocated_bytes),
        min(block.fragmented_bytes, mark.fragmented_bytes),
        min(block.outside_bytes, mark.outside_bytes),
    )


def _closed(track: InsideTrack, block: Mark, snapshot: Snapshot) -> InsideTrack:
    page = snapshot.page
    if page is None:  # how much was done is not known: the block goes on
        return track
    done, running = finished(page) or 0.0, running_requests(page) or 0.0
    marks = (*track.marks, block)
    return replace(
        track,
        block=None,
        marks=marks if len(marks) <= MOST_MARKS else (*marks[0:-1:2], block),
        tensors=followed(track.tensors, Floor(block.seconds, done, running, block.allocated_bytes)),
        outside=followed(track.outside, Floor(block.seconds, done, running, block.outside_bytes)),
    )


def sharpened(track: Track, inside: InsideTrack | None) -> Track:
    """Return the track of what is held with the surer verdict of what is inside, and its figures."""
    if inside is None or inside.surest.verdict <= track.verdict:
        return track
    return replace(track, verdict=inside.surest.verdict, estimate=estimated(inside.surest, inside.room_bytes))


def location(found: Estimate | None, inside: InsideTrack | None) -> LeakLocation | None:
    """Return where it grows: where most was added in every sixth of the leak's time.

    What is used for the first time comes in steps, and a sixth without one does not count for it. Where next to
    nothing grew in every sixth, as when it leaks in lumps or has just begun, the whole counts. What demand at its
    highest leaves cached is no place: torch gives that back.
    """
    if found is None or inside is None or found.bytes_per_second <= 0:
        return None
    began = inside.clock - found.leaked_bytes / found.bytes_per_second
    marks = inside.marks[bisect_left(inside.marks, began, key=lambda mark: mark.seconds) :]
    marks = marks if len(marks) > PARTS else inside.marks[-PARTS - 1 :]
    if not marks:
        return None
    whole = {place: held(marks[-1]) - held(marks[0]) for place, held in HELD.items()}
    steady = {place: PARTS * _least_growth([held(mark) for mark in _ends(marks)]) for place, held in HELD.items()}
    most = max(steady, key=lambda place: steady[place])
    if steady[most] <= STEADY_SHARE * max(whole.values()):
        most = max(whole, key=lambda place: whole[place])
    return most if max(steady[most], whole[most]) > 0 else None


def _ends(marks: tuple[Mark, ...]) -> list[Mark]:
    """Return the marks between which the sixths of the time are; none where there are too few to say."""
    return [marks[round(part * (len(marks) - 1) / PARTS)] for part in range(PARTS + 1)] if len(marks) > PARTS else []


def _least_growth(held_bytes: list[float]) -> float:
    return min((after - before for before, after in pairwise(held_bytes)), default=0.0)


def moved(track: InsideTrack, shift: float) -> InsideTrack:
    """Return a track on another clock, in whose time the marks are; its runs begin anew."""
    marks = tuple(replace(mark, seconds=mark.seconds + shift) for mark in track.marks)
    return InsideTrack(
        clock=track.clock + shift, restarts=track.restarts, began_seconds=track.began_seconds + shift, marks=marks
    )
