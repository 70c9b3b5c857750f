"""The verdicts on each GPU, the engine and its host memory, in one sentence each."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.attribution import NEIGHBOUR_BYTES, describe_leftover, describe_orphans
from vllm_headroom.derive.configured import OFFLOAD_FACTOR
from vllm_headroom.derive.engine_log import describe_failure
from vllm_headroom.derive.host_memory import SCOPES, count_shared
from vllm_headroom.derive.leak.inside import PLACES
from vllm_headroom.derive.leak.leak import LeakMemory, is_alone
from vllm_headroom.derive.life.states import is_error_answer, is_starved
from vllm_headroom.derive.series import label_gpu, make_states
from vllm_headroom.model import (
    BudgetExcess,
    EngineStatus,
    Failure,
    Gpu,
    HangSign,
    HostMemory,
    Pool,
    Sample,
    Snapshot,
    Values,
    Verdict,
)
from vllm_headroom.model.start import LogFailure
from vllm_headroom.model.status import TIGHT_SHARE
from vllm_headroom.units import (
    DAY_SECONDS,
    GIB,
    HOUR_SECONDS,
    MIB,
    format_duration,
    format_size,
)
from vllm_headroom.vocabulary import (
    GROWING_STATES,
    EngineState,
    HostPart,
    LeakLocation,
    LeakState,
    Level,
    Reason,
    ServerAnswer,
    Situation,
)

# Below these limits, the sentences become warnings. Each limit is the same as in the alert that its
# description names.

LOW_BYTES: Final = 512 * MIB
"""A GPU's free memory is low only below this size. The free memory must also be below
LOW_FREE_SHARE of the initially free memory. The alert HeadroomGpuMemoryLow uses the same limits.
"""

LOW_FREE_SHARE: Final = 0.5
"""Free memory is low only if it is also below this share. The share is of the free memory when the
engine became ready. An engine that is configured to leave little free is therefore not reported.
"""

LOW_HOST_BYTES: Final = 4 * GIB
"""The host's free memory is low if it is below all of these limits:

- this size
- LOW_HOST_SHARE of the host's limit
- LOW_FREE_SHARE of the memory that was free initially

The alert HeadroomHostMemoryLow uses the same limits.
"""

LOW_HOST_SHARE: Final = 0.05
"""The host's free memory is low only if also below this share of its limit."""

OVER_BUDGET_SECONDS: Final = 300.0
"""An excess over the budget is reported only after it has lasted this long. Measuring the memory
that the engine holds between bursts takes this long.
"""

SCARCE_BLOCKS_BYTES: Final = GIB
"""Below this much free in 2 MiB blocks, unified memory may not be allocated. Some allocations
failed while 22.5 GiB were available (vllm-project/vllm#54200). Few free blocks of 2 MiB are normal,
because the page cache takes the free memory. Exceptions are a loading model and a task that waits
for memory.
"""

WAITING_RATIO: Final = 0.05
"""Tasks wait for memory above this share of the last ten seconds (PSI)."""

OVERSHOOT_FACTOR: Final = 1.15
"""Offloads are larger than planned above this many times their planned size. The factor leaves room
for vLLM's buffers and queues, which are also in shared memory.
"""

STRANDED_RATIO: Final = 0.05
"""A KV cache is stranded above this share in use without a request. HeadroomKvCacheStranded uses
the same share.
"""

CRASH_LOOP_EXITS: Final = 3
"""This many exits within 90 minutes are a crash loop, as in HeadroomEngineCrashLoop."""

SURE_SECONDS: Final = 4 * HOUR_SECONDS
"""If memory has been watched for less time, its verdict states for how long. A leak in large steps
triggers an alarm after four hours. A steady leak usually does so sooner.
"""

# These alerts are used in more than one place.

GPU_LOST: Final = "HeadroomGpuLost"
BLIND: Final = "HeadroomSidecarBlind"
STALLED: Final = "HeadroomEngineStalled"


class GrowthAlerts(Struct, frozen=True, kw_only=True):
    """The alerts for growing memory, depending on how soon it will be full."""

    hour: str
    """The alert for a leak that leaves less than an hour."""

    day: str
    """The alert for a leak with less than a day left. For a possible leak, less than an hour must
    be left.
    """

    later: str
    """The alert for any other growth."""


GPU_ALERTS: Final = GrowthAlerts(
    hour="HeadroomOutOfMemorySoon",
    day="HeadroomGpuMemoryLeak",
    later="HeadroomGpuMemoryGrowing",
)
HOST_ALERTS: Final = GrowthAlerts(
    hour="HeadroomHostOutOfMemorySoon",
    day="HeadroomHostMemoryRunsOut",
    later="HeadroomHostMemoryLeak",
)


class EngineSentence(Struct, frozen=True, kw_only=True):
    """The verdict on an engine in one state.

    The sentence follows "The engine".
    """

    situation: Situation
    level: Level
    sentence: str
    alert: str | None = None


ENGINE_SENTENCES: Final[Mapping[EngineState, EngineSentence]] = {
    EngineState.DOWN: EngineSentence(
        situation=Situation.DOWN,
        level=Level.ALARM,
        sentence="is down: its metrics page does not answer and no engine process is running",
        alert="HeadroomEngineDown",
    ),
    EngineState.STARTING: EngineSentence(
        situation=Situation.STARTING,
        level=Level.UNKNOWN,
        sentence="is starting: leak detection begins when it serves",
    ),
    EngineState.STALLED: EngineSentence(
        situation=Situation.STALLED,
        level=Level.ALARM,
        sentence="is stalled: it should make progress and makes none",
        alert=STALLED,
    ),
    EngineState.ASLEEP: EngineSentence(
        situation=Situation.ASLEEP,
        level=Level.GOOD,
        sentence="is asleep",
    ),
    EngineState.SERVING: EngineSentence(
        situation=Situation.HEALTHY,
        level=Level.GOOD,
        sentence="serves",
    ),
    EngineState.UNKNOWN: EngineSentence(
        situation=Situation.BLIND,
        level=Level.UNKNOWN,
        sentence="may be up or down: that is not known",
        alert=BLIND,
    ),
}

