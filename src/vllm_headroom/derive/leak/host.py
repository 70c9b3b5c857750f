"""Does the host memory of the engine's processes leak?"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom import catalog
from vllm_headroom.derive.leak.facts import Observation, Track
from vllm_headroom.derive.leak.gpus import SHOWN, Tracks, kept, leak_state
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.derive.page_facts import awake, finished
from vllm_headroom.model import EngineProcess, Failure, Sample, Snapshot
from vllm_headroom.vocabulary import LeakState, Role


def host_leaks(state: Tracks, snapshot: Snapshot, *, settled: bool) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the leak state of each role's resident memory; a role without a process has no series.

    The same detector as on GPU memory. A process that comes, goes or is another begins a new life of its role.
    """
    if isinstance(snapshot.processes, Failure):
        return state, ()
    tracks = kept(state)
    samples: list[Sample] = []
    for role in Role:
        processes = tuple(process for process in snapshot.processes if process.role is role)
        if processes:
            tracks[role] = observe(
                tracks.get(role) or Track(clock=snapshot.monotonic_seconds), host_observation(processes, snapshot)
            )
            samples += _samples(role, tracks[role], settled=settled)
    return Tracks(tracks=tracks), tuple(samples)


def host_observation(processes: tuple[EngineProcess, ...], snapshot: Snapshot) -> Observation:
    """Return what the detector is told of the processes of one role."""
    page = None if isinstance(snapshot.engines, Failure) else snapshot.engines
    return Observation(
        seconds=snapshot.monotonic_seconds,
        held_bytes=sum(process.rss_bytes for process in processes),
        finished_total=None if page is None else finished(page),
        life=",".join(sorted(f"{process.pid}:{process.started_at_seconds:.2f}" for process in processes)),
        awake=None if page is None else awake(page),
    )


def _samples(role: Role, track: Track, *, settled: bool) -> Iterator[Sample]:
    is_in = leak_state(track, known=True, settled=settled)
    for state in LeakState:
        yield Sample(catalog.HOST_LEAK_STATE, (str(role), str(state)), float(state is is_in))
    if track.estimate is not None and is_in in SHOWN:
        yield Sample(catalog.HOST_LEAK_RATE, (str(role),), track.estimate.bytes_per_second)
