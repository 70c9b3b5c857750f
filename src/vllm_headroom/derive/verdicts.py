"""The verdict on each GPU, the engine and its host memory, one sentence each."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive import Derivation
from vllm_headroom.derive.attribution import describe_leftover, describe_orphans
from vllm_headroom.derive.configured import OFFLOAD_HIGH
from vllm_headroom.derive.host_memory import SCOPES, count_shared
from vllm_headroom.derive.leak.inside import PLACES
from vllm_headroom.derive.leak.leak import LeakMemory, is_alone
from vllm_headroom.derive.life.signs import is_starved
from vllm_headroom.derive.readings import make_states
from vllm_headroom.model import (
    NO_VERDICT,
    EngineStatus,
    Failure,
    Gpu,
    HostMemory,
    Sample,
    Snapshot,
    Values,
    Verdict,
)
from vllm_headroom.units import format_duration, format_size
from vllm_headroom.vocabulary import (
    EngineState,
    HostPart,
    LeakLocation,
    LeakState,
    Level,
    Situation,
)

NEIGHBOUR_BYTES: Final = 2**30
"""Memory of other processes is mentioned from here on, as in HeadroomNeighbourGrowing; CUDA contexts are smaller. Files
in /dev/shm too, as in HeadroomHostMemoryLow."""

OVERSHOT: Final = 1.15
"""Times the planned size of offloads from which they take more: buffers and queues of vLLM are shared memory too."""

LOW_BYTES: Final = 512 * 2**20
LOW_SHARE: Final = 0.5
"""As HeadroomGpuMemoryLow: free memory below this, and below this share of what was free when the engine became
ready."""

TIGHT_SHARE: Final = 0.02
"""An engine over its budget on a GPU with less free than this share is reported."""

BLOCKS_BYTES: Final = 2**30
"""Allocations on unified memory failed with 22.5 GiB available (vllm-project/vllm#54200): they need blocks of 2 MiB.
Where nothing is loaded and nobody waits for memory, few of them are usual: the page cache takes what is free.
"""
WAITING_RATIO: Final = 0.05

LOW_HOST_BYTES: Final = 4 * 2**30
LOW_HOST_SHARE: Final = 0.05
"""As HeadroomHostMemoryLow: less left than this, and than this share of the limit; LOW_SHARE applies too."""

GPU_LOST: Final = "HeadroomGpuLost"
NEIGHBOUR: Final = "HeadroomNeighbourGrowing"

STRANDED: Final = 0.05
"""As HeadroomKvCacheStranded."""

LOOP: Final = 3
"""Exits in 90 minutes, as in HeadroomEngineCrashLoop."""

ENGINE_SENTENCES: Final[dict[EngineState, tuple[Situation, Level, str, str | None]]] = {
    EngineState.DOWN: (
        Situation.DOWN,
        Level.ALARM,
        "is down: its metrics page does not answer and no engine process is running",
        "HeadroomEngineDown",
    ),
    EngineState.STARTING: (
        Situation.STARTING,
        Level.UNKNOWN,
        "is starting: leak detection begins when it serves",
        None,
    ),
    EngineState.STALLED: (
        Situation.STALLED,
        Level.ALARM,
        "is stalled: it should make progress and makes none",
        "HeadroomEngineStalled",
    ),
    EngineState.ASLEEP: (Situation.ASLEEP, Level.GOOD, "is asleep", None),
    EngineState.SERVING: (Situation.HEALTHY, Level.GOOD, "serves", None),
    EngineState.UNKNOWN: (
        Situation.BLIND,
        Level.UNKNOWN,
        "may be up or down: that is not known",
        "HeadroomSidecarBlind",
    ),
}

LAST_SEEN: Final = {
    EngineState.SERVING: "served when last seen",
    EngineState.ASLEEP: "was asleep when last seen",
}
"""Used without a page while the state is still assumed from the last one."""

QUIET: Final[dict[str | None, tuple[Level, str]]] = {
    LeakState.STABLE: (Level.GOOD, "no leak seen"),
    LeakState.UNSETTLED: (Level.GOOD, "no leak seen under a load that changes"),
    LeakState.ASLEEP: (Level.GOOD, "the engine sleeps"),
    LeakState.WARMING_UP: (Level.UNKNOWN, "too early to tell whether it leaks"),
}
"""The sentence where nothing grows; the most informative state comes first."""

HOUR_SECONDS: Final = 3600.0
DAY_SECONDS: Final = 24 * HOUR_SECONDS
"""HeadroomOutOfMemorySoon pages, and HeadroomGpuMemoryLeak is critical, below these times left."""

GPU_ALERTS: Final = ("HeadroomOutOfMemorySoon", "HeadroomGpuMemoryLeak", "HeadroomGpuMemoryGrowing")
HOST_ALERTS: Final = (
    "HeadroomHostOutOfMemorySoon",
    "HeadroomHostMemoryRunsOut",
    "HeadroomHostMemoryLeak",
)
"""For a leak that ends within the hour, within the day, and for any other growth."""

SURE_SECONDS: Final = 4 * HOUR_SECONDS
"""A leak in large steps is an alarm after four hours, an even one mostly sooner: until then none is only not seen."""

VERDICTS: Final = "verdicts"

SERVING: Final = "serving"
PLANNED: Final = ("swapped", "shared-gpu")  # others use their GPU by plan


def build_verdicts(
    values: Values, watches: Mapping[str, float], role: str = SERVING
) -> Derivation[tuple[Verdict, ...]]:
    """Build the derivation of the verdicts, its state, and of the situation, that of the first of them."""

    def step(
        _: tuple[Verdict, ...], snapshot: Snapshot
    ) -> tuple[tuple[Verdict, ...], tuple[Sample, ...]]:
        said = judge_snapshot(snapshot, values, watches, role)
        declared = () if role == SERVING else (Sample(catalog.ROLE, (role,), 1.0),)
        return said, (*make_states(catalog.SITUATION, (), said[0].situation), *declared)

    return Derivation(name=VERDICTS, initial=(NO_VERDICT,), step=step)


def measure_watches(state: LeakMemory) -> dict[str, float]:
    """Return for how many seconds each series, by UUID or role, has been compared with itself."""
    tracks = {**state.gpus, **state.host}.items()
    return {
        name: track.seconds - track.anchor.seconds
        for name, track in tracks
        if track.anchor is not None
    }


def judge_snapshot(
    snapshot: Snapshot,
    values: Values,
    watches: Mapping[str, float] = MappingProxyType({}),
    role: str = SERVING,
) -> tuple[Verdict, ...]:
    """Return the verdicts on a tick: alarms, then warnings, then the rest, each by its situation; at least one.

    `watches` is for how long the detector has been comparing each GPU, by UUID, and each role's memory.
    """
    said = [
        *_judge_gpus(snapshot, values, watches),
        *_judge_engine(snapshot, values),
        *_judge_host(snapshot, values, watches),
    ]
    for (name,), value in values.of(catalog.GATE_OPEN).items():
        if value == 0:
            text = f"The gate /gate/{name} is closed; its answer has the reason."
            said.append(
                Verdict(
                    subject="gates", level=Level.WARNING, sentence=text, situation=Situation.GROWING
                )
            )
    if role in PLANNED:
        fine = {"level": Level.GOOD, "alert": None, "situation": Situation.HEALTHY}
        said = [replace(each, **fine) if each.alert == NEIGHBOUR else each for each in said]

    def rank(verdict: Verdict) -> tuple[int, int, int]:
        level = tuple(Level).index(verdict.level)
        return (
            -level if verdict.level in (Level.WARNING, Level.ALARM) else 0,
            tuple(Situation).index(verdict.situation),
            -level,
        )

    return tuple(sorted(said, key=rank))


def _describe_quiet(states: Collection[str | None], watches: Iterable[float]) -> tuple[Level, str]:
    state = next((state for state in QUIET if state in states), None)
    watched = min(watches, default=SURE_SECONDS)
    if state != LeakState.STABLE or watched >= SURE_SECONDS:
        return QUIET.get(state, (Level.UNKNOWN, "whether it leaks is not known"))
    return Level.GOOD, f"watched for {format_duration(watched)}, no leak seen"


def _judge_gpus(
    snapshot: Snapshot, values: Values, watches: Mapping[str, float]
) -> Iterator[Verdict]:
    blind = partial(Verdict, situation=Situation.BLIND)
    if isinstance(snapshot.gpus, Failure):
        text = _end_sentence(f"The GPUs cannot be read: {snapshot.gpus.message}")
        yield blind(subject="GPUs", level=Level.UNKNOWN, sentence=text, alert="HeadroomSourceDown")
        return
    if not snapshot.owned:
        text = "No GPU is known to be the engine's: no GPU memory is judged."
        yield blind(
            subject="GPUs", level=Level.UNKNOWN, sentence=text, alert="HeadroomSidecarBlind"
        )
    for gpu in (each for each in snapshot.devices if each.is_left_out):
        text = f"the engine's processes hold {format_size(gpu.engine_bytes or 0)} of it, and HEADROOM_GPUS leaves it out"
        name = gpu.reading.called
        yield blind(subject=name, level=Level.WARNING, sentence=f"{name} is not judged: {text}.")
    for gpu in sorted(snapshot.owned, key=lambda each: each.reading.index):
        yield _judge_gpu(values, gpu, snapshot, watches)
        for leftover in gpu.leftovers:
            yield Verdict(
                subject=gpu.reading.called,
                level=Level.WARNING,
                sentence=f"{gpu.reading.called}: {describe_leftover(leftover)}.",
                alert="HeadroomMemoryLeftBehind",
                situation=Situation.NEIGHBOUR,
            )


def _judge_gpu(
    values: Values, device: Gpu, snapshot: Snapshot, watches: Mapping[str, float]
) -> Verdict:
    reading, engine_status = device.reading, snapshot.engine_status
    gpu, uuid, name = str(reading.index), reading.uuid, reading.called
    if reading.failure is not None:
        text = _end_sentence(f"{name} cannot be read: {reading.failure.message}")
        return Verdict(
            subject=name,
            level=Level.ALARM,
            sentence=text,
            alert=GPU_LOST,
            situation=Situation.BLIND,
        )
    if reading.memory is None:
        text = f"The memory of {name} is not known: the driver does not report it, or reports what cannot be."
        return Verdict(
            subject=name,
            level=Level.UNKNOWN,
            sentence=text,
            alert="HeadroomSidecarBlind",
            situation=Situation.BLIND,
        )
    state = values.state(catalog.LEAK_STATE, gpu, uuid)
    if state in (LeakState.LEAKING, LeakState.GROWING):
        return _judge_growth(values, snapshot, name, (gpu, uuid, ""), state, alone=is_alone(device))
    level, quiet = _describe_quiet({state}, [watches[uuid]] if uuid in watches else [])
    held = values.value(catalog.GPU_MEMORY_HELD, gpu, uuid, "engine")
    if state == LeakState.ASLEEP and held is not None:
        quiet = f"{quiet} and holds {format_size(held)}"
    free = values.value(catalog.GPU_MEMORY_FREE, gpu, uuid)
    room = [] if free is None else [f"{format_size(free)} are free"]
    to_wake = 0 if engine_status is None else dict(engine_status.to_wake).get(uuid, 0)
    wake = [f"to wake takes {format_size(to_wake)}"] if to_wake else []
    trouble = _find_trouble(
        values, (gpu, uuid), engine_status, inf if free is None else free, to_wake
    )
    if trouble is None:
        sentence = f"{name}: {'; '.join([quiet, *wake, *room])}."
        return Verdict(subject=name, level=level, sentence=sentence)
    situation, alert, text = trouble
    rest = room if situation in (Situation.OVER_BUDGET, Situation.NEIGHBOUR) else []
    sentence = f"{name}: {'; '.join([text, *rest, quiet])}."
    return Verdict(
        subject=name, level=Level.WARNING, sentence=sentence, alert=alert, situation=situation
    )


def _find_trouble(
    values: Values,
    labels: tuple[str, str],
    engine_status: EngineStatus | None,
    free: float,
    to_wake: float,
) -> tuple[Situation, str | None, str] | None:
    """Return what is wrong with a GPU on which nothing grows, the alert that fires, and the words."""
    first = 0 if engine_status is None else dict(engine_status.first_rooms).get(labels[1], 0)
    over = values.of(catalog.MEMORY_DISCREPANCY).items()
    excess = max((value for found, value in over if found[:2] == labels), default=0.0)
    others = values.value(catalog.GPU_MEMORY_HELD, *labels, "other") or 0.0
    low = free < min(LOW_BYTES, LOW_SHARE * first)
    if low or free < to_wake:
        wake = f"to wake takes {format_size(to_wake)}, and " if to_wake else ""
        alert = "HeadroomGpuMemoryLow" if low else None
        return Situation.LOW_MEMORY, alert, f"{wake}only {format_size(free)} are free"
    blocks = values.value(catalog.UNIFIED_FREE_BLOCKS, *labels)
    waits = (values.value(catalog.MEMORY_PRESSURE) or 0.0) > WAITING_RATIO
    loads = engine_status is not None and engine_status.state is EngineState.STARTING
    if blocks is not None and blocks < min(BLOCKS_BYTES, free) and (waits or loads):
        text = f"the card's memory is in the page cache: only {format_size(blocks)} are free in blocks of 2 MiB"
        return Situation.LOW_MEMORY, "HeadroomUnifiedMemoryCached" if waits else None, text
    if excess > 0 and free < TIGHT_SHARE * (values.value(catalog.GPU_MEMORY_TOTAL, *labels) or 0.0):
        text = f"the engine holds {format_size(excess)} more than its budget"
        return Situation.OVER_BUDGET, "HeadroomMemoryDiscrepancy", text
    if others >= NEIGHBOUR_BYTES:
        return Situation.NEIGHBOUR, NEIGHBOUR, f"other processes hold {format_size(others)} of it"
    return None


def _judge_growth(
    values: Values,
    snapshot: Snapshot,
    name: str,
    labels: tuple[str, str, str],
    state: str,
    *,
    alone: bool = True,
) -> Verdict:
    """Return the verdict on memory that leaks, may leak, or fills, by others or as a configured pool.

    It is that of a GPU, or of a role's processes; `labels` are those of its bound.
    """
    (*gpu, role), sure = labels, state == LeakState.LEAKING
    known = sure or alone
    verdict = partial(Verdict, subject="host memory" if role else name)
    bound = values.value(catalog.LEAK_BOUND, *labels)
    pools = [pool for pool in snapshot.pools if (pool.role or "") == role]
    pool_bytes = sum(pool.size_bytes for pool in pools)
    if not sure and bound:
        filled = f"filling, {format_size(pool_bytes - bound)} of {format_size(pool_bytes)}"
        text = f"{name} grows as its configured pools do: {filled}."
        return verdict(level=Level.GOOD, sentence=text, situation=Situation.FILLING)
    if role:
        rate, per_request, where = values.value(catalog.HOST_LEAK_RATE, role), None, None
        left, least = (
            values.value(catalog.HOST_TIME_TO_OOM),
            values.value(catalog.HOST_TIME_TO_OOM_LOWER),
        )
        alerts, situation = HOST_ALERTS, Situation.HOST_LEAK
    else:
        rate, per_request = (
            values.value(catalog.LEAK_RATE, *gpu),
            values.value(catalog.LEAK_PER_REQUEST, *gpu),
        )
        where = values.state(catalog.LEAK_LOCATION, *gpu)
        left, least = (
            values.value(catalog.TIME_TO_OOM, *gpu),
            values.value(catalog.TIME_TO_OOM_LOWER, *gpu),
        )
        alerts, situation = GPU_ALERTS, Situation.LEAKING if sure else Situation.GROWING
    how = "" if rate is None else f" {format_size(HOUR_SECONDS * rate)} an hour"
    if per_request is not None and known:
        how = f" {format_size(1000 * per_request)} per 1,000 requests"
    place = "" if where is None else f", in {PLACES[LeakLocation(where)]}"
    said = f"{'leaks' if sure else 'may leak'}{how}{place}"
    if not known:
        said = f"fills{how and ' by'}{how}, not known by whom"
    if left is not None and left < 1:
        said += ": out of memory at any moment"
    elif left is not None:
        earliest = (
            "" if least is None or not known else f", at the earliest in {format_duration(least)}"
        )
        said += f": out of memory in about {format_duration(left)}{earliest}"
    if bound == 0 and any(pool.part is not HostPart.MULTIMODAL_CACHE for pool in pools):
        said += f"; its pools of {format_size(pool_bytes)} are full: offloads can take {OFFLOAD_HIGH} times that"
    soon = left is not None and left < HOUR_SECONDS
    near = known and left is not None and left < (DAY_SECONDS if sure else HOUR_SECONDS)
    alert = alerts[0] if sure and soon else alerts[1] if near else alerts[2]
    level = Level.ALARM if known and (sure or soon) else Level.WARNING
    return verdict(level=level, sentence=f"{name} {said}.", alert=alert, situation=situation)


def _judge_engine(snapshot: Snapshot, values: Values) -> Iterator[Verdict]:
    state = EngineState.UNKNOWN if snapshot.engine_status is None else snapshot.engine_status.state
    engine, (situation, level, text, alert) = (
        partial(Verdict, subject="engine"),
        ENGINE_SENTENCES[state],
    )
    if (
        state is EngineState.DOWN
        and snapshot.engine_status is not None
        and not snapshot.engine_status.was_seen
    ):
        level, alert = (
            Level.UNKNOWN,
            None,
        )  # HeadroomEngineDown also waits until an engine has been seen
        text = "has not been seen yet: its metrics page does not answer and no engine process is running"
    if isinstance(snapshot.engines, Failure):
        if state in LAST_SEEN:
            level, text, situation = Level.UNKNOWN, LAST_SEEN[state], Situation.BLIND
        cause = f"; {snapshot.engines.message}"
        if state is EngineState.UNKNOWN and is_starved(snapshot.processes):
            cause = f"; the machine is short of CPU{cause}"
    elif snapshot.engine_status is not None and snapshot.engine_status.hang_signs:
        text, alert = (
            "is stalled" if state is EngineState.STALLED else "may be stalled",
            "HeadroomEngineStalled",
        )
        cause = f": its page shows no work, and {', and '.join(each.value for each in snapshot.engine_status.hang_signs)}"
    else:
        cause = _describe_load(values) if state is EngineState.SERVING else ""
    yield engine(
        level=level,
        sentence=_end_sentence(f"The engine {text}{cause}"),
        alert=alert,
        situation=situation,
    )
    ends = 0 if snapshot.engine_status is None else snapshot.engine_status.recent_ends
    if ends >= LOOP:
        text = f"The engine ended {ends} times in the last 90 minutes."
        yield engine(
            level=Level.ALARM,
            sentence=text,
            alert="HeadroomEngineCrashLoop",
            situation=Situation.CRASH_LOOP,
        )
    stranded = max(values.of(catalog.ENGINE_KV_STRANDED).values(), default=0.0)
    if stranded > STRANDED:
        text = f"{100 * stranded:.0f} % of the KV cache is held by no request."
        yield engine(
            level=Level.WARNING,
            sentence=text,
            alert="HeadroomKvCacheStranded",
            situation=Situation.STRANDED,
        )


def _describe_load(values: Values) -> str:
    """Return the current load; while requests wait there is no room for more, whatever the KV cache has left."""
    counted = ((catalog.ENGINE_RUNNING, "running"), (catalog.ENGINE_WAITING, "waiting"))
    words = [
        f"{sum(found.values()):.0f} {word}"
        for metric, word in counted
        if (found := values.of(metric))
    ]
    used = values.of(catalog.ENGINE_KV_USED).values()
    waits = any(values.of(catalog.ENGINE_WAITING).values())
    more = () if waits else values.of(catalog.ENGINE_ADDITIONAL_REQUESTS).values()
    words += [f"KV cache {100 * max(used):.0f} % used"] if used else []
    words += [f"room in it for {sum(more):.0f} more"] if more else []
    return f": {', '.join(words)}" if words else ""


def _judge_host(
    snapshot: Snapshot, values: Values, watches: Mapping[str, float]
) -> Iterator[Verdict]:
    found = {
        labels[0]: labels[1]
        for labels, value in values.of(catalog.HOST_LEAK_STATE).items()
        if value
    }
    grows = {
        role: state
        for role, state in found.items()
        if state in (LeakState.LEAKING, LeakState.GROWING)
    }
    left = describe_orphans(snapshot.left_behind, snapshot.owned)
    if left is not None:
        text = f"{left[0].upper()}{left[1:]}."
        yield Verdict(
            subject="processes", level=Level.WARNING, sentence=text, situation=Situation.NEIGHBOUR
        )
    for role, state in grows.items():
        yield _judge_growth(values, snapshot, f"Host memory of {role}", ("", "", role), state)
    if found and not grows:
        level, text = _describe_quiet(
            found.values(), [watches[role] for role in found if role in watches]
        )
        host, first = (
            snapshot.host or HostMemory(),
            snapshot.engine_status and snapshot.engine_status.first_host_room_bytes,
        )
        known = host.room_bytes is not None and first is not None
        least = min(
            LOW_HOST_BYTES, LOW_HOST_SHARE * (host.limit_bytes or 0), LOW_SHARE * (first or 0)
        )
        low = known and (host.room_bytes or 0) < least
        used, limit = (
            values.value(catalog.HOST_MEMORY_USED),
            values.value(catalog.HOST_MEMORY_LIMIT),
        )
        use = f"the engine's processes hold {format_size(sum(values.of(catalog.HOST_MEMORY).values()))}"
        if used is not None and limit is not None:
            use = f"{format_size(used)} of {format_size(limit)} are in use{SCOPES.get(host.basis, '')}"
        shared = host.shm_used_bytes or 0
        use += f", {format_size(shared)} of it in /dev/shm" if shared > NEIGHBOUR_BYTES else ""
        use += f", and {format_size(host.swap_bytes)} are swapped out" if host.swap_bytes else ""
        use += _describe_offloads(snapshot, values)
        yield Verdict(
            subject="host memory",
            level=Level.WARNING if low else level,
            sentence=f"Host memory: {text}; {use}.",
            alert="HeadroomHostMemoryLow" if low else None,
            situation=Situation.LOW_MEMORY if low else Situation.HEALTHY,
        )


def _describe_offloads(snapshot: Snapshot, values: Values) -> str:
    """Return what offloads were planned to take, and what is known to be taken: they are shared memory.

    Beside another engine, which may use the same /dev/shm, the largest process alone counts.
    """
    planned = values.of(catalog.HOST_MEMORY_PLANNED)
    offloads = sum(
        planned.get((part,), 0.0) for part in (HostPart.KV_OFFLOAD, HostPart.WEIGHTS_OFFLOAD)
    )
    processes = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    host = HostMemory() if snapshot.host is None or snapshot.neighbours else snapshot.host
    taken = count_shared(processes, host.shm_used_bytes)
    if not offloads or taken < offloads:
        return (
            f"; offloads of {format_size(offloads)} may take up to {OFFLOAD_HIGH} times that"
            if offloads
            else ""
        )
    is_over = taken > OVERSHOT * offloads and taken > offloads + NEIGHBOUR_BYTES
    times = (
        f", {taken / offloads:.2f} times that (vllm-project/vllm#53042, #56410)" if is_over else ""
    )
    return f"; offloads of {format_size(offloads)} take {format_size(taken)}{times}"


def _end_sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