NEVER_SEEN: Final = EngineSentence(
    situation=Situation.DOWN,
    level=Level.UNKNOWN,
    sentence="has not been seen yet: its metrics page does not answer and no engine process is"
    " running",
)
"""Replaces the sentence for DOWN before the engine's first run. HeadroomEngineDown does not fire
before the first run either.
"""

UNREAD_SENTENCES: Final[Mapping[EngineState, EngineSentence]] = {
    EngineState.SERVING: EngineSentence(
        situation=Situation.BLIND,
        level=Level.UNKNOWN,
        sentence="served when last seen",
    ),
    EngineState.ASLEEP: EngineSentence(
        situation=Situation.BLIND,
        level=Level.UNKNOWN,
        sentence="was asleep when last seen",
    ),
}
"""The sentences for states kept from the last page while the page cannot be read."""

PAGE_ALONE_FAILS: Final = (
    "has a server that answers other requests, and only its metrics page fails: whether it makes"
    " progress is not known"
)
"""The text used if the metrics page fails but the server's other pages work."""

SERVER_RUNS: Final = (
    "has a server that runs, and reports an error: whether it makes progress is not known"
)
"""The text for a server that answers with an error instead of its page. While the server answers in
this way, nothing else is known about the engine.
"""

LOGIN_WANTED: Final = (
    "is behind a server that answers, but asks for a login: whether the engine makes progress is"
    " not known"
)
"""The text for a server that denies the page because of its login."""

SLOW_PAGE_CAUSE: Final = (
    "; a PROMETHEUS_MULTIPROC_DIR that is full or on a network volume does this: check it with df"
)
"""Added if the page is late but the server's health check succeeds. If the page fails with an
error, the error's message already states the cause.
"""

STALE_GAUGES: Final = (
    "; these gauges are stale, as after an abort of all requests: no CPU time, GPU or client"
    " supports them"
)
"""Added to the text about an engine's load if its gauges are stale. All other evidence must show
that.
"""

DOUBTED_GAUGES: Final = (
    "may be idle or hang: its page shows work without progress, nothing that is visible supports"
    " that there is any work, and its server answers: send one request, which updates stale gauges"
)
"""The text if too little is visible to conclude that the gauges are stale."""

SERVER_TROUBLES: Final = {
    ServerAnswer.UNHEALTHY: "; its health check reports an error",
    ServerAnswer.SILENT: "; its health check does not answer",
}
"""Evidence of a stall besides the page. The evidence is added to the sentence about a stalled
engine.
"""

NO_GROWTH_SENTENCES: Final[Mapping[str | None, tuple[Level, str]]] = {
    LeakState.STABLE: (Level.GOOD, "no leak seen"),
    LeakState.UNSETTLED: (Level.GOOD, "no leak seen under a load that changes"),
    LeakState.ASLEEP: (Level.GOOD, "the engine sleeps"),
    LeakState.WARMING_UP: (Level.UNKNOWN, "too early to tell whether it leaks"),
}
"""The level and the text for memory that is not growing, by leak state. If the memory has several
leak states, the first in this order is used.
"""

VERDICTS: Final = "verdicts"
"""The name under which a failure to judge the verdicts is logged."""

SERVING: Final = "serving"
"""The role of an engine for which the operator has declared none. This role has no series."""

SHARING_ROLES: Final = ("swapped", "shared-gpu")
"""The declared roles of engines whose GPUs are meant to be shared."""


def derive_verdicts(
    snapshot: Snapshot,
    values: Values,
    leak: LeakMemory,
    role: str = SERVING,
) -> tuple[tuple[Verdict, ...], tuple[Sample, ...]]:
    """Return a tick's verdicts, with samples for the worst situation and for the declared role.

    `leak` is the detector's state after the tick. Every role except SERVING has a sample.
    """
    verdicts = judge_snapshot(
        snapshot, values, measure_watches(leak), role=role, excused=list_excused(leak)
    )
    # The page shows the worst situation of the engine and all its GPUs.
    samples = make_states(catalog.SITUATION, (), verdicts[0].situation)
    if role != SERVING:
        samples += (Sample(catalog.ROLE, (role,), 1.0),)
    return verdicts, samples


def measure_watches(state: LeakMemory) -> dict[str, float]:
    """Return how long the detector has watched each series, in seconds, by UUID or role.

    A series that has no reading yet is omitted.
    """
    tracks = {**state.gpus, **state.host}.items()
    return {
        name: track.clock.now_seconds - track.history.anchor.seconds
        for name, track in tracks
        if track.history.anchor is not None
    }


def list_excused(state: LeakMemory) -> frozenset[str]:
    """Return the UUIDs and roles whose memory grows as before, without a leak."""
    tracks = {**state.gpus, **state.host}.items()
    return frozenset(name for name, track in tracks if track.is_excused)


def judge_snapshot(
    snapshot: Snapshot,
    values: Values,
    watches: Mapping[str, float] = MappingProxyType({}),
    role: str = SERVING,
    excused: Collection[str] = (),
) -> tuple[Verdict, ...]:
    """Return a tick's verdicts: alarms first, then warnings, then all others.

    Within each group, the worst situation comes first. There is at least one verdict. `values` has
    the samples of all derivations. `watches` contains how many seconds the detector has watched
    each memory. GPUs are named by UUID, host memory by role. `excused` contains the UUIDs and roles
    that grow as before, without a leak. If the declared `role` shares its GPUs, other processes
    there cause no warning.
    """
    gpu_verdicts = list(_judge_gpus(snapshot, values, watches, role, excused))
    verdicts = [
        *gpu_verdicts,
        *_judge_engine(snapshot, values, is_memory_low=_is_memory_low(gpu_verdicts)),
        *_judge_host(snapshot, values, watches, excused),
        *_judge_gates(values),
    ]
    return tuple(sorted(verdicts, key=_rank_verdict))


