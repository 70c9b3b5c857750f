"""Does the host memory of the engine's processes leak?"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom import catalog
from vllm_headroom.derive.leak.facts import Estimate, Observation, Track
from vllm_headroom.derive.leak.gpus import SHOWN, Tracks, kept, leak_state
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.derive.page_facts import awake, finished, running_requests
from vllm_headroom.derive.readings import states
from vllm_headroom.model import Failure, Sample, Snapshot
from vllm_headroom.vocabulary import Role


def host_leaks(state: Tracks, snapshot: Snapshot, *, settled: bool) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the leak state of each role's memory, and when all roles that grow will have filled what is left.

    The same detector as on GPU memory. A role without a process has no series; a process that comes, goes or is another
    begins a new life of its role.
    """
    if isinstance(snapshot.processes, Failure):
        return state, ()
    tracks = kept(state, state)
    samples: list[Sample] = []
    for role, seen in host_observations(snapshot):
        tracks[role] = observe(tracks.get(role) or Track(clock=snapshot.monotonic_seconds), seen)
        samples += _samples(role, tracks[role], settled=settled)
    shown = {sample.labels[0] for sample in samples if sample.metric is catalog.HOST_LEAK_RATE}
    left = _left([track.estimate for role, track in tracks.items() if role in shown and track.estimate is not None])
    return tracks, (*samples, *left)


def host_observations(snapshot: Snapshot) -> Iterator[tuple[Role, Observation]]:
    """Yield what the detector is told of the processes of each role that shows.

    Files that are mapped, such as weights, do not count: the kernel takes them back before it kills. Nor does the room
    end before its last page, as a GPU's does, of which the detector leaves some.
    """
    all_of_them = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    room_bytes = None if snapshot.host is None else snapshot.host.room_bytes
    page = snapshot.page
    for role in Role:
        processes = tuple(process for process in all_of_them if process.role is role)
        if not processes:
            continue
        seen = Observation(
            seconds=snapshot.monotonic_seconds,
            held_bytes=sum(process.rss_bytes - (process.file_bytes or 0) for process in processes),
            finished_total=None if page is None else finished(page),
            running=None if page is None else running_requests(page),
            life=",".join(sorted(f"{process.pid}:{process.started_at_seconds:.2f}" for process in processes)),
            awake=None if page is None else awake(page),
            room_bytes=None if room_bytes is None else room_bytes + OUT_OF_MEMORY_BYTES,
        )
        yield role, seen


def _samples(role: Role, track: Track, *, settled: bool) -> Iterator[Sample]:
    is_in = leak_state(track, known=True, settled=settled)
    yield from states(catalog.HOST_LEAK_STATE, (str(role),), is_in)
    if track.estimate is not None and is_in in SHOWN:
        yield Sample(catalog.HOST_LEAK_RATE, (str(role),), track.estimate.bytes_per_second)


def _left(growing: list[Estimate]) -> Iterator[Sample]:
    """Yield the time that is left where several roles fill the same room: their paces add up."""
    for metric, times in (
        (catalog.HOST_TIME_TO_OOM, [found.oom_seconds for found in growing]),
        (catalog.HOST_TIME_TO_OOM_LOWER, [found.oom_seconds_lower for found in growing]),
    ):
        known = [seconds for seconds in times if seconds is not None]
        if known:
            yield Sample(metric, (), 1 / sum(1 / seconds for seconds in known) if min(known) > 0 else 0.0)
