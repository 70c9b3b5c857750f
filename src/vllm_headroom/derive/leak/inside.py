"""Does it grow in torch's tensors, in the allocator's fragments or outside torch?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from vllm_headroom.derive.leak.facts import Estimate, Track, room
from vllm_headroom.derive.leak.steady import Floor, Steady, estimated, followed
from vllm_headroom.derive.page_facts import awake, finished, running_requests
from vllm_headroom.model import Failure, Gpu, Snapshot
from vllm_headroom.vocabulary import LeakLocation

BLOCK_SECONDS: Final = 20.0
"""Four readings of each side: the least of them is what is held between two steps of the engine."""

GAP_SECONDS: Final = 120.0
"""After a longer silence of the probe a run of rises begins anew."""

THIRDS: Final = 3
MOST_MARKS: Final = 256
FORGET_SECONDS: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Mark:
    """The least of a block: allocated by torch, reserved by torch, and held by the engine beyond that."""

    seconds: float
    allocated_bytes: float
    reserved_bytes: float
    outside_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideTrack:
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
    page = None if isinstance(snapshot.engines, Failure) else snapshot.engines
    kept = {uuid: track for uuid, track in tracks.items() if 0 <= now - track.clock < FORGET_SECONDS}
    for gpu in () if isinstance(snapshot.gpus, Failure) else snapshot.gpus:
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
    return Mark(now, inside.allocated_bytes, inside.reserved_bytes, held - inside.reserved_bytes)


def _looked(track: InsideTrack | None, mark: Mark, snapshot: Snapshot) -> InsideTrack:
    restarts = 0 if snapshot.life is None else snapshot.life.restarts
    if track is None or track.restarts != restarts:
        return InsideTrack(clock=mark.seconds, restarts=restarts, began_seconds=mark.seconds, block=mark)
    if mark.seconds - track.clock > GAP_SECONDS:
        track = replace(track, block=None, tensors=Steady(), outside=Steady())
    if track.block is not None and mark.seconds - track.began_seconds >= BLOCK_SECONDS:
        track = _closed(track, track.block, snapshot)
    if track.block is None:
        return replace(track, clock=mark.seconds, began_seconds=mark.seconds, block=mark)
    return replace(track, clock=mark.seconds, block=_least(track.block, mark))


def _least(block: Mark, mark: Mark) -> Mark:
    return Mark(
        mark.seconds,
        min(block.allocated_bytes, mark.allocated_bytes),
        min(block.reserved_bytes, mark.reserved_bytes),
        min(block.outside_bytes, mark.outside_bytes),
    )


def _closed(track: InsideTrack, block: Mark, snapshot: Snapshot) -> InsideTrack:
    page = None if isinstance(snapshot.engines, Failure) else snapshot.engines
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
    """Return where it grows: where most was added in every third of the leak's time.

    A leak of tensors first uses up what the allocator has cached: then what is allocated grows and the rest shrinks.
    What demand at its highest leaves cached comes in a few steps, and a third without one does not count for it. Where
    nothing grew in every third, as when it has just begun, the whole counts. A run that was found is where it is,
    unless as much grew elsewhere in each third as in all of the run: a small tensor can keep a large segment.
    """
    if found is None or inside is None or found.bytes_per_second <= 0:
        return None
    began = inside.clock - found.leaked_bytes / found.bytes_per_second
    series = _series(inside.marks, began)
    lasting = {place: _lasting(values) for place, values in series.items()}
    most = max(lasting, key=lambda place: lasting[place])
    if found == estimated(inside.surest, inside.room_bytes) and lasting[most] <= found.leaked_bytes:
        return LeakLocation.TENSORS if inside.surest is inside.tensors else LeakLocation.OUTSIDE_TORCH
    if lasting[most] <= 0:
        most = max(series, key=lambda place: _whole(series[place]))
    return most if max(lasting[most], _whole(series[most])) > 0 else None


def _series(marks: tuple[Mark, ...], began: float) -> dict[LeakLocation, list[float]]:
    """Return what each place held since the leak began, in four marks at least where there are as many."""
    since = [mark for mark in marks if mark.seconds >= began]
    since = since if len(since) > THIRDS else list(marks[-THIRDS - 1 :])
    return {
        LeakLocation.TENSORS: [mark.allocated_bytes for mark in since],
        LeakLocation.FRAGMENTATION: [mark.reserved_bytes - mark.allocated_bytes for mark in since],
        LeakLocation.OUTSIDE_TORCH: [mark.outside_bytes for mark in since],
    }


def _whole(values: list[float]) -> float:
    return values[-1] - values[0] if values else 0.0


def _lasting(values: list[float]) -> float:
    """Return the least growth in a third of the time; 0 where there are too few values to say."""
    if len(values) <= THIRDS:
        return 0.0
    ends = [values[round(third * (len(values) - 1) / THIRDS)] for third in range(THIRDS + 1)]
    return min(after - before for before, after in pairwise(ends))


def moved(track: InsideTrack, shift: float) -> InsideTrack:
    """Return a track on another clock, in whose time the marks are; its runs begin anew."""
    marks = tuple(replace(mark, seconds=mark.seconds + shift) for mark in track.marks)
    return InsideTrack(
        clock=track.clock + shift, restarts=track.restarts, began_seconds=track.began_seconds + shift, marks=marks
    )