def _is_memory_low(gpu_verdicts: Iterable[Verdict]) -> bool:
    """Return whether a GPU's free memory is so low that load must be reduced."""
    return any(
        verdict.situation is Situation.LOW_MEMORY
        or (verdict.situation is Situation.OVER_BUDGET and verdict.level is Level.ALARM)
        for verdict in gpu_verdicts
    )


def _rank_verdict(verdict: Verdict) -> tuple[int, int, int]:
    """Return a sort key that puts the worst verdict first."""
    severity = tuple(Level).index(verdict.level)
    situation_rank = tuple(Situation).index(verdict.situation)
    # GOOD and UNKNOWN form one group. Within this group, verdicts are ordered by situation.
    if verdict.level in (Level.WARNING, Level.ALARM):
        return (-severity, situation_rank, -severity)
    return (0, situation_rank, -severity)


def _judge_gates(values: Values) -> Iterator[Verdict]:
    """Yield a verdict on each closed gate."""
    for (name,), is_open in values.find_all(catalog.GATE_OPEN).items():
        if not is_open:
            yield Verdict(
                subject="gates",
                level=Level.WARNING,
                sentence=f"The gate /gate/{name} is closed; its answer has the reason.",
                situation=Situation.GROWING,
            )


def _describe_no_growth(
    states: Collection[str | None], watched_seconds: float
) -> tuple[Level, str]:
    """Return the level and the text for memory without growth, given its leak states.

    The most informative state is used. `watched_seconds` is how long the memory has been watched.
    """
    state = next((state for state in NO_GROWTH_SENTENCES if state in states), None)
    # A leak in large steps may not be visible yet.
    if state == LeakState.STABLE and watched_seconds < SURE_SECONDS:
        return Level.GOOD, f"watched for {format_duration(watched_seconds)}, no leak seen"
    unknown = (Level.UNKNOWN, "whether it leaks is not known")
    return NO_GROWTH_SENTENCES.get(state, unknown)


def _judge_gpus(
    snapshot: Snapshot,
    values: Values,
    watches: Mapping[str, float],
    role: str,
    excused: Collection[str],
) -> Iterator[Verdict]:
    """Yield the verdicts on the engine's GPUs, including those that HEADROOM_GPUS omits."""
    if isinstance(snapshot.gpus, Failure):
        yield Verdict(
            subject="GPUs",
            level=Level.UNKNOWN,
            sentence=_end_sentence(f"The GPUs cannot be read: {snapshot.gpus.message}"),
            alert="HeadroomSourceDown",
            situation=Situation.BLIND,
        )
        return
    if not snapshot.owned_gpus:
        yield Verdict(
            subject="GPUs",
            level=Level.UNKNOWN,
            sentence="No GPU is known to be the engine's: no GPU memory is judged.",
            alert=BLIND,
            situation=Situation.BLIND,
        )
    for gpu in snapshot.devices:
        if gpu.is_left_out:
            yield _judge_left_out_gpu(gpu)
    for gpu in sorted(snapshot.owned_gpus, key=lambda gpu: gpu.reading.index):
        yield _judge_gpu(gpu, snapshot, values, watches=watches, role=role, excused=excused)
        # Memory left behind by an exited engine has a different remedy.
        for leftover in gpu.leftovers:
            yield Verdict(
                subject=gpu.reading.display_name,
                level=Level.WARNING,
                sentence=f"{gpu.reading.display_name}: {describe_leftover(leftover)}.",
                alert="HeadroomMemoryLeftBehind",
                situation=Situation.NEIGHBOUR,
            )


def _judge_left_out_gpu(gpu: Gpu) -> Verdict:
    """Return the warning that HEADROOM_GPUS omits a GPU that the engine uses."""
    name = gpu.reading.display_name
    engine_bytes = gpu.engine_bytes or 0
    return Verdict(
        subject=name,
        level=Level.WARNING,
        sentence=f"{name} is not judged: the engine's processes hold {format_size(engine_bytes)}"
        " of it, and HEADROOM_GPUS leaves it out.",
        situation=Situation.BLIND,
    )


def _judge_gpu(
    gpu: Gpu,
    snapshot: Snapshot,
    values: Values,
    *,
    watches: Mapping[str, float],
    role: str,
    excused: Collection[str],
) -> Verdict:
    """Return the verdict on one GPU of the engine.

    The verdict states the first of these that applies:

    - The GPU cannot be read.
    - Its memory is unknown.
    - Its memory is growing.
    - It has another problem.
    - It has no problem.
    """
    reading = gpu.reading
    name = reading.display_name
    if reading.failure is not None:
        return Verdict(
            subject=name,
            level=Level.ALARM,
            sentence=_end_sentence(f"{name} cannot be read: {reading.failure.message}"),
            alert=GPU_LOST,
            situation=Situation.BLIND,
        )
    if reading.memory is None:
        return Verdict(
            subject=name,
            level=Level.UNKNOWN,
            sentence=f"The memory of {name} is not known: the driver does not report it, or"
            " reports what cannot be.",
            alert=BLIND,
            situation=Situation.BLIND,
        )
    leak_state = values.state(catalog.LEAK_STATE, *label_gpu(gpu))
    if leak_state in GROWING_STATES:
        # Growth takes precedence over any other problem of the GPU, because it fills the GPU.
        growth = _measure_gpu_growth(
            gpu, snapshot, values, is_leaking=leak_state == LeakState.LEAKING
        )
        return _judge_growth(growth, is_excused=reading.uuid in excused)
    return _judge_quiet_gpu(
        gpu, leak_state, snapshot.engine_status, values, watches=watches, role=role
    )


