"""The leak derivation: load, GPUs and host memory together."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from statistics import fmean
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.leak.facts import Certainty, Estimate, Observation, Track, observe_gpus
from vllm_headroom.derive.leak.inside import InsideTrack, InsideTracks, find_location, sharpen_track, update_insides
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES
from vllm_headroom.derive.leak.track import is_warming_up, observe, update_held, update_residues
from vllm_headroom.derive.life.signs import derive_out_of_service, keep_service
from vllm_headroom.derive.readings import (
    count_finished,
    count_running,
    identify_run,
    is_new_run,
    is_page_awake,
    label_gpu,
    limit_remembered,
    list_named,
    make_states,
    sum_known,
)
from vllm_headroom.model import Failure, Gpu, Sample, Snapshot
from vllm_headroom.vocabulary import LeakState, Role

SHOWN: Final = frozenset({LeakState.GROWING, LeakState.LEAKING})
FORGET_SECONDS: Final = 86400.0
"""A device or role not seen for a day is dropped: this bounds memory while pods and MIG instances change."""


Tracks = dict[str, Track]
"""A track per series, by UUID or role."""


def derive_gpu_leaks(
    state: Tracks, seen: Collection[tuple[Gpu, Observation]], *, settled: bool, inside: InsideTracks, asleep: Tracks
) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the leak family of each of the engine's GPUs; a GPU that cannot be read has no series."""
    tracks = keep_recent(state, {gpu.reading.uuid for gpu, _ in seen})
    samples: list[Sample] = []
    for gpu, each in seen:
        uuid = gpu.reading.uuid
        tracks[uuid] = update_held(tracks.get(uuid) or Track(clock=each.seconds), each, asleep.get(uuid))
        sharp = sharpen_track(tracks[uuid], asleep.get(uuid), inside.get(uuid))
        sharp = replace(sharp, estimate=_count_down(sharp.estimate, each.room_bytes))
        samples += _make_samples(gpu, sharp, inside.get(uuid), settled=settled)
    return tracks, tuple(samples)


def keep_recent(tracks: Tracks, present: Collection[str]) -> Tracks:
    """Return the tracks updated within a day of the newest; a wrong date drops none."""
    newest = max((track.clock for track in tracks.values()), default=0.0)
    tracks = limit_remembered(tracks, present)
    return {name: track for name, track in tracks.items() if newest - track.clock < FORGET_SECONDS}


def find_leak_state(track: Track, *, known: bool, settled: bool) -> LeakState:
    """Return the one state of the contract that a track is in."""
    if not known or track.anchor_seconds is None:
        return LeakState.UNKNOWN
    if track.asleep:
        return LeakState.ASLEEP
    if track.resting_since is not None:
        return LeakState.UNSETTLED
    if track.verdict is not Certainty.NONE:
        return LeakState.LEAKING if track.verdict is Certainty.LEAKING else LeakState.GROWING
    if not settled:
        return LeakState.UNSETTLED
    return LeakState.WARMING_UP if is_warming_up(track) else LeakState.STABLE


def _make_samples(gpu: Gpu, track: Track, inside: InsideTrack | None, *, settled: bool) -> Iterator[Sample]:
    labels = label_gpu(gpu)
    is_in = find_leak_state(track, known=gpu.held_bytes is not None, settled=settled)
    yield from make_states(catalog.LEAK_STATE, labels, is_in)
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
    where = find_location(found, inside)
    if where is not None:
        yield from make_states(catalog.LEAK_LOCATION, labels, where)


def derive_host_leaks(state: Tracks, snapshot: Snapshot, *, settled: bool) -> tuple[Tracks, tuple[Sample, ...]]:
    """Return the leak state of each role's memory, and when the growing roles will have filled the room.

    The detector is the same as on GPU memory. A role without a process has no series; a process that comes, goes or
    changes starts a new run of its role.
    """
    if isinstance(snapshot.processes, Failure):
        return state, ()
    tracks = keep_recent(state, state)
    samples: list[Sample] = []
    growing: list[Estimate] = []
    for role, seen in observe_host(snapshot):
        tracks[role] = observe(tracks.get(role) or Track(clock=snapshot.monotonic_seconds), seen)
        samples += (made := tuple(_make_host_samples(role, tracks[role], settled=settled)))
        found = _count_down(tracks[role].estimate, seen.room_bytes)
        if found is not None and seen.room_bytes is not None and made[-1].metric is catalog.HOST_LEAK_RATE:
            growing.append(found)
    return tracks, (*samples, *_derive_time_left(growing))


