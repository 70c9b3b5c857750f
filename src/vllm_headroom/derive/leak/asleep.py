"""Does what the engine keeps asleep grow from sleep to sleep?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from vllm_headroom.derive.leak.evidence import RISE_BYTES
from vllm_headroom.derive.leak.facts import Observation, Track, Verdict
from vllm_headroom.derive.leak.pauses import anchored
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.model import Gpu


def residues(
    asleep: dict[str, Track],
    tracks: dict[str, Track],
    least_bytes: Mapping[str, int],
    seen: Iterable[tuple[Gpu, Observation]],
) -> dict[str, Track]:
    """Return the tracks of what is kept of each GPU, by UUID, after one more look; `least_bytes` are the residues.

    One begins in a sleep that is seen, of a life that has worked: what was kept before tells of less than its work.
    `tracks` are those of what is held, before this look.
    """
    found = {uuid: track for uuid, track in asleep.items() if uuid in least_bytes}
    for gpu, each in seen if least_bytes else ():
        uuid = gpu.reading.uuid
        before = found.get(uuid) or (Track(clock=each.seconds) if each.awake is False else None)
        if before is not None and uuid in least_bytes:
            found[uuid] = _looked(before, tracks.get(uuid), _kept(each, least_bytes[uuid]))
    return found


def _kept(seen: Observation, least_bytes: int) -> Observation:
    """Return the look as if the engine held the residue until its next sleep.

    Nothing is known asleep, when the room is not what it will be, nor where another process may hold a part of it.
    """
    alone = seen.neighbours is None or seen.neighbours <= 1
    return replace(seen, held_bytes=least_bytes if seen.awake and alone else None, awake=None)


def _looked(before: Track, held: Track | None, seen: Observation) -> Track:
    """Return the track with one more look; an alarm of either is held for a while after a sleep that kept more."""
    track = observe(before, seen)
    alarm = before if held is None else surer(held, before)
    more = seen.held_bytes is not None and seen.held_bytes >= (before.held_bytes or 0.0) + RISE_BYTES
    if alarm.verdict is not Verdict.LEAKING or not more:
        return track
    return replace(track, verdict=Verdict.LEAKING, estimate=alarm.estimate, sure_seconds=track.seconds)


def held(before: Track, seen: Observation, asleep: Track | None) -> Track:
    """Return the track of what is held with one more look, begun anew at a wake to whose alarm the sleep added nothing.

    What had grown was cache, then.
    """
    track = observe(before, seen)
    woke = before.resting_since is not None and track.resting_since is None
    if not woke or before.verdict is not Verdict.LEAKING or asleep is None or asleep.held_bytes is None:
        return track
    return track if asleep.verdict is Verdict.LEAKING else anchored(track)


def surer(track: Track, asleep: Track | None) -> Track:
    """Return the track with the verdict of what is kept asleep, unless its own is as sure.

    Its own time to out-of-memory reckons with the next height, of which what is kept knows nothing.
    """
    if asleep is None or asleep.verdict <= track.verdict:
        return track
    return replace(track, verdict=asleep.verdict, estimate=asleep.estimate)