def _judge_quiet_gpu(
    gpu: Gpu,
    leak_state: str | None,
    status: EngineStatus | None,
    values: Values,
    *,
    watches: Mapping[str, float],
    role: str,
) -> Verdict:
    """Return the verdict on a GPU whose memory is not growing."""
    labels = label_gpu(gpu)
    uuid = gpu.reading.uuid
    name = gpu.reading.display_name
    # Without the detector's state, as with a recorded page, only the leak state is used.
    watched_seconds = watches.get(uuid, SURE_SECONDS)
    level, no_growth = _describe_no_growth({leak_state}, watched_seconds)
    held_bytes = values.value(catalog.GPU_MEMORY_HELD, *labels, "engine")
    # During sleep, vLLM releases nearly all of its memory. Another engine cannot use the memory
    # that is kept.
    if leak_state == LeakState.ASLEEP and held_bytes is not None:
        no_growth = f"{no_growth} and holds {format_size(held_bytes)}"
    free_bytes = values.value(catalog.GPU_MEMORY_FREE, *labels)
    free_parts = []
    if free_bytes is not None:
        free_parts.append(f"{format_size(free_bytes)} are free")
    wake_bytes = 0
    if status is not None:
        wake_bytes = dict(status.wake_bytes).get(uuid, 0)

    trouble = _find_trouble(
        labels,
        status,
        values,
        # While the free memory is unknown, a shortage must not be reported.
        free_bytes=inf if free_bytes is None else free_bytes,
        wake_bytes=wake_bytes,
        role=role,
    )
    if trouble is None:
        parts = [no_growth]
        if wake_bytes:
            parts.append(f"to wake takes {format_size(wake_bytes)}")
        parts += free_parts
        return Verdict(subject=name, level=level, sentence=f"{name}: {'; '.join(parts)}.")
    parts = [trouble.text]
    if trouble.needs_free_bytes:
        parts += free_parts
    parts.append(no_growth)
    return Verdict(
        subject=name,
        level=trouble.level,
        sentence=f"{name}: {'; '.join(parts)}.",
        alert=trouble.alert,
        situation=trouble.situation,
    )


class Trouble(Struct, frozen=True, kw_only=True):
    """A problem on a GPU whose memory is not growing."""

    situation: Situation
    text: str
    alert: str | None = None
    """The alert that fires, or None if none does."""

    level: Level = Level.WARNING
    needs_free_bytes: bool = False
    """Whether the amount of free memory must be added to the text."""


def _find_trouble(
    labels: tuple[str, str],
    status: EngineStatus | None,
    values: Values,
    *,
    free_bytes: float,
    wake_bytes: int,
    role: str,
) -> Trouble | None:
    """Return the worst problem of a GPU, or None if it has none.

    `wake_bytes` is what a sleeping engine needs to wake up. The value is 0 if the engine is awake.
    """
    return (
        _find_excess(labels, status, values, free_bytes)
        or _find_low_memory(labels, status, free_bytes, wake_bytes)
        or _find_scarce_blocks(labels, status, values, free_bytes)
        or _find_neighbour(labels, values, role)
    )


def _find_low_memory(
    labels: tuple[str, str], status: EngineStatus | None, free_bytes: float, wake_bytes: int
) -> Trouble | None:
    """Return a Trouble if free memory is low.

    Also returns a Trouble if a sleeping engine could not wake up. Returns None if neither applies.
    The alert fires only if memory is low.
    """
    uuid = labels[1]
    first_free_bytes = 0
    if status is not None:
        first_free_bytes = dict(status.first_room_bytes).get(uuid, 0)
    # Memory is never reported as low before an engine has served. A starting engine takes its
    # granted memory.
    is_low = free_bytes < min(LOW_BYTES, LOW_FREE_SHARE * first_free_bytes)
    if not is_low and free_bytes >= wake_bytes:
        return None
    wake = f"to wake takes {format_size(wake_bytes)}, and " if wake_bytes else ""
    return Trouble(
        situation=Situation.LOW_MEMORY,
        text=f"{wake}only {format_size(free_bytes)} are free",
        alert="HeadroomGpuMemoryLow" if is_low else None,
    )


def _find_scarce_blocks(
    labels: tuple[str, str], status: EngineStatus | None, values: Values, free_bytes: float
) -> Trouble | None:
    """Return a Trouble if unified memory is free only in small blocks.

    Returns None while no task waits for memory and no model is being loaded.
    """
    # The driver allocates in blocks of 2 MiB. The driver cannot use smaller gaps in the page cache.
    blocks_bytes = values.value(catalog.UNIFIED_FREE_BLOCKS, *labels)
    if blocks_bytes is None or blocks_bytes >= min(SCARCE_BLOCKS_BYTES, free_bytes):
        return None
    pressure_ratio = values.value(catalog.MEMORY_PRESSURE) or 0.0
    is_waited_for = pressure_ratio > WAITING_RATIO
    is_loading = status is not None and status.state is EngineState.STARTING
    if not is_waited_for and not is_loading:
        return None
    return Trouble(
        situation=Situation.LOW_MEMORY,
        text="the card's memory is in the page cache: only"
        f" {format_size(blocks_bytes)} are free in blocks of 2 MiB",
        alert="HeadroomUnifiedMemoryCached" if is_waited_for else None,
    )


def _find_excess(
    labels: tuple[str, str], status: EngineStatus | None, values: Values, free_bytes: float
) -> Trouble | None:
    """Return a Trouble if an engine over its budget leaves too little free memory.

    An excess alone is not a problem. Contexts, NCCL and graphs are outside the budget. Returns None
    if the engine is not serving or is within its budget. Also returns None if enough memory is left
    for bursts of load.
    """
    if status is None or status.state is not EngineState.SERVING:
        return None
    excess = dict(status.excesses).get(labels[1])
    # A burst of prefills exceeds the budget only for a few seconds.
    if excess is None or excess.seconds < OVER_BUDGET_SECONDS:
        return None
    room_bytes = _find_room_at_rest(labels, values, excess, free_bytes)
    if room_bytes >= excess.tight_bytes:
        return None
    size = format_size(excess.excess_bytes)
    text = f"the engine holds {size} ({100 * excess.ratio:.1f} %) more than its budget"
    # The last burst still fits, so this is only a warning. If the last burst did not fit, the next
    # one might end the engine.
    if room_bytes >= excess.needed_bytes:
        is_share_small = room_bytes < TIGHT_SHARE * excess.total_bytes
        return Trouble(
            situation=Situation.OVER_BUDGET,
            text=text,
            alert="HeadroomMemoryDiscrepancy" if is_share_small else "HeadroomGpuMemoryTight",
            needs_free_bytes=True,
        )
    return Trouble(
        situation=Situation.OVER_BUDGET,
        text=f"{text}, and a burst takes {format_size(excess.needed_bytes)}",
        level=Level.ALARM,
        alert="HeadroomMemoryDiscrepancyHigh",
        needs_free_bytes=True,
    )


