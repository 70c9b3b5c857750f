"""Is anything leaking: load, GPUs and host looked at together."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from statistics import fmean
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.leak.facts import Estimate, Observation, Track, Verdict, observations
from vllm_headroom.derive.leak.inside import InsideTrack, InsideTracks, insides, location, sharpened
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES
from vllm_headroom.derive.leak.track import held, observe, residues, warming_up
from vllm_headroom.derive.life.signs import of_service, out_of_service
from vllm_headroom.derive.readings import (
    awake,
    begun_anew,
    finished,
    gpu_labels,
    life,
    named,
    remembered,
    running_requests,
    states,
    together,
)
from vllm_headroom.model import Failure, Gpu, Sample, Snapshot
from vllm_headroom.vocabulary import LeakState, Role

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
        samples += _host_samples(role, tracks[role], settled=settled)
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


def _host_samples(role: Role, track: Track, *, settled: bool) -> Iterator[Sample]:
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


MINUTE_SECONDS: Final = 60.0
WINDOW_MINUTES: Final = 10
"""The window of the plain rule this figure comes from, a post-mortem's alert on growth over 10 minutes."""

BAND: Final = 0.15
SLACK_REQUESTS: Final = 2.0
"""A minute's mean may differ from the window's by this share or these few requests: arrivals alone do that."""


class LoadState(Struct, frozen=True, kw_only=True):
    """Minute means of the requests in the engine (newest last), the minute being gathered and what memory was then.

    `stable_since` is None while load is not stable; `held_bytes` is, by UUID, what was held when it became stable.
    """

    minutes: tuple[float, ...] = ()
    began_seconds: float | None = None
    total: float = 0.0
    count: int = 0
    stable: bool | None = None
    held_bytes: dict[str, int] = field(default_factory=dict)


def load(state: LoadState, snapshot: Snapshot) -> tuple[LoadState, tuple[Sample, ...]]:
    """Return whether the requests in the engine stayed level for ten minutes, and each GPU's change since they have."""
    requests = _requests(snapshot)
    if requests is None:
        return LoadState(), ()
    state = _gathered(state, requests, snapshot.monotonic_seconds)
    if state.stable is None:
        return state, ()
    held = _held(snapshot) if state.stable else {}
    first = {uuid: state.held_bytes.get(uuid, now) for uuid, (_, now) in held.items()}
    if first != state.held_bytes:
        state = replace(state, held_bytes=first)
    deltas = [Sample(catalog.MEMORY_DELTA, labels, now - first[uuid]) for uuid, (labels, now) in held.items()]
    return state, (Sample(catalog.LOAD_STABLE, (), 1.0 if state.stable else 0.0), *deltas)


def _requests(snapshot: Snapshot) -> float | None:
    """Return requests running and waiting in all engines; None where one does not say how many run."""
    engines = () if snapshot.page is None else named(snapshot.page)
    running = together(engine.running for engine in engines)
    return None if running is None else running + sum(engine.waiting or 0.0 for engine in engines)


def _gathered(state: LoadState, requests: float, now: float) -> LoadState:
    began = now if state.began_seconds is None or now < state.began_seconds else state.began_seconds
    state = replace(state, began_seconds=began, total=state.total + requests, count=state.count + 1)
    if now - began < MINUTE_SECONDS:
        return state
    minutes = (*state.minutes, state.total / state.count)[-WINDOW_MINUTES:]
    stable = _level(minutes) if len(minutes) == WINDOW_MINUTES else None
    return replace(state, minutes=minutes, began_seconds=now, total=0.0, count=0, stable=stable)


def _level(minutes: tuple[float, ...]) -> bool:
    mean = fmean(minutes)
    return all(abs(minute - mean) <= max(BAND * mean, SLACK_REQUESTS) for minute in minutes)


def _held(snapshot: Snapshot) -> dict[str, tuple[tuple[str, str], int]]:
    held = ((gpu, gpu.held_bytes) for gpu in snapshot.devices)
    return {gpu.reading.uuid: (gpu_labels(gpu), held_bytes) for gpu, held_bytes in held if held_bytes is not None}


