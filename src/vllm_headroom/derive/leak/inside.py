"""Where memory grows inside the engine, according to the probe, not counting torch's cache.

The places are torch's tensors, torch's fragments, and memory outside torch.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import Estimate, Observation, Track, start_track
from vllm_headroom.derive.leak.precedent import end_run
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.derive.series import limit_remembered
from vllm_headroom.model import Gpu, Snapshot
from vllm_headroom.units import DAY_SECONDS
from vllm_headroom.vocabulary import LeakLocation, MemoryPart

MARK_SECONDS: Final = 20.0
"""Our choice: the minimum time between two marks. A mark records the memory in each place at one
point in time.
"""

MOST_MARKS: Final = 256
"""If there are more marks than this, every second one is dropped. This limits the size of the
state.
"""

FORGET_SECONDS: Final = DAY_SECONDS
"""The track of a device or role is dropped if unseen for this time. This limits the state's size
while pods and MIG instances come and go.
"""


class Mark(Struct, frozen=True, gc=False):
    """The lowest memory in each place during the MARK_SECONDS that follow `seconds`."""

    seconds: float
    """When the mark began, on the monotonic clock."""
    held_bytes: tuple[float, ...]
    """The bytes in each of PLACES, in the order of PLACES."""


class InsideTrack(Struct, frozen=True, kw_only=True):
    """What the detector remembers about one GPU's memory inside the engine during one run."""

    restarts: int
    """The number of restarts before this run, which identifies the run."""
    in_use: Track
    """The track of the memory in use, which is the held memory excluding torch's cache. A leak may
    grow into free memory of torch's cache. A leak into torch's cache shows in this track but not in
    held memory.
    """

    open_mark: Mark
    """The newest mark, to which readings are still being added."""
    marks: tuple[Mark, ...] = ()
    """The complete marks since the run began, with the oldest first and some dropped."""


InsideTracks = dict[str, InsideTrack]
"""The track of each GPU, by UUID."""


def update_insides(
    tracks: InsideTracks, snapshot: Snapshot, observations: Iterable[tuple[Gpu, Observation]]
) -> InsideTracks:
    """Return the tracks after one more sample.

    `observations` contains the GPUs for which the probe has figures in this sample. Any other GPU
    keeps its track. The track of a GPU starts over when the engine restarts, and after a sleep.
    """
    now_seconds = snapshot.monotonic_seconds
    tracks = limit_remembered(tracks, {gpu.reading.uuid for gpu in snapshot.devices})
    updated = {
        uuid: track
        for uuid, track in tracks.items()
        if 0 <= now_seconds - track.in_use.clock.snapshot_seconds < FORGET_SECONDS
    }
    restarts = 0 if snapshot.engine_status is None else snapshot.engine_status.restarts
    for gpu, observation in observations:
        uuid = gpu.reading.uuid
        # A sleep releases most of the memory, so the comparison starts over afterwards.
        if observation.awake is False:
            updated.pop(uuid, None)
            continue
        mark = _make_mark(gpu, now_seconds)
        if mark is None:
            continue
        track = updated.get(uuid)
        if track is None or track.restarts != restarts:
            in_use = start_track(now_seconds)
            if track is not None:
                # The precedent from the ended run may excuse growth in this run.
                in_use = replace(in_use, precedent=end_run(track.in_use))
            track = InsideTrack(restarts=restarts, open_mark=mark, in_use=in_use)
        updated[uuid] = _add_mark(track, mark, observation)
    return updated


def _make_mark(gpu: Gpu, now_seconds: float) -> Mark | None:
    """Return the memory in each place on a GPU.

    Returns None if the engine's memory is unknown. Also returns None if torch's allocated or
    reserved memory is unknown.
    """
    inside = gpu.inside
    if inside is None or gpu.held_bytes is None:
        return None
    allocated_bytes = inside.allocated_bytes
    reserved_bytes = inside.reserved_bytes
    if allocated_bytes is None or reserved_bytes is None:
        return None
    # If torch does not report its fragmented memory, all its unused memory counts as fragmented.
    unused_bytes = reserved_bytes - allocated_bytes
    fragmented_bytes = dict(inside.parts).get(MemoryPart.FRAGMENTED, unused_bytes)
    outside_bytes = gpu.held_bytes - reserved_bytes
    return Mark(now_seconds, (allocated_bytes, fragmented_bytes, outside_bytes))


def _add_mark(track: InsideTrack, mark: Mark, observation: Observation) -> InsideTrack:
    """Return the track with one more reading.

    The reading is added to the open mark. If the open mark is old enough, it is complete. In that
    case, the reading begins the next mark.
    """
    # Within MARK_SECONDS, only the lowest reading is used. Temporary memory of a request is not
    # growth.
    open_mark = track.open_mark
    if mark.seconds - open_mark.seconds < MARK_SECONDS:
        least_bytes = tuple(map(min, open_mark.held_bytes, mark.held_bytes))
        return replace(track, open_mark=replace(open_mark, held_bytes=least_bytes))
    marks = (*track.marks, open_mark)
    # The newest mark and every second earlier mark are kept.
    if len(marks) > MOST_MARKS:
        marks = (*marks[0:-1:2], open_mark)
    in_use = _observe_in_use(track.in_use, open_mark, observation)
    return replace(track, open_mark=mark, marks=marks, in_use=in_use)