def _find_room_at_rest(
    labels: tuple[str, str], values: Values, excess: BudgetExcess, free_bytes: float
) -> float:
    """Return how much memory is free between bursts of load.

    Memory held by other processes counts as free, because they may exit.
    """
    other_bytes = values.value(catalog.GPU_MEMORY_HELD, *labels, "other") or 0.0
    # During a burst, the engine holds more than at rest. The memory that it will release counts as
    # free.
    rest_bytes = excess.budget_bytes + excess.excess_bytes
    held_bytes = values.value(catalog.GPU_MEMORY_HELD, *labels, "engine") or rest_bytes
    return free_bytes + other_bytes + max(0.0, held_bytes - rest_bytes)


def _find_neighbour(labels: tuple[str, str], values: Values, role: str) -> Trouble | None:
    """Return a Trouble if other processes hold memory on the GPU.

    If the declared role shares its GPUs, the Trouble is not a warning.

    Returns None if all other processes together hold less than NEIGHBOUR_BYTES.
    """
    other_bytes = values.value(catalog.GPU_MEMORY_HELD, *labels, "other") or 0.0
    if other_bytes < NEIGHBOUR_BYTES:
        return None
    text = f"other processes hold {format_size(other_bytes)} of it"
    if role in SHARING_ROLES:
        return Trouble(
            situation=Situation.HEALTHY, text=text, level=Level.GOOD, needs_free_bytes=True
        )
    return Trouble(
        situation=Situation.NEIGHBOUR,
        text=text,
        alert="HeadroomNeighbourGrowing",
        needs_free_bytes=True,
    )


class GrowingMemory(Struct, frozen=True, kw_only=True):
    """Growing memory on a GPU or in the processes of one role.

    A field is None if unknown.
    """

    subject: str
    name: str
    """The name of the memory, for use at the beginning of a sentence."""

    is_leaking: bool
    """Whether the growth raises an alarm rather than an early warning."""

    is_of_engine: bool
    """Whether the growth is known to be the engine's. If False, the growth may be in another
    process.
    """

    bytes_per_second: float | None
    bytes_per_request: float | None = None
    location: str | None = None
    oom_seconds: float | None
    earliest_oom_seconds: float | None
    pools: tuple[Pool, ...]
    """The pools in this memory that vLLM was configured to fill."""

    bound_bytes: float | None
    """The memory that these pools may still take, or None if there are none."""

    alerts: GrowthAlerts
    situation: Situation

    @property
    def pool_bytes(self) -> int:
        """Return the size of all these pools."""
        return sum(pool.size_bytes for pool in self.pools)


def _measure_gpu_growth(
    gpu: Gpu, snapshot: Snapshot, values: Values, *, is_leaking: bool
) -> GrowingMemory:
    """Return the growth on a GPU, as measured by the leak detector."""
    labels = label_gpu(gpu)
    # The probe measures only the engine's memory. Any growth that it shows is the engine's.
    location = values.state(catalog.LEAK_LOCATION, *labels)
    return GrowingMemory(
        subject=gpu.reading.display_name,
        name=gpu.reading.display_name,
        is_leaking=is_leaking,
        is_of_engine=is_alone(gpu) or location is not None,
        bytes_per_second=values.value(catalog.LEAK_RATE, *labels),
        bytes_per_request=values.value(catalog.LEAK_PER_REQUEST, *labels),
        location=location,
        oom_seconds=values.value(catalog.TIME_TO_OOM, *labels),
        earliest_oom_seconds=values.value(catalog.TIME_TO_OOM_LOWER, *labels),
        pools=tuple(pool for pool in snapshot.pools if pool.role is None),
        bound_bytes=values.value(catalog.LEAK_BOUND, *labels, ""),
        alerts=GPU_ALERTS,
        situation=Situation.LEAKING if is_leaking else Situation.GROWING,
    )


def _measure_host_growth(
    role: str, snapshot: Snapshot, values: Values, *, is_leaking: bool
) -> GrowingMemory:
    """Return the growth of the host memory held by the engine's processes of one role."""
    return GrowingMemory(
        subject="host memory",
        name=f"Host memory of {role}",
        is_leaking=is_leaking,
        is_of_engine=True,  # The processes of every role are the engine's own.
        bytes_per_second=values.value(catalog.HOST_LEAK_RATE, role),
        oom_seconds=values.value(catalog.HOST_TIME_TO_OOM),
        earliest_oom_seconds=values.value(catalog.HOST_TIME_TO_OOM_LOWER),
        pools=tuple(pool for pool in snapshot.pools if pool.role == role),
        bound_bytes=values.value(catalog.LEAK_BOUND, "", "", role),
        alerts=HOST_ALERTS,
        situation=Situation.HOST_LEAK,
    )


