"""The leak derivation: GPUs and host memory together."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.leak.facts import (
    OUT_OF_MEMORY_BYTES,
    Certainty,
    Estimate,
    Observation,
    Track,
    observe_gpus,
    observe_page,
)
from vllm_headroom.derive.leak.inside import (
    FORGET_SECONDS,
    InsideTracks,
    find_location,
    sharpen_track,
    update_insides,
)
from vllm_headroom.derive.leak.track import is_warming_up, observe
from vllm_headroom.derive.life.signs import derive_out_of_service, keep_service
from vllm_headroom.derive.readings import label_gpu, limit_remembered, make_facts, make_states
from vllm_headroom.derive.residue import SleepState, derive_sleep
from vllm_headroom.derive.stability import LoadState, derive_load
from vllm_headroom.model import Failure, Gpu, Sample, Snapshot
from vllm_headroom.vocabulary import LeakState, Role

SHOWN: Final = frozenset({LeakState.GROWING, LeakState.LEAKING})
GPU_FIGURES: Final = (
    (catalog.LEAK_RATE, "bytes_per_second"),
    (catalog.LEAK_RATE_LOWER, "lower"),
    (catalog.LEAK_RATE_UPPER, "upper"),
    (catalog.LEAK_PER_REQUEST, "bytes_per_request"),
    (catalog.LEAKED, "leaked_bytes"),
    (catalog.TIME_TO_OOM, "oom_seconds"),
    (catalog.TIME_TO_OOM_LOWER, "oom_seconds_lower"),
)
Tracks = dict[str, Track]
"""A track per series, by UUID or role."""


def derive_gpu_leaks(
    state: Tracks,
    seen: Collection[tuple[Gpu, Observation]],
    *,
    settled: bool,
    inside: InsideTracks,
    asleep: Tracks,
) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the leak family of each of the engine's GPUs; a GPU that cannot be read has no series.

    Where the holders of its memory are unknown, growth may be another's: it is at most an early warning. While
    another process comes and goes, the verdict of the time before waits.
    """
    tracks = keep_recent(state, {gpu.reading.uuid for gpu, _ in seen})
    samples: list[Sample] = []
    for gpu, each in seen:
        uuid, labels = gpu.reading.uuid, label_gpu(gpu)
        tracks[uuid] = observe(tracks.get(uuid) or Track(clock=each.seconds), each)
        most = (
            Certainty.LEAKING
            if is_alone(gpu) or tracks[uuid].neighbours == 1
            else Certainty.GROWING
        )
        own = replace(tracks[uuid], verdict=min(tracks[uuid].verdict, most))
        track = sharpen_track(own, asleep.get(uuid), inside.get(uuid))
        is_in = find_leak_state(track, known=gpu.held_bytes is not None, settled=settled)
        samples += (
            *make_states(catalog.LEAK_STATE, labels, is_in),
            *_make_bound((*labels, ""), track),
        )
        found = track.estimate if is_in in SHOWN else None
        samples += make_facts(GPU_FIGURES, labels, found)
        where = find_location(found, inside.get(uuid))
        samples += () if where is None else make_states(catalog.LEAK_LOCATION, labels, where)
    return tracks, tuple(samples)


def is_alone(gpu: Gpu) -> bool:
    """Return whether what grows on a GPU is known to be the engine's."""
    return gpu.engine_bytes is not None or gpu.process_count == 1


def keep_recent(tracks: Tracks, present: Collection[str]) -> Tracks:
    """Return the tracks updated within a day of the newest; a wrong date drops none."""
    newest = max((track.clock for track in tracks.values()), default=0.0)
    tracks = limit_remembered(tracks, present)
    return {name: track for name, track in tracks.items() if newest - track.clock < FORGET_SECONDS}


def find_leak_state(track: Track, *, known: bool, settled: bool) -> LeakState:
    """Return the one state of the contract that a track is in."""
    if not known or track.anchor is None:
        return LeakState.UNKNOWN
    if track.asleep:
        return LeakState.ASLEEP
    if track.rested is not None and track.incident is None:
        return LeakState.UNSETTLED
    if track.verdict is not Certainty.NONE:
        return LeakState.LEAKING if track.verdict is Certainty.LEAKING else LeakState.GROWING
    if not settled:
        return LeakState.UNSETTLED
    return LeakState.WARMING_UP if is_warming_up(track) else LeakState.STABLE


def _make_bound(labels: tuple[str, str, str], track: Track) -> Iterator[Sample]:
    """Yield what the configured pools may still take, by what has grown in this run."""
    if track.bound_bytes and track.first is not None and track.anchor is not None:
        grown_bytes = max(0.0, track.rings[0].points[-1].floor_bytes - track.anchor.floor_bytes)
        yield Sample(catalog.LEAK_BOUND, labels, max(0.0, track.bound_bytes - grown_bytes))


