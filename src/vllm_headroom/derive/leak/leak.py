"""The leak derivation: read each series from a snapshot, and export what its track shows."""

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
    start_track,
)
from vllm_headroom.derive.leak.inside import (
    FORGET_SECONDS,
    InsideTracks,
    find_location,
    sharpen_track,
    update_insides,
)
from vllm_headroom.derive.leak.track import is_warming_up, observe
from vllm_headroom.derive.pages import count_finished, count_running, is_page_awake
from vllm_headroom.derive.residue import SleepState, derive_sleep
from vllm_headroom.derive.run_identity import identify_run
from vllm_headroom.derive.series import label_gpu, limit_remembered, make_facts, make_states
from vllm_headroom.derive.stability import LoadState, derive_load
from vllm_headroom.model import EngineProcess, Failure, Gpu, Sample, Snapshot
from vllm_headroom.vocabulary import EngineState, LeakState, Reason, Role, Source

SHOWN: Final = frozenset({LeakState.GROWING, LeakState.LEAKING})
"""The leak states in which the growth rate and the time until memory is full are exported."""

GPU_FIGURES: Final = (
    (catalog.LEAK_RATE, "bytes_per_second"),
    (catalog.LEAK_RATE_LOWER, "lower"),
    (catalog.LEAK_RATE_UPPER, "upper"),
    (catalog.LEAK_PER_REQUEST, "bytes_per_request"),
    (catalog.LEAKED, "leaked_bytes"),
    (catalog.TIME_TO_OOM, "oom_seconds"),
    (catalog.TIME_TO_OOM_LOWER, "oom_seconds_lower"),
)

_OUT_OF_SERVICE: Final = Failure(
    source=Source.ENGINE,
    reason=Reason.UNREACHABLE,
    message="the engine has not worked in this run, or its run ended",
)

_STATES_BEFORE_WORK: Final = {
    EngineState.STARTING: LeakState.WARMING_UP,
    EngineState.SERVING: LeakState.WARMING_UP,
    EngineState.ASLEEP: LeakState.ASLEEP,
}
"""The leak state of an engine that has not worked yet, by the engine's state. For any other engine
state, the leak state is unknown.
"""

Tracks = dict[str, Track]
"""The track of each series, keyed by GPU UUID or process role."""


class LeakMemory(Struct, frozen=True, kw_only=True):
    """The entire state of the detector."""

    load: LoadState = field(default_factory=LoadState)
    gpus: Tracks = field(default_factory=dict)
    """The tracks of the engine's memory on each GPU, by UUID."""
    host: Tracks = field(default_factory=dict)
    """The tracks of host memory, by the role of the processes."""
    inside: InsideTracks = field(default_factory=dict)
    """The tracks of the memory in use according to the probe, by UUID."""
    sleep: SleepState = field(default_factory=SleepState)
    asleep: Tracks = field(default_factory=dict)
    """The tracks of the memory that the engine keeps during sleep, by UUID."""


def derive_leaks(state: LeakMemory, snapshot: Snapshot) -> tuple[LeakMemory, tuple[Sample, ...]]:
    """Return the detector's new state and all its samples.

    The samples show residues, whether load is level, and leaks. Residues are the memory kept during
    sleep. Leaks are shown for every GPU and role. Leaks are searched for only while the engine is
    in service; sleep is always tracked.
    """
    # The original snapshot is used. The engine may sleep before its first request, while it is not
    # yet in service.
    sleep, sleep_samples = derive_sleep(state.sleep, snapshot)
    served = keep_service(snapshot)
    load, load_samples = derive_load(state.load, served)
    # If it is unknown whether load is level, it is assumed to be level.
    is_settled = load.is_stable is not False
    probed_gpus = tuple(gpu for gpu in served.devices if gpu.inside is not None)
    inside = update_insides(state.inside, served, observe_gpus(served, probed_gpus))
    observations = tuple(observe_gpus(served, served.owned_gpus))
    asleep = update_residues(state.asleep, sleep.least_bytes, observations)
    gpus, gpu_samples = derive_gpu_leaks(
        state.gpus, observations, is_settled=is_settled, inside=inside, asleep=asleep
    )
    host, host_samples = derive_host_leaks(state.host, served, is_settled=is_settled)
    memory = LeakMemory(load=load, gpus=gpus, host=host, inside=inside, sleep=sleep, asleep=asleep)
    samples = (*load_samples, *gpu_samples, *host_samples)
    if not snapshot.is_in_service:
        samples = tuple(derive_out_of_service(snapshot, samples))
    return memory, (*sleep_samples, *samples)