def _judge_growth(growth: GrowingMemory, *, is_excused: bool) -> Verdict:
    """Return the verdict on growing memory: a leak, a possible leak, or a filling pool.

    `is_excused` is True if the memory once grew to the same level without leaking.
    """
    # A pool with room left explains an early warning. An alarm is always reported.
    if growth.bound_bytes and not growth.is_leaking:
        return _judge_filling_pools(growth, growth.bound_bytes)
    if is_excused and not growth.is_leaking:
        text = _describe_usual_growth(growth)
    elif growth.is_of_engine:
        text = _describe_engine_growth(growth)
    else:
        text = _describe_foreign_growth(growth)
    text += _describe_time_to_oom(growth)
    text += _describe_full_pools(growth)
    return Verdict(
        subject=growth.subject,
        level=_choose_level(growth),
        sentence=f"{growth.name} {text}.",
        alert=_choose_alert(growth),
        situation=growth.situation,
    )


def _judge_filling_pools(growth: GrowingMemory, bound_bytes: float) -> Verdict:
    """Return the verdict on growth that is explained by configured pools with room left."""
    filled = format_size(growth.pool_bytes - bound_bytes)
    return Verdict(
        subject=growth.subject,
        level=Level.GOOD,
        sentence=f"{growth.name} grows as its configured pools do: filling, {filled} of"
        f" {format_size(growth.pool_bytes)}.",
        situation=Situation.FILLING,
    )


def _describe_engine_growth(growth: GrowingMemory) -> str:
    """Return a statement on the engine's certain or possible leak: rate and location."""
    words = ["leaks" if growth.is_leaking else "may leak"]
    rate = _describe_rate(growth)
    # The rate per request is preferred, because it does not depend on the load.
    if growth.bytes_per_request is not None:
        rate = f"{format_size(1000 * growth.bytes_per_request)} per 1,000 requests"
    if rate:
        words.append(rate)
    text = " ".join(words)
    if growth.location is not None:
        text += f", in {PLACES[LeakLocation(growth.location)]}"
    return text


def _describe_usual_growth(growth: GrowingMemory) -> str:
    """Return a statement on growth as before, without a leak, with its rate."""
    rate = _describe_rate(growth)
    text = f"grows by {rate}" if rate else "grows"
    return f"{text}, up to now no further than it has grown before without a leak"


def _describe_foreign_growth(growth: GrowingMemory) -> str:
    """Return a statement that memory is filling up, possibly because of another process."""
    verb = "fills" if growth.is_leaking else "may fill"
    rate = _describe_rate(growth)
    if rate:
        verb = f"{verb} by {rate}"
    return f"{verb} (by whom is not known; every process on it is affected)"


def _describe_rate(growth: GrowingMemory) -> str:
    """Return the growth per hour, such as "3 GiB an hour".

    Returns "" if the growth is unknown.
    """
    if growth.bytes_per_second is None:
        return ""
    return f"{format_size(HOUR_SECONDS * growth.bytes_per_second)} an hour"


def _describe_time_to_oom(growth: GrowingMemory) -> str:
    """Return the time until out-of-memory as the end of a sentence.

    Returns "" if the time is unknown.
    """
    if growth.oom_seconds is None:
        return ""
    if growth.oom_seconds < 1:
        return ": out of memory at any moment"
    likely = format_duration(growth.oom_seconds)
    if growth.earliest_oom_seconds is None:
        return f": out of memory in about {likely}"
    earliest = format_duration(growth.earliest_oom_seconds)
    return f": out of memory in {earliest} at the earliest, likely in about {likely}"


def _describe_full_pools(growth: GrowingMemory) -> str:
    """Return a note that full offload pools may exceed their size.

    Returns "" if no pool is full.
    """
    # Only offload pools have been observed to exceed their configured size (OFFLOAD_FACTOR).
    has_offloads = any(pool.part is not HostPart.MULTIMODAL_CACHE for pool in growth.pools)
    if growth.bound_bytes != 0 or not has_offloads:
        return ""
    size = format_size(growth.pool_bytes)
    return f"; its pools of {size} are full: offloads can take {OFFLOAD_FACTOR} times that"


def _choose_level(growth: GrowingMemory) -> Level:
    if growth.is_leaking or _is_oom_within(growth, HOUR_SECONDS):
        return Level.ALARM
    return Level.WARNING


def _choose_alert(growth: GrowingMemory) -> str:
    """Return the alert that fires for this growth, depending on the time until memory is full."""
    if growth.is_leaking and _is_oom_within(growth, HOUR_SECONDS):
        return growth.alerts.hour
    # An early warning may be withdrawn. An early warning is urgent only if memory may be full in
    # less than an hour.
    near_seconds = DAY_SECONDS if growth.is_leaking else HOUR_SECONDS
    if _is_oom_within(growth, near_seconds):
        return growth.alerts.day
    return growth.alerts.later


def _is_oom_within(growth: GrowingMemory, seconds: float) -> bool:
    return growth.oom_seconds is not None and growth.oom_seconds < seconds


def _judge_engine(snapshot: Snapshot, values: Values, *, is_memory_low: bool) -> Iterator[Verdict]:
    """Yield the verdicts on the engine's state, a crash loop and stranded KV cache."""
    yield _judge_engine_state(snapshot, values, is_memory_low=is_memory_low)
    status = snapshot.engine_status
    # A crash loop is reported even while the engine is serving. A looping engine serves between two
    # exits.
    if status is not None and status.recent_exits >= CRASH_LOOP_EXITS:
        yield Verdict(
            subject="engine",
            level=Level.ALARM,
            sentence=_end_sentence(_describe_crash_loop(status)),
            alert="HeadroomEngineCrashLoop",
            situation=Situation.CRASH_LOOP,
        )
    # The highest share is used. A data-parallel rank cannot use another rank's cache.
    stranded_ratio = max(values.find_all(catalog.ENGINE_KV_STRANDED).values(), default=0.0)
    if stranded_ratio > STRANDED_RATIO:
        yield Verdict(
            subject="engine",
            level=Level.WARNING,
            sentence=f"{100 * stranded_ratio:.0f} % of the KV cache is held by no request.",
            alert="HeadroomKvCacheStranded",
            situation=Situation.STRANDED,
        )