SETTLED_SECONDS: Final = 30.0
"""Memory goes after the page says that the engine sleeps, on some cards seconds after (vllm-project/vllm#37533)."""

GIVEN_BACK: Final = 0.1
"""What gives back less than this share of what it keeps has no residue: level 0 pauses the scheduler and keeps all."""


class SleepState(Struct, frozen=True, kw_only=True):
    """Since when this life sleeps, on the monotonic clock, and the least it held of each GPU in its last sleep.

    `settled` is whether that is of the sleep that goes on. The least, because it has not let go of everything at the
    beginning, and takes up again before it says so.
    """

    life: str | None = None
    since_seconds: float | None = None
    settled: bool = False
    least_bytes: dict[str, int] = field(default_factory=dict)


def sleep(state: SleepState, snapshot: Snapshot) -> tuple[SleepState, tuple[Sample, ...]]:
    """Return the residue of each of the engine's GPUs: of this sleep once it has settled, or of the one before.

    Another life has not slept yet.
    """
    state = _followed(state, snapshot)
    samples = tuple(
        Sample(catalog.SLEEP_RESIDUE, gpu_labels(gpu), float(state.least_bytes[gpu.reading.uuid]))
        for gpu in snapshot.owned
        if gpu.reading.uuid in state.least_bytes
    )
    return state, samples


def _followed(state: SleepState, snapshot: Snapshot) -> SleepState:
    page = snapshot.page
    if page is None:
        return state
    now, named = snapshot.monotonic_seconds, life(page)
    anew = begun_anew(state.life, named, None, None)
    state = SleepState(life=named) if anew else replace(state, life=state.life or named)
    if awake(page) is not False:
        return SleepState(life=state.life, least_bytes=state.least_bytes)
    since = now if state.since_seconds is None else state.since_seconds
    if now - since < SETTLED_SECONDS:
        return replace(state, since_seconds=since)
    held = {gpu.reading.uuid: gpu.held_bytes for gpu in snapshot.owned if gpu.held_bytes is not None}
    to_wake = {} if snapshot.life is None else dict(snapshot.life.to_wake)
    held = {uuid: n_bytes for uuid, n_bytes in held.items() if to_wake.get(uuid, n_bytes) >= GIVEN_BACK * n_bytes}
    least = state.least_bytes if state.settled else {}
    least = remembered(least, held) | {uuid: min(n_bytes, least.get(uuid, n_bytes)) for uuid, n_bytes in held.items()}
    return replace(state, settled=state.settled or bool(held), least_bytes=least or state.least_bytes)


class LeakMemory(Struct, frozen=True, kw_only=True):
    """Everything the detector remembers."""

    load: LoadState = field(default_factory=LoadState)
    gpus: Tracks = field(default_factory=dict)
    host: Tracks = field(default_factory=dict)
    inside: InsideTracks = field(default_factory=dict)
    sleep: SleepState = field(default_factory=SleepState)
    asleep: Tracks = field(default_factory=dict)


def leaks(state: LeakMemory, snapshot: Snapshot) -> tuple[LeakMemory, tuple[Sample, ...]]:
    """Return what is kept asleep, whether load is stable and the leak family of every GPU and role of the engine's.

    Only a life that has worked and goes on is looked at for leaks; any other is asleep or not, all the same.
    """
    slept, kept = sleep(state.sleep, snapshot)
    served = of_service(snapshot)
    loaded, load_samples = load(state.load, served)
    settled = loaded.stable is not False
    inside = insides(state.inside, served)
    seen = tuple(observations(served, served.owned))
    asleep = residues(state.asleep, state.gpus, slept.least_bytes, seen)
    gpus, gpu_samples = gpu_leaks(state.gpus, seen, settled=settled, inside=inside, asleep=asleep)
    host, host_samples = host_leaks(state.host, served, settled=settled)
    memory = LeakMemory(load=loaded, gpus=gpus, host=host, inside=inside, sleep=slept, asleep=asleep)
    samples = (*load_samples, *gpu_samples, *host_samples)
    return memory, (*kept, *(samples if snapshot.in_service else out_of_service(snapshot, samples)))