def keep_service(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without evidence of a leak if the engine is out of service.

    The evidence consists of the page, the processes and the held memory. Memory that grows while
    weights are loaded would look like a leak. If the service state is unknown, the engine is
    treated as out of service.
    """
    if snapshot.is_in_service:
        return snapshot
    gpus = snapshot.gpus
    if not isinstance(gpus, Failure):
        gpus = tuple(replace(gpu, held_bytes=None, engine_bytes=None, inside=None) for gpu in gpus)
    return replace(snapshot, engines=_OUT_OF_SERVICE, gpus=gpus, processes=())


def observe_page(snapshot: Snapshot) -> Observation:
    """Return the observation of a snapshot's engine, without any figures on memory."""
    page = snapshot.page
    return Observation(
        seconds=snapshot.monotonic_seconds,
        held_bytes=None,
        finished_total=count_finished(page),
        running=count_running(page),
        run_id=identify_run(page),
        awake=is_page_awake(page),
    )


def observe_gpus(snapshot: Snapshot, gpus: tuple[Gpu, ...]) -> Iterator[tuple[Gpu, Observation]]:
    """Yield each GPU with its observation."""
    of_page = observe_page(snapshot)
    bound_bytes = sum(pool.size_bytes for pool in snapshot.pools if pool.role is None)
    for gpu in gpus:
        # Other processes only matter if the engine's own memory is unknown.
        neighbours = gpu.process_count if gpu.engine_bytes is None else None
        yield (
            gpu,
            replace(
                of_page,
                held_bytes=gpu.held_bytes,
                neighbours=neighbours,
                room_bytes=gpu.room_bytes,
                bound_bytes=bound_bytes,
            ),
        )


def observe_host(snapshot: Snapshot) -> Iterator[tuple[Role, Observation]]:
    """Yield the observation of host memory for each role that has a process.

    Nothing is yielded if the processes could not be read.
    """
    if isinstance(snapshot.processes, Failure):
        return
    room_bytes = None if snapshot.host is None else snapshot.host.room_bytes
    if room_bytes is not None:
        # On a GPU, the detector keeps this much room in reserve. Host memory can be used up
        # completely.
        room_bytes += OUT_OF_MEMORY_BYTES
    of_page = observe_page(snapshot)
    for role in Role:
        processes = [process for process in snapshot.processes if process.role is role]
        if not processes:
            continue
        yield (
            role,
            replace(
                of_page,
                run_id=_identify_processes(processes),
                held_bytes=sum(_count_held(process) for process in processes),
                room_bytes=room_bytes,
                bound_bytes=sum(pool.size_bytes for pool in snapshot.pools if pool.role is role),
            ),
        )


def _count_held(process: EngineProcess) -> int:
    """Return the host memory that a process holds.

    Mapped files are excluded, because the kernel reclaims them before it kills a process.
    Swapped-out memory is included, because a leak would otherwise seem to end when swapping begins.
    """
    return process.rss_bytes - (process.file_bytes or 0) + (process.swap_bytes or 0)


def _identify_processes(processes: list[EngineProcess]) -> str:
    """Return a role's pids and start times as text that identifies its run."""
    # The names are sorted, because /proc lists processes in no fixed order. Start times are
    # multiples of a 0.01 s clock tick.
    return ",".join(
        sorted(f"{process.pid}:{process.started_at_seconds:.2f}" for process in processes)
    )


def derive_gpu_leaks(
    tracks: Tracks,
    observations: Collection[tuple[Gpu, Observation]],
    *,
    is_settled: bool,
    inside: InsideTracks,
    asleep: Tracks,
) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the new tracks, and the leak samples of each GPU in `observations`.

    `is_settled` is whether load is level. `inside` has the tracks of the probe's figures. `asleep`
    has the tracks of the memory kept during sleep. The most certain of the three verdicts is
    exported. While another process comes and goes, the GPU's verdict does not change. A verdict
    only states that memory is filling up. `is_alone` states whether the engine is the cause.
    """
    tracks = keep_recent(tracks, {gpu.reading.uuid for gpu, _ in observations})
    samples: list[Sample] = []
    for gpu, observation in observations:
        # The saved track keeps the verdict on held memory. The most certain of the three verdicts
        # is exported but not saved.
        uuid = gpu.reading.uuid
        labels = label_gpu(gpu)
        track = observe(tracks.get(uuid) or start_track(observation.seconds), observation)
        tracks[uuid] = track
        track = sharpen_track(track, asleep.get(uuid), inside.get(uuid))
        state = find_leak_state(track, is_known=gpu.held_bytes is not None, is_settled=is_settled)
        samples += make_states(catalog.LEAK_STATE, labels, state)
        samples += _make_bound((*labels, ""), track)
        estimate = track.estimate if state in SHOWN else None
        samples += make_facts(GPU_FIGURES, labels, estimate)
        location = find_location(estimate, inside.get(uuid))
        if location is not None:
            samples += make_states(catalog.LEAK_LOCATION, labels, location)
    return tracks, tuple(samples)


def is_alone(gpu: Gpu) -> bool:
    """Return whether growth on a GPU is known to be the engine's.

    The result is True if the driver reports the engine's memory, or if no other process is on the
    GPU.
    """
    return gpu.engine_bytes is not None or gpu.process_count == 1


def keep_recent(tracks: Tracks, present: Collection[str]) -> Tracks:
    """Return the tracks that were updated within a day of the newest track.

    Tracks are compared with each other rather than with the clock. A wrong clock therefore does not
    cause any track to be dropped.
    """
    newest_seconds = max((track.clock.snapshot_seconds for track in tracks.values()), default=0.0)
    return {
        name: track
        for name, track in limit_remembered(tracks, present).items()
        if newest_seconds - track.clock.snapshot_seconds < FORGET_SECONDS
    }


def find_leak_state(track: Track, *, is_known: bool, is_settled: bool) -> LeakState:
    """Return the leak state that is exported for a track.

    `is_known` is whether the memory is currently known; `is_settled` is whether load is level.
    """
    if not is_known or track.history.anchor is None:
        return LeakState.UNKNOWN
    # Sleep is checked before the verdicts, because memory during sleep is not evidence of growth.
    if track.presence.is_asleep:
        return LeakState.ASLEEP
    # An alarm continues even while most of the memory is released. Any other state becomes
    # unsettled.
    if track.presence.rested_seconds is not None and track.alarm is None:
        return LeakState.UNSETTLED
    if track.verdict is Certainty.LEAKING:
        return LeakState.LEAKING
    if track.verdict is Certainty.GROWING:
        return LeakState.GROWING
    if not is_settled:
        return LeakState.UNSETTLED
    return LeakState.WARMING_UP if is_warming_up(track) else LeakState.STABLE


def _make_bound(labels: tuple[str, str, str], track: Track) -> Iterator[Sample]:
    """Yield how much memory configured pools may still take.

    The amount is the pools' size minus the growth so far. Nothing is yielded without a pool, or
    before a stretch's first block.
    """
    history = track.history
    if not track.bound_bytes or history.origin is None or history.anchor is None:
        return
    grown_bytes = history.rings[0].blocks[-1].floor_bytes - history.anchor.floor_bytes
    open_bytes = max(0.0, track.bound_bytes - max(0.0, grown_bytes))
    yield Sample(catalog.LEAK_BOUND, labels, open_bytes)


def update_residues(
    asleep: Tracks,
    residues_bytes: Mapping[str, int],
    observations: Iterable[tuple[Gpu, Observation]],
) -> Tracks:
    """Return the tracks of the memory kept during sleep, by UUID, after one more sample.

    `residues_bytes` is the memory kept during the newest sleep. A track begins during a sleep.
    While the engine is awake, each sample adds a reading. The reading is the memory kept during the
    previous sleep. No reading is added during a sleep, because the room differs while the engine
    sleeps. No reading is added either while another process may hold part of the memory.
    """
    tracks = {uuid: track for uuid, track in asleep.items() if uuid in residues_bytes}
    for gpu, observation in observations:
        uuid = gpu.reading.uuid
        if uuid not in residues_bytes:
            continue
        track = tracks.get(uuid)
        if track is None:
            # The memory kept during sleep can only be measured during a sleep. A track that began
            # while the engine is awake would compare unlike figures. One figure would be of a
            # sleeping engine, the other of a working one.
            if observation.awake is not False:
                continue
            track = start_track(observation.seconds)
        # The single process is the engine itself.
        is_engines_own = observation.neighbours is None or observation.neighbours <= 1
        held_bytes = residues_bytes[uuid] if observation.awake and is_engines_own else None
        tracks[uuid] = observe(track, replace(observation, held_bytes=held_bytes, awake=None))
    return tracks


def derive_host_leaks(
    tracks: Tracks, snapshot: Snapshot, *, is_settled: bool
) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the new tracks and the samples of host memory.

    The samples are each role's leak state and one time. The time is until the growth of all roles
    together fills the room. A role without a process has no samples. If a process starts, exits or
    is replaced, its role's comparison starts over. There are no samples if the processes could not
    be read.
    """
    if isinstance(snapshot.processes, Failure):
        return tracks, ()
    tracks = keep_recent(tracks, tracks)
    samples: list[Sample] = []
    filling: list[Estimate] = []
    for role, observation in observe_host(snapshot):
        track = observe(tracks.get(role) or start_track(snapshot.monotonic_seconds), observation)
        tracks[role] = track
        state = find_leak_state(track, is_known=True, is_settled=is_settled)
        samples += make_states(catalog.HOST_LEAK_STATE, (str(role),), state)
        samples += _make_bound(("", "", str(role)), track)
        estimate = track.estimate
        is_resting = track.presence.rested_seconds is not None
        if estimate is None or state not in SHOWN or is_resting:
            continue
        samples.append(Sample(catalog.HOST_LEAK_RATE, (str(role),), estimate.bytes_per_second))
        # If there is no limit, a leak has a pace but no time at which memory is full.
        if observation.room_bytes is not None:
            filling.append(estimate)
    oom_seconds = _join_times(estimate.oom_seconds for estimate in filling)
    if oom_seconds is not None:
        samples.append(Sample(catalog.HOST_TIME_TO_OOM, (), oom_seconds))
    oom_seconds_lower = _join_times(estimate.oom_seconds_lower for estimate in filling)
    if oom_seconds_lower is not None:
        samples.append(Sample(catalog.HOST_TIME_TO_OOM_LOWER, (), oom_seconds_lower))
    return tracks, tuple(samples)


def _join_times(times: Iterable[float | None]) -> float | None:
    """Return the time in which the growth of all roles together fills the room.

    `times` has the seconds in which each role alone would fill the room. The paces of the roles add
    up. A role whose time is unknown is omitted. Returns None if no time is known.
    """
    known_seconds = [seconds for seconds in times if seconds is not None]
    if not known_seconds:
        return None
    if min(known_seconds) <= 0:  # The room is full, and a pace cannot be computed from a time of 0.
        return 0.0
    return 1 / sum(1 / seconds for seconds in known_seconds)


def derive_out_of_service(snapshot: Snapshot, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return the leak samples of an engine that is out of service.

    The engine's GPUs and roles get a leak state derived from the engine's state. For example, a
    starting engine's leak state is WARMING_UP.
    """
    status = snapshot.engine_status
    state = LeakState.UNKNOWN
    if status is not None and status.is_in_service is not None:
        state = _STATES_BEFORE_WORK.get(status.state, LeakState.UNKNOWN)
    # The detector does not judge an engine that is out of service. The engine's leak states are
    # therefore replaced.
    derived = [sample for sample in samples if sample.metric is not catalog.LEAK_STATE]
    for gpu in snapshot.owned_gpus:
        # If the memory is unknown, the detector could not judge even an engine in service.
        gpu_state = LeakState.UNKNOWN if gpu.held_bytes is None else state
        derived += make_states(catalog.LEAK_STATE, label_gpu(gpu), gpu_state)
    roles = {process.role for process in snapshot.engine_processes}
    for role in sorted(roles, key=list(Role).index):
        derived += make_states(catalog.HOST_LEAK_STATE, (str(role),), state)
    return tuple(derived)