def _describe_crash_loop(status: EngineStatus) -> str:
    text = f"The engine ended {status.recent_exits} times in the last 90 minutes"
    if status.log is None or status.log.failure is None:
        return text
    return f"{text}{_describe_last_exit(status.log.failure)}"


def _judge_engine_state(snapshot: Snapshot, values: Values, *, is_memory_low: bool) -> Verdict:
    """Return the verdict on the engine's state, with its load or page failure."""
    status = snapshot.engine_status
    state = EngineState.UNKNOWN if status is None else status.state
    row = _choose_engine_sentence(snapshot, state)
    detail = _describe_engine(snapshot, values, state, is_memory_low=is_memory_low)
    if status is not None and status.log is not None and status.log.failure is not None:
        detail = f"{_describe_last_exit(status.log.failure)}{detail}"
    return Verdict(
        subject="engine",
        level=row.level,
        sentence=_end_sentence(f"The engine {row.sentence}{detail}"),
        alert=row.alert,
        situation=row.situation,
    )


def _choose_engine_sentence(snapshot: Snapshot, state: EngineState) -> EngineSentence:
    """Return the sentence for a state of the engine, limited to what this sample supports."""
    status = snapshot.engine_status
    row = ENGINE_SENTENCES[state]
    if status is not None and state is EngineState.DOWN and not status.was_seen:
        row = NEVER_SEEN
    if isinstance(snapshot.engines, Failure):
        # While the page cannot be read, the last page's SERVING or ASLEEP is kept.
        if state in UNREAD_SENTENCES:
            row = replace(UNREAD_SENTENCES[state], alert=row.alert)
        if state is EngineState.UNKNOWN:
            row = replace(row, sentence=_describe_unknown(snapshot, snapshot.engines))
        return row
    if status is None:
        return row
    if status.hang_signs:
        sentence = "is stalled" if state is EngineState.STALLED else "may be stalled"
        return replace(row, sentence=sentence, alert=STALLED)
    if status.are_gauges_doubted and state is not EngineState.SERVING:
        return replace(row, sentence=DOUBTED_GAUGES, alert=STALLED)
    return row


def _describe_engine(
    snapshot: Snapshot, values: Values, state: EngineState, *, is_memory_low: bool
) -> str:
    """Return what follows the sentence on the state.

    The text is the load, signs of a hang, or the page's failure. The text is empty if there is
    nothing to add.
    """
    status = snapshot.engine_status
    if isinstance(snapshot.engines, Failure):
        return f"{_describe_server(snapshot, state)}; {snapshot.engines.message}"
    if status is not None and status.hang_signs:
        # The page shows no work, so adding its load would contradict the sentence.
        return _describe_hang(status.hang_signs)
    are_gauges_doubted = status is not None and status.are_gauges_doubted
    if state is EngineState.SERVING:
        load = _describe_load(values, is_memory_low=is_memory_low)
        return load + (STALE_GAUGES if are_gauges_doubted else "")
    if are_gauges_doubted:
        return ""
    server = _describe_server(snapshot, state)
    if state is EngineState.STALLED:
        return f"{_describe_stuck_requests(values)}{server}"
    return server


def _describe_last_exit(failure: LogFailure) -> str:
    """Return what the engine's log reports about the last exit, as part of a sentence."""
    return f"; its log has the cause of the last exit: {describe_failure(failure)}"


def _describe_unknown(snapshot: Snapshot, failure: Failure) -> str:
    """Return what is known about an engine without a page or a known state."""
    if snapshot.server is not None and snapshot.server.answer is ServerAnswer.HEALTHY:
        return PAGE_ALONE_FAILS
    if failure.reason is Reason.UNAUTHORIZED:
        return LOGIN_WANTED
    if is_error_answer(failure):
        return SERVER_RUNS
    return ENGINE_SENTENCES[EngineState.UNKNOWN].sentence


def _describe_server(snapshot: Snapshot, state: EngineState) -> str:
    """Return what is known about the server besides its page, as part of a sentence."""
    server = snapshot.server
    if state is EngineState.STALLED:
        return "" if server is None else SERVER_TROUBLES.get(server.answer, "")
    text = ""
    # A server that is short of CPU responds late, just like a hung server.
    if state is EngineState.UNKNOWN and is_starved(snapshot.processes):
        text = "; the machine is short of CPU"
    is_late = isinstance(snapshot.engines, Failure) and snapshot.engines.reason is Reason.TIMEOUT
    if is_late and server is not None and server.answer is ServerAnswer.HEALTHY:
        text += SLOW_PAGE_CAUSE
    return text


def _describe_hang(hang_signs: Iterable[HangSign]) -> str:
    signs = ", and ".join(sign.value for sign in hang_signs)
    return f": its page shows no work, and {signs}"


def _describe_stuck_requests(values: Values) -> str:
    """Return the requests of a stalled engine as a clause, or "" if unknown."""
    running = values.find_all(catalog.ENGINE_RUNNING).values()
    waiting = values.find_all(catalog.ENGINE_WAITING).values()
    if not running or not waiting:
        return ""
    return f", with {sum(running):.0f} requests running and {sum(waiting):.0f} waiting"


def _describe_load(values: Values, *, is_memory_low: bool) -> str:
    """Return the current load as a clause, or "" if unknown.

    An example is ": 3 running".
    """
    running = values.find_all(catalog.ENGINE_RUNNING).values()
    waiting = values.find_all(catalog.ENGINE_WAITING).values()
    used_ratios = values.find_all(catalog.ENGINE_KV_USED).values()
    additional = values.find_all(catalog.ENGINE_ADDITIONAL_REQUESTS).values()
    words = []
    if running:
        words.append(f"{sum(running):.0f} running")
    if waiting:
        words.append(f"{sum(waiting):.0f} waiting")
    if used_ratios:
        words.append(f"KV cache {100 * max(used_ratios):.0f} % used")
    # If requests are waiting or memory is low, no more requests should be sent. Room in the KV
    # cache does not change this advice.
    if additional and not any(waiting) and not is_memory_low:
        words.append(f"room in it for {sum(additional):.0f} more")
    return f": {', '.join(words)}" if words else ""


