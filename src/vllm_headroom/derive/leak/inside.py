"""Does what the probe sees inside the engine grow: tensors, what is outside torch, all that is in use?"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.leak.asleep import surer
from vllm_headroom.derive.leak.facts import Observation, Track
from vllm_headroom.derive.leak.judged import foretold
from vllm_headroom.derive.leak.observed import observations
from vllm_headroom.derive.leak.steady import Floor, Steady, estimated, followed
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.derive.readings import remembered
from vllm_headroom.model import Gpu, Snapshot
from vllm_headroom.vocabulary import MemoryPart

BLOCK_SECONDS: Final = 20.0
"""Four readings of each side: the least of them is what is held between two steps of the engine."""

GAP_SECONDS: Final = 120.0
"""After a longer silence of the probe a run of rises begins anew."""

MOST_MARKS: Final = 256
FORGET_SECONDS: Final = 86400.0


class Mark(Struct, frozen=True, gc=False):
    """The least of a block: what torch has allocated, its fragments, and what the engine holds outside torch."""

    seconds: float
    allocated_bytes: float
    fragmented_bytes: float
    outside_bytes: float


class InsideTrack(Struct, frozen=True, kw_only=True):
    """What is remembered of one GPU's inside in one life of the engine.

    `block` is the least so far of the block that began at `began_seconds`; `marks` are the blocks since the life
    began, thinned out. `room_bytes` is what was left on the device. `in_use` is the track of all that is held, without
    the cache that torch keeps: what leaks in large steps shows there, however much the cache takes in.
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
        """The run with the surest verdict."""
        return max(self.tensors, self.outside, key=lambda run: run.verdict)


InsideTracks = dict[str, InsideTrack]
"""A track by the UUID of its GPU."""


def insides(tracks: InsideTracks, snapshot: Snapshot) -> InsideTracks:
    """Return the tracks after one more look; what sleeps or begins anew is compared from there on."""
    now = snapshot.monotonic_seconds
    tracks = remembered(tracks, {gpu.reading.uuid for gpu in snapshot.devices})
    kept = {uuid: track for uuid, track in tracks.items() if 0 <= now - track.clock < FORGET_SECONDS}
    watched = tuple(gpu for gpu in snapshot.devices if gpu.inside is not None or gpu.reading.uuid in kept)
    for gpu, seen in observations(snapshot, watched):
        uuid, mark = gpu.reading.uuid, _mark(gpu, now)
        if seen.awake is False:
            kept.pop(uuid, None)
        elif mark is not None:
            kept[uuid] = replace(_looked(kept.get(uuid), mark, snapshot, seen), room_bytes=seen.room_bytes)
    return kept


def _mark(gpu: Gpu, now: float) -> Mark | None:
    inside, held = gpu.inside, gpu.held_bytes
    if inside is None or inside.allocated_bytes is None or inside.reserved_bytes is None or held is None:
        return None
    free_bytes = inside.reserved_bytes - inside.allocated_bytes
    fragmented_bytes = dict(inside.parts).get(MemoryPart.FRAGMENTED, free_bytes)
    return Mark(now, inside.allocated_bytes, fragmented_bytes, held - inside.reserved_bytes)


def _looked(track: InsideTrack | None, mark: Mark, snapshot: Snapshot, seen: Observation) -> InsideTrack:
    restarts = 0 if snapshot.life is None else snapshot.life.restarts
    if track is None or track.restarts != restarts:
        return InsideTrack(clock=mark.seconds, restarts=restarts, began_seconds=mark.seconds, block=mark)
    if track.block is not None and mark.seconds - track.began_seconds >= BLOCK_SECONDS:
        track = _closed(track, track.block, snapshot, seen)
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


def _closed(track: InsideTrack, block: Mark, snapshot: Snapshot, seen: Observation) -> InsideTrack:
    if snapshot.page is None:  # how much was done is not known: the block goes on
        return track
    done, running = seen.finished_total or 0.0, seen.running or 0.0
    marks = (*track.marks, block)
    return replace(
        track,
        block=None,
        marks=marks if len(marks) <= MOST_MARKS else (*marks[0:-1:2], block),
        tensors=followed(track.tensors, Floor(block.seconds, done, running, block.allocated_bytes)),
        outside=followed(track.outside, Floor(block.seconds, done, running, block.outside_bytes)),
        in_use=_in_use(track.in_use, block, seen),
    )


def _in_use(track: Track | None, block: Mark, seen: Observation) -> Track:
    """Return the track of what is in use after a block; the cache is room, for torch gives it back."""
    used_bytes = int(block.allocated_bytes + block.outside_bytes)
    cached_bytes = (seen.held_bytes or 0) - used_bytes
    room_bytes = None if seen.room_bytes is None else seen.room_bytes + cached_bytes
    return observe(track or Track(clock=seen.seconds), replace(seen, held_bytes=used_bytes, room_bytes=room_bytes))


def sharpened(track: Track, asleep: Track | None, inside: InsideTrack | None) -> Track:
    """Return the track of what is held with the surest verdict: its own, what is kept asleep, or what is inside.

    Of all that is in use only its large steps say anything: a cache that fills is as even there as a leak.
    """
    track = surer(track, asleep)
    if inside is None:
        return track
    if inside.surest.verdict > track.verdict:
        track = replace(track, verdict=inside.surest.verdict, estimate=estimated(inside.surest, inside.room_bytes))
    if inside.in_use is not None and (steps := foretold(inside.in_use)) > track.verdict:
        track = replace(track, verdict=steps, estimate=inside.in_use.estimate)
    return track


def moved(track: InsideTrack, shift: float) -> InsideTrack:
    """Return a track on another clock, in whose time the marks are; its runs begin anew."""
    in_use = track.in_use
    return InsideTrack(
        clock=track.clock + shift,
        restarts=track.restarts,
        began_seconds=track.began_seconds + shift,
        marks=tuple(replace(mark, seconds=mark.seconds + shift) for mark in track.marks),
        in_use=None if in_use is None else replace(in_use, clock=in_use.clock + shift),
    )