def update_residues(
    asleep: Tracks, least_bytes: Mapping[str, int], seen: Iterable[tuple[Gpu, Observation]]
) -> Tracks:
    """Return the tracks of the memory kept in sleep, by UUID, after one more sample; `least_bytes` are the residues.

    A track starts in an observed sleep of a run that has worked. It sees the residue until the next sleep; nothing
    during sleep, when the room is different, nor where another process may hold a part of it.
    """
    found = {uuid: track for uuid, track in asleep.items() if uuid in least_bytes}
    for gpu, each in seen:
        uuid = gpu.reading.uuid
        before = found.get(uuid) or (Track(clock=each.seconds) if each.awake is False else None)
        if before is not None and uuid in least_bytes:
            is_known = each.awake and (each.neighbours is None or each.neighbours <= 1)
            held_bytes = least_bytes[uuid] if is_known else None
            found[uuid] = observe(before, replace(each, held_bytes=held_bytes, awake=None))
    return found


def derive_host_leaks(
    state: Tracks, snapshot: Snapshot, *, settled: bool
) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the leak state of each role's memory, and when the growing roles will have filled the room.

    The detector is the same as on GPU memory. A role without a process has no series; a process that comes, goes or
    changes starts a new run of its role. Where several roles fill the same room, their paces add up.
    """
    if isinstance(snapshot.processes, Failure):
        return state, ()
    tracks = keep_recent(state, state)
    samples, growing = list[Sample](), list[Estimate]()
    for role, seen in observe_host(snapshot):
        tracks[role] = track = observe(
            tracks.get(role) or Track(clock=snapshot.monotonic_seconds), seen
        )
        is_in = find_leak_state(track, known=True, settled=settled)
        samples += make_states(catalog.HOST_LEAK_STATE, (str(role),), is_in)
        samples += _make_bound(("", "", str(role)), track)
        if track.estimate is not None and is_in in SHOWN:
            samples.append(
                Sample(catalog.HOST_LEAK_RATE, (str(role),), track.estimate.bytes_per_second)
            )
            growing += [track.estimate] if seen.room_bytes is not None else []
    times = {
        catalog.HOST_TIME_TO_OOM: "oom_seconds",
        catalog.HOST_TIME_TO_OOM_LOWER: "oom_seconds_lower",
    }
    for metric, name in times.items():
        if known := [seconds for found in growing if (seconds := getattr(found, name)) is not None]:
            left = 1 / sum(1 / seconds for seconds in known) if min(known) > 0 else 0.0
            samples.append(Sample(metric, (), left))
    return tracks, tuple(samples)


def observe_host(snapshot: Snapshot) -> Iterator[tuple[Role, Observation]]:
    """Yield the observation of each role with processes.

    Mapped files do not count: the kernel reclaims them before it kills. Swapped-out memory counts, or a leak would end
    where swapping begins. Unlike a GPU's, the room can be used to the last page, while the detector reserves some.
    """
    all_of_them = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    room_bytes = None if snapshot.host is None else snapshot.host.room_bytes
    room_bytes = None if room_bytes is None else room_bytes + OUT_OF_MEMORY_BYTES
    for role in Role:
        processes = tuple(process for process in all_of_them if process.role is role)
        if processes:
            held = (
                each.rss_bytes - (each.file_bytes or 0) + (each.swap_bytes or 0)
                for each in processes
            )
            names = sorted(
                f"{process.pid}:{process.started_at_seconds:.2f}" for process in processes
            )
            bound_bytes = sum(pool.size_bytes for pool in snapshot.pools if pool.role is role)
            memory = {"held_bytes": sum(held), "room_bytes": room_bytes, "bound_bytes": bound_bytes}
            yield role, replace(observe_page(snapshot), run_id=",".join(names), **memory)


class LeakMemory(Struct, frozen=True, kw_only=True):
    """The detector's whole state."""

    load: LoadState = field(default_factory=LoadState)
    gpus: Tracks = field(default_factory=dict)
    host: Tracks = field(default_factory=dict)
    inside: InsideTracks = field(default_factory=dict)
    sleep: SleepState = field(default_factory=SleepState)
    asleep: Tracks = field(default_factory=dict)


def derive_leaks(state: LeakMemory, snapshot: Snapshot) -> tuple[LeakMemory, tuple[Sample, ...]]:
    """Return the sleep residues, the stability of load and the leak family of every GPU and role of the engine.

    Only a run in service is examined for leaks; sleep is tracked for any.
    """
    slept, kept = derive_sleep(state.sleep, snapshot)
    served = keep_service(snapshot)
    loaded, load_samples = derive_load(state.load, served)
    settled = loaded.stable is not False
    inside = update_insides(state.inside, served)
    seen = tuple(observe_gpus(served, served.owned_gpus))
    asleep = update_residues(state.asleep, slept.least_bytes, seen)
    gpus, gpu_samples = derive_gpu_leaks(
        state.gpus, seen, settled=settled, inside=inside, asleep=asleep
    )
    host, host_samples = derive_host_leaks(state.host, served, settled=settled)
    memory = LeakMemory(
        load=loaded, gpus=gpus, host=host, inside=inside, sleep=slept, asleep=asleep
    )
    samples = (*load_samples, *gpu_samples, *host_samples)
    return memory, (
        *kept,
        *(samples if snapshot.in_service else derive_out_of_service(snapshot, samples)),
    )
