"""Does the engine's GPU memory leak, how fast and how long is left?"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.leak.asleep import held
from vllm_headroom.derive.leak.facts import Observation, Track, Verdict
from vllm_headroom.derive.leak.inside import InsideTrack, InsideTracks, sharpened
from vllm_headroom.derive.leak.location import location
from vllm_headroom.derive.leak.track import warming_up
from vllm_headroom.derive.readings import gpu_labels, remembered, states
from vllm_headroom.model import Gpu, Sample
from vllm_headroom.vocabulary import LeakState

SHOWN: Final = frozenset({LeakState.GROWING, LeakState.LEAKING})
FORGET_SECONDS: Final = 86400.0
"""A device or role not seen for a day is forgotten: memory stays bounded while pods and MIG instances change."""


Tracks = dict[str, Track]
"""A track per series, by UUID or role."""


def gpu_leaks(
    state: Tracks, seen: Collection[tuple[Gpu, Observation]], *, settled: bool, inside: InsideTracks, asleep: Tracks
) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the leak family of each of the engine's GPUs; a GPU that cannot be read has no series."""
    tracks = kept(state, {gpu.reading.uuid for gpu, _ in seen})
    samples: list[Sample] = []
    for gpu, each in seen:
        uuid = gpu.reading.uuid
        tracks[uuid] = held(tracks.get(uuid) or Track(clock=each.seconds), each, asleep.get(uuid))
        told = sharpened(tracks[uuid], asleep.get(uuid), inside.get(uuid))
        samples += _samples(gpu, told, inside.get(uuid), settled=settled)
    return tracks, tuple(samples)


def kept(tracks: Tracks, present: Collection[str]) -> Tracks:
    """Return the tracks that were moved within a day of the newest; a wild date makes none forgotten."""
    newest = max((track.clock for track in tracks.values()), default=0.0)
    tracks = remembered(tracks, present)
    return {name: track for name, track in tracks.items() if newest - track.clock < FORGET_SECONDS}


def leak_state(track: Track, *, known: bool, settled: bool) -> LeakState:
    """Return the one state of the contract that a track is in."""
    if not known or track.anchor_seconds is None:
        return LeakState.UNKNOWN
    if track.asleep:
        return LeakState.ASLEEP
    if track.resting_since is not None:
        return LeakState.UNSETTLED
    if track.verdict is not Verdict.NONE:
        return LeakState.LEAKING if track.verdict is Verdict.LEAKING else LeakState.GROWING
    if not settled:
        return LeakState.UNSETTLED
    return LeakState.WARMING_UP if warming_up(track) else LeakState.STABLE


def _samples(gpu: Gpu, track: Track, inside: InsideTrack | None, *, settled: bool) -> Iterator[Sample]:
    labels = gpu_labels(gpu)
    is_in = leak_state(track, known=gpu.held_bytes is not None, settled=settled)
    yield from states(catalog.LEAK_STATE, labels, is_in)
    if track.estimate is None or is_in not in SHOWN:
        return
    found = track.estimate
    values = (
        (catalog.LEAK_RATE, found.bytes_per_second),
        (catalog.LEAK_RATE_LOWER, found.lower),
        (catalog.LEAK_RATE_UPPER, found.upper),
        (catalog.LEAK_PER_REQUEST, found.bytes_per_request),
        (catalog.LEAKED, found.leaked_bytes),
        (catalog.TIME_TO_OOM, found.oom_seconds),
        (catalog.TIME_TO_OOM_LOWER, found.oom_seconds_lower),
    )
    for metric, value in values:
        if value is not None:
            yield Sample(metric, labels, value)
    where = location(found, inside)
    if where is not None:
        yield from states(catalog.LEAK_LOCATION, labels, where)