def observe_host(snapshot: Snapshot) -> Iterator[tuple[Role, Observation]]:
    """Yield the observation of each role with processes.

    Mapped files, such as weights, do not count: the kernel reclaims them before it kills. Swapped-out memory counts, or
    a leak would end where swapping begins. Unlike a GPU's, the room can be used to the last page, while the detector
    reserves some.
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
            held_bytes=sum(each.rss_bytes - (each.file_bytes or 0) + (each.swap_bytes or 0) for each in processes),
            finished_total=None if page is None else count_finished(page),
            running=None if page is None else count_running(page),
            life=",".join(sorted(f"{process.pid}:{process.started_at_seconds:.2f}" for process in processes)),
            awake=None if page is None else is_page_awake(page),
            room_bytes=None if room_bytes is None else room_bytes + OUT_OF_MEMORY_BYTES,
        )
        yield role, seen


STALE_SECONDS: Final = 300.0
"""An estimate is up to four minutes old: two of a fast alarm, and two until the next block is judged."""


def _count_down(found: Estimate | None, room_bytes: int | None) -> Estimate | None:
    """Return the estimate with the time that the room now leaves: less by what can have passed since it was made.

    A peak of some minutes takes no more from it than that.
    """
    if found is None or room_bytes is None or not found.pace:
        return found
    left = max(0, room_bytes - OUT_OF_MEMORY_BYTES) / found.pace
    passed = 0.0 if found.oom_seconds is None else min(STALE_SECONDS, max(0.0, found.oom_seconds - left))
    lower = found.oom_seconds_lower
    return replace(
        found,
        oom_seconds=left if found.oom_seconds is None else found.oom_seconds - passed,
        oom_seconds_lower=None if lower is None else max(0.0, lower - passed),
    )


def _make_host_samples(role: Role, track: Track, *, settled: bool) -> Iterator[Sample]:
    is_in = find_leak_state(track, known=True, settled=settled)
    yield from make_states(catalog.HOST_LEAK_STATE, (str(role),), is_in)
    if track.estimate is not None and is_in in SHOWN:
        yield Sample(catalog.HOST_LEAK_RATE, (str(role),), track.estimate.bytes_per_second)


def _derive_time_left(growing: list[Estimate]) -> Iterator[Sample]:
    """Yield the time left where several roles fill the same room: their paces add up."""
    for metric, times in (
        (catalog.HOST_TIME_TO_OOM, [found.oom_seconds for found in growing]),
        (catalog.HOST_TIME_TO_OOM_LOWER, [found.oom_seconds_lower for found in growing]),
    ):
        known = [seconds for seconds in times if seconds is not None]
        if known:
            yield Sample(metric, (), 1 / sum(1 / seconds for seconds in known) if min(known) > 0 else 0.0)


MINUTE_SECONDS: Final = 60.0
WINDOW_MINUTES: Final = 10
"""The window of a simple rule in a post-mortem, an alert on growth over 10 minutes."""

BAND: Final = 0.15
SLACK_REQUESTS: Final = 2.0
"""A minute's mean may differ from the window's by this share or number: arrivals alone vary as much."""


class LoadState(Struct, frozen=True, kw_only=True):
    """Minute means of the requests in the engine (newest last), the current minute, and the memory held then.

    `held_bytes` is, by UUID, what was held when load became stable.
    """

    minutes: tuple[float, ...] = ()
    began_seconds: float | None = None
    total: float = 0.0
    count: int = 0
    stable: bool | None = None
    held_bytes: dict[str, int] = field(default_factory=dict)


def derive_load(state: LoadState, snapshot: Snapshot) -> tuple[LoadState, tuple[Sample, ...]]:
    """Return whether the engine's requests stayed level for ten minutes, and each GPU's change since then."""
    requests = _count_requests(snapshot)
    if requests is None:
        return LoadState(), ()
    state = _gather_minute(state, requests, snapshot.monotonic_seconds)
    if state.stable is None:
        return state, ()
    held = _find_held(snapshot) if state.stable else {}
    first = {uuid: state.held_bytes.get(uuid, now) for uuid, (_, now) in held.items()}
    if first != state.held_bytes:
        state = replace(state, held_bytes=first)
    deltas = [Sample(catalog.MEMORY_DELTA, labels, now - first[uuid]) for uuid, (labels, now) in held.items()]
    return state, (Sample(catalog.LOAD_STABLE, (), 1.0 if state.stable else 0.0), *deltas)


def _count_requests(snapshot: Snapshot) -> float | None:
    """Return the requests running and waiting in all engines; None where the running ones are unknown."""
    engines = () if snapshot.page is None else list_named(snapshot.page)
    running = sum_known(engine.running for engine in engines)
    return None if running is None else running + sum(engine.waiting or 0.0 for engine in engines)


def _gather_minute(state: LoadState, requests: float, now: float) -> LoadState:
    began = now if state.began_seconds is None or now < state.began_seconds else state.began_seconds
    state = replace(state, began_seconds=began, total=state.total + requests, count=state.count + 1)
    if now - began < MINUTE_SECONDS:
        return state
    minutes = (*state.minutes, state.total / state.count)[-WINDOW_MINUTES:]
    stable = _is_level(minutes) if len(minutes) == WINDOW_MINUTES else None
    return replace(state, minutes=minutes, began_seconds=now, total=0.0, count=0, stable=stable)


def _is_level(minutes: tuple[float, ...]) -> bool:
    mean = fmean(minutes)
    return all(abs(minute - mean) <= max(BAND * mean, SLACK_REQUESTS) for minute in minutes)


def _find_held(snapshot: Snapshot) -> dict[str, tuple[tuple[str, str], int]]:
    held = ((gpu, gpu.held_bytes) for gpu in snapshot.devices)
    return {gpu.reading.uuid: (label_gpu(gpu), held_bytes) for gpu, held_bytes in held if held_bytes is not None}


SETTLED_SECONDS: Final = 30.0
"""Memory is freed after the page reports sleep, on some devices seconds later (vllm-project/vllm#37533)."""

GIVEN_BACK: Final = 0.1
"""Below this share given back there is no residue: sleep level 0 pauses the scheduler and keeps all memory."""


class SleepState(Struct, frozen=True, kw_only=True):
    """Since when this run sleeps, on the monotonic clock, and the least it held of each GPU in its last sleep.

    `settled` is whether that is the current sleep. The least counts, because memory is freed late in the beginning, and
    taken again before the page reports the wake.
    """

    life: str | None = None
    since_seconds: float | None = None
    settled: bool = False
    least_bytes: dict[str, int] = field(default_factory=dict)


def derive_sleep(state: SleepState, snapshot: Snapshot) -> tuple[SleepState, tuple[Sample, ...]]:
    """Return the residue of each of the engine's GPUs: of this sleep once settled, else of the previous one.

    A new run has not slept yet.
    """
    state = _update_sleep(state, snapshot)
    samples = tuple(
        Sample(catalog.SLEEP_RESIDUE, label_gpu(gpu), float(state.least_bytes[gpu.reading.uuid]))
        for gpu in snapshot.owned
        if gpu.reading.uuid in state.least_bytes
    )
    return state, samples


def _update_sleep(state: SleepState, snapshot: Snapshot) -> SleepState:
    page = snapshot.page
    if page is None:
        return state
    now, named = snapshot.monotonic_seconds, identify_run(page)
    is_new = is_new_run(state.life, named, None, None)
    state = SleepState(life=named) if is_new else replace(state, life=state.life or named)
    if is_page_awake(page) is not False:
        return SleepState(life=state.life, least_bytes=state.least_bytes)
    since = now if state.since_seconds is None else state.since_seconds
    if now - since < SETTLED_SECONDS:
        return replace(state, since_seconds=since)
    held = {gpu.reading.uuid: gpu.held_bytes for gpu in snapshot.owned if gpu.held_bytes is not None}
    to_wake = {} if snapshot.life is None else dict(snapshot.life.to_wake)
    held = {uuid: n_bytes for uuid, n_bytes in held.items() if to_wake.get(uuid, n_bytes) >= GIVEN_BACK * n_bytes}
    least = state.least_bytes if state.settled else {}
    least = limit_remembered(least, held) | {
        uuid: min(n_bytes, least.get(uuid, n_bytes)) for uuid, n_bytes in held.items()
    }
    return replace(state, settled=state.settled or bool(held), least_bytes=least or state.least_bytes)


class LeakMemory(Struct, frozen=True, kw_only=True):
    """The detector's whole state."""

    load: LoadState = field(default_factory=LoadState)
    gpus: Tracks = field(default_factory=dict)
    host: Tracks = field(default_factory=dict)
    inside: InsideTracks = field(default_factory=dict)
    sleep: SleepState = field(default_factory=SleepState)
    asleep: Tracks = field(default_factory=dict)


def measure_watches(state: LeakMemory) -> dict[str, float]:
    """Return for how many seconds each series, by UUID or role, has been compared with itself."""
    tracks = {**state.gpus, **state.host}.items()
    return {name: track.seconds - track.anchor_seconds for name, track in tracks if track.anchor_seconds is not None}


def derive_leaks(state: LeakMemory, snapshot: Snapshot) -> tuple[LeakMemory, tuple[Sample, ...]]:
    """Return the sleep residues, the stability of load and the leak family of every GPU and role of the engine.

    Only a run in service is examined for leaks; sleep is tracked for any.
    """
    slept, kept = derive_sleep(state.sleep, snapshot)
    served = keep_service(snapshot)
    loaded, load_samples = derive_load(state.load, served)
    settled = loaded.stable is not False
    inside = update_insides(state.inside, served)
    seen = tuple(observe_gpus(served, served.owned))
    asleep = update_residues(state.asleep, state.gpus, slept.least_bytes, seen)
    gpus, gpu_samples = derive_gpu_leaks(state.gpus, seen, settled=settled, inside=inside, asleep=asleep)
    host, host_samples = derive_host_leaks(state.host, served, settled=settled)
    memory = LeakMemory(load=loaded, gpus=gpus, host=host, inside=inside, sleep=slept, asleep=asleep)
    samples = (*load_samples, *gpu_samples, *host_samples)
    return memory, (*kept, *(samples if snapshot.in_service else derive_out_of_service(snapshot, samples)))