def _observe_in_use(in_use: Track, mark: Mark, observation: Observation) -> Track:
    """Return the track of the memory in use after one more complete mark."""
    allocated_bytes, _, outside_bytes = mark.held_bytes
    used_bytes = int(allocated_bytes + outside_bytes)
    room_bytes = None
    if observation.room_bytes is not None:
        # torch releases its cache when memory is short. The cache is therefore part of the room.
        room_bytes = observation.room_bytes + (observation.held_bytes or 0) - used_bytes
    return observe(
        in_use,
        replace(observation, held_bytes=used_bytes, neighbours=None, room_bytes=room_bytes),
    )


def sharpen_track(track: Track, asleep: Track | None, inside: InsideTrack | None) -> Track:
    """Return the track of held memory with the most certain of three verdicts.

    The verdicts are on held memory, memory kept during sleep, and memory in use. If several are
    equally certain, the one on held memory is used. Only its time to out-of-memory includes the
    next peak. The figures on held memory are omitted while the engine rests.
    """
    if track.presence.rested_seconds is not None:
        track = replace(track, estimate=None)
    in_use = None if inside is None else inside.in_use
    for candidate in (asleep, in_use):
        if candidate is not None and candidate.verdict > track.verdict:
            track = replace(
                track,
                verdict=candidate.verdict,
                estimate=candidate.estimate,
                is_excused=candidate.is_excused,
            )
    return track


def move_track(track: Track, shift_seconds: float) -> Track:
    """Return a track whose snapshot time has been moved to a different monotonic clock."""
    snapshot_seconds = track.clock.snapshot_seconds + shift_seconds
    return replace(track, clock=replace(track.clock, snapshot_seconds=snapshot_seconds))


def move_inside_track(track: InsideTrack, shift_seconds: float) -> InsideTrack:
    """Return a track that has been moved, with its marks, to a different monotonic clock."""
    return replace(
        track,
        open_mark=_move_mark(track.open_mark, shift_seconds),
        marks=tuple(_move_mark(mark, shift_seconds) for mark in track.marks),
        in_use=move_track(track.in_use, shift_seconds),
    )


def _move_mark(mark: Mark, shift_seconds: float) -> Mark:
    return replace(mark, seconds=mark.seconds + shift_seconds)


LEAK_PARTS: Final = 6
"""The duration of a leak is divided into this many parts. A place is leaking only if it grew in
every part. With three parts, one in ten simulated leaks was attributed to the wrong place.
"""

STEADY_SHARE: Final = 0.01
"""A place is not leaking if its steady growth is below this share. The share is of the largest
growth of any place.
"""

PLACES: Final = {
    LeakLocation.TENSORS: "tensors",
    LeakLocation.FRAGMENTATION: "what torch has reserved and cannot use",
    LeakLocation.OUTSIDE_TORCH: "what torch knows nothing of",
}
"""The places where memory is held, in the order of a mark's bytes. The texts are used after the
word "in".
"""


def find_location(estimate: Estimate | None, inside: InsideTrack | None) -> LeakLocation | None:
    """Return the place where memory grows.

    Returns None if nothing grows or there is no mark. The duration of the leak is divided into
    sixths. Each place is rated by the sixth in which it grew least. First uses occur in steps and
    add nothing in at least one sixth. The place with the highest rating is returned. If even this
    rating is close to zero, the total growth decides. In that case, the place that grew most is
    returned. Cached memory is not a place, because torch releases it.
    """
    if estimate is None or inside is None or estimate.bytes_per_second <= 0:
        return None
    # `leak_seconds` is the leak's duration if it had always grown at its current rate.
    leak_seconds = estimate.leaked_bytes / estimate.bytes_per_second
    began_seconds = inside.in_use.clock.snapshot_seconds - leak_seconds
    begin = bisect_left(inside.marks, began_seconds, key=lambda mark: mark.seconds)
    marks = inside.marks[begin:]
    if len(marks) <= LEAK_PARTS:
        # The leak is too young to have six parts, so the newest marks are used.
        marks = inside.marks[-LEAK_PARTS - 1 :]
    if not marks:
        return None

    cuts = [round(part * (len(marks) - 1) / LEAK_PARTS) for part in range(LEAK_PARTS + 1)]
    held_at_cuts = zip(*(marks[cut].held_bytes for cut in cuts), strict=True)
    grown_bytes: dict[LeakLocation, float] = {}
    steady_bytes: dict[LeakLocation, float] = {}
    for place, held_bytes in zip(PLACES, held_at_cuts, strict=True):
        grown_bytes[place] = held_bytes[-1] - held_bytes[0]
        least_rise_bytes = min(later - earlier for earlier, later in pairwise(held_bytes))
        steady_bytes[place] = LEAK_PARTS * least_rise_bytes
    # The steady growth is six times the smallest of the six rises. A single large step therefore
    # adds nothing to it.
    location = max(steady_bytes, key=lambda place: steady_bytes[place])
    if steady_bytes[location] <= STEADY_SHARE * max(grown_bytes.values()):
        location = max(grown_bytes, key=lambda place: grown_bytes[place])
    has_grown = steady_bytes[location] > 0 or grown_bytes[location] > 0
    return location if has_grown else None