def _judge_host(
    snapshot: Snapshot,
    values: Values,
    watches: Mapping[str, float],
    excused: Collection[str],
) -> Iterator[Verdict]:
    """Yield the verdicts on processes that an exited engine left behind, and on host memory.

    There is one verdict on host memory for each role whose memory is growing. If no role's memory
    is growing, there is a single verdict on all roles. If no role has a leak state, there is no
    verdict on host memory.
    """
    orphans = describe_orphans(snapshot.left_behind, snapshot.owned_gpus)
    if orphans is not None:
        yield Verdict(
            subject="processes",
            level=Level.WARNING,
            sentence=f"{orphans[0].upper()}{orphans[1:]}.",
            situation=Situation.NEIGHBOUR,
        )
    # Each role has one series per leak state. The series of the current state is 1, the others are
    # 0.
    leak_states = {}
    for (role, leak_state), is_current in values.find_all(catalog.HOST_LEAK_STATE).items():
        if is_current:
            leak_states[role] = leak_state
    growing_roles = [role for role, state in leak_states.items() if state in GROWING_STATES]
    for role in growing_roles:
        is_leaking = leak_states[role] == LeakState.LEAKING
        growth = _measure_host_growth(role, snapshot, values, is_leaking=is_leaking)
        yield _judge_growth(growth, is_excused=role in excused)
    if leak_states and not growing_roles:
        yield _judge_quiet_host(snapshot, values, leak_states, watches)


def _judge_quiet_host(
    snapshot: Snapshot,
    values: Values,
    leak_states: Mapping[str, str],
    watches: Mapping[str, float],
) -> Verdict:
    """Return the verdict on host memory that is not growing, given each role's leak state."""
    # The sentence covers all roles. The role that was watched for the shortest time counts.
    watched_seconds = min(watches.get(role, SURE_SECONDS) for role in leak_states)
    level, no_growth = _describe_no_growth(leak_states.values(), watched_seconds)
    use = _describe_host_use(snapshot, values) + _describe_offloads(snapshot, values)
    sentence = f"Host memory: {no_growth}; {use}."
    if _is_host_memory_low(snapshot):
        return Verdict(
            subject="host memory",
            level=Level.WARNING,
            sentence=sentence,
            alert="HeadroomHostMemoryLow",
            situation=Situation.LOW_MEMORY,
        )
    return Verdict(subject="host memory", level=level, sentence=sentence)


def _is_host_memory_low(snapshot: Snapshot) -> bool:
    """Return whether the host's free memory is low, or False if that is unknown."""
    host = snapshot.host
    first_room_bytes = (
        None if snapshot.engine_status is None else snapshot.engine_status.first_host_room_bytes
    )
    if host is None or host.room_bytes is None or first_room_bytes is None:
        return False
    # The lowest of three limits is used. On a small machine, free memory would always be below a
    # single fixed size.
    low_bytes = min(
        LOW_HOST_BYTES,
        LOW_HOST_SHARE * (host.limit_bytes or 0),
        LOW_FREE_SHARE * first_room_bytes,
    )
    return host.room_bytes < low_bytes


def _describe_host_use(snapshot: Snapshot, values: Values) -> str:
    """Return a text on the host memory in use, its limit, /dev/shm and swap.

    If the use or the limit is unknown, the text states what the processes hold.
    """
    host = snapshot.host or HostMemory()
    used_bytes = values.value(catalog.HOST_MEMORY_USED)
    limit_bytes = values.value(catalog.HOST_MEMORY_LIMIT)
    if used_bytes is None or limit_bytes is None:
        held_bytes = sum(values.find_all(catalog.HOST_MEMORY).values())
        text = f"the engine's processes hold {format_size(held_bytes)}"
    else:
        scope = SCOPES.get(host.basis, "")
        text = f"{format_size(used_bytes)} of {format_size(limit_bytes)} are in use{scope}"
    shm_bytes = host.shm_used_bytes or 0
    if shm_bytes > NEIGHBOUR_BYTES:
        text += f", {format_size(shm_bytes)} of it in /dev/shm"
    if host.swap_bytes:
        text += f", and {format_size(host.swap_bytes)} are swapped out"
    return text


def _describe_offloads(snapshot: Snapshot, values: Values) -> str:
    """Return a text with the planned and actual size of offloads, or "" without offloads.

    Offloads are in shared memory, so their actual size is that of the shared memory. If the actual
    size is below the planned one, offloads may still grow. In that case, the text states how large
    the offloads may become.
    """
    planned_bytes = values.find_all(catalog.HOST_MEMORY_PLANNED)
    offload_bytes = 0.0
    for part in (HostPart.KV_OFFLOAD, HostPart.WEIGHTS_OFFLOAD):
        offload_bytes += planned_bytes.get((part,), 0.0)
    if not offload_bytes:
        return ""
    shm_bytes = None
    # With another engine on this machine, the size of /dev/shm is not used. The size of /dev/shm
    # may include the other engine's files.
    if snapshot.host is not None and not snapshot.neighbours:
        shm_bytes = snapshot.host.shm_used_bytes
    shared_bytes = count_shared(snapshot.engine_processes, shm_bytes)
    planned = f"; offloads of {format_size(offload_bytes)}"
    if shared_bytes < offload_bytes:
        return f"{planned} may take up to {OFFLOAD_FACTOR} times that"
    text = f"{planned} take {format_size(shared_bytes)}"
    # A small offload may exceed its planned size by a large factor without harm. The excess must
    # therefore also be large in bytes.
    is_far_over = shared_bytes > OVERSHOOT_FACTOR * offload_bytes
    if is_far_over and shared_bytes > offload_bytes + NEIGHBOUR_BYTES:
        factor = shared_bytes / offload_bytes
        text += f", {factor:.2f} times that (vllm-project/vllm#53042, #56410)"
    return text


def _end_sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
