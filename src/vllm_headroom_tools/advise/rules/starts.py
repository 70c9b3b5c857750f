"""Rules for starts, crashes, host memory and other processes on the GPU."""

from collections.abc import Sequence
from math import floor, inf
from statistics import median
from typing import Final

from vllm_headroom.derive.attribution import NEIGHBOUR_BYTES, describe_leftover
from vllm_headroom.derive.life.causes import find_full_gpu, judge_ending
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.model import Ending
from vllm_headroom.units import format_instant, format_size
from vllm_headroom.vocabulary import EndCause, Sureness
from vllm_headroom_tools.advise.facts import AIM_BYTES, Extent, Facts, FactsSource, GpuFacts
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    Figure,
    drop_none,
    list_evidence,
    lower_option,
)
from vllm_headroom_tools.advise.rules.capacity import (
    change_share,
    has_run_short,
    split_model,
    take_less,
)
from vllm_headroom_tools.advise.settings import Flag
from vllm_headroom_tools.sizing.estimate import SHM_QUEUE_BYTES
from vllm_headroom_tools.sizing.question import SAFE_UTILIZATION

NO_COST: Final = "none to this engine"

# Starts that exit before the engine begins to serve.

FAILED_STARTS: Final = 2
"""Our choice: advice requires at least this many exits or failed starts. The operator may have
stopped the engine once.
"""

MODEL_LOADED_RATIO: Final = 0.5
"""Our choice: an engine with this share of the GPU has loaded its model."""


def find_failing_starts(facts: Facts) -> Advice | None:
    """Judge starts that exited before the engine served.

    The rule applies if there were at least FAILED_STARTS failed starts. Two figures at each exit
    decide on the cause: the room on the engine's GPUs, and the memory that the engine and other
    processes hold on these GPUs. The advice is for the first of the following causes that fits:

    - other processes on the GPU
    - a full /dev/shm
    - a full GPU
    - a model that leaves no room for the KV cache
    - a cause other than memory

    Returns None if there were fewer failed starts, or if the cause is unknown. The cause is unknown
    if no start shows the room on a GPU. In addition, fewer than FAILED_STARTS starts must have
    loaded the model.
    """
    starts = facts.failed_starts
    if len(starts) < FAILED_STARTS:
        return None
    # Use the median. Other processes may have held memory by chance during a single start.
    if median(_find_others_bytes(start) for start in starts) > NEIGHBOUR_BYTES:
        return _advise_on_used_gpu(facts, starts)
    # A full /dev/shm makes a start fail even if the GPU has room. Check it first.
    shared_memory = _advise_on_shared_memory(facts, starts)
    if shared_memory is not None:
        return shared_memory
    loaded_starts = _list_loaded_starts(facts, starts)
    has_loaded = len(loaded_starts) >= FAILED_STARTS
    rooms_bytes = _list_rooms_bytes(starts)
    if rooms_bytes and min(rooms_bytes) < LOW_BYTES:
        return _advise_on_full_gpu(facts, starts)
    if has_loaded:
        return _advise_on_too_large_model(facts, loaded_starts)
    if rooms_bytes:
        return _advise_on_early_exit(starts)
    return None


def _advise_on_used_gpu(facts: Facts, starts: Sequence[Ending]) -> Advice:
    """Return the advice to move other processes off a GPU (runbooks' README, branch A)."""
    return Advice(
        cause=Cause.START_UP,
        summary="The engine exits while it starts, on a GPU that others already use.",
        evidence=_list_start_evidence(starts),
        changes=_avoid_others(facts),
        remark=LOOK_FOR_MEMORY,
    )


def _advise_on_full_gpu(facts: Facts, starts: Sequence[Ending]) -> Advice:
    """Return the advice for a full GPU (runbooks' README, branch A)."""
    return Advice(
        cause=Cause.START_UP,
        summary="The engine runs out of GPU memory while it starts.",
        evidence=_list_start_evidence(starts),
        changes=_shrink_engine(facts),
        remark=LOOK_FOR_MEMORY,
    )


def _advise_on_too_large_model(facts: Facts, loaded_starts: Sequence[Ending]) -> Advice:
    """Return the advice for a model that left no room for the KV cache.

    vLLM logs "No available memory for the cache blocks" in this case. vLLM may also log that the
    cache is too small for the longest request.
    """
    return Advice(
        cause=Cause.MODEL_DOES_NOT_FIT,
        summary="The engine loads its model and exits before it serves, with GPU memory left.",
        evidence=_list_start_evidence(loaded_starts),
        changes=drop_none(_raise_share(facts, loaded_starts), split_model(facts)),
        remark=(
            "vllm-headroom plan computes what fits; a lower --max-model-len is enough where vLLM's"
            " log says so."
        ),
    )


def _advise_on_early_exit(starts: Sequence[Ending]) -> Advice:
    """Return the advice to read the logs of early exits.

    Memory is not the cause of such exits.
    """
    return Advice(
        cause=Cause.START_UP,
        summary="The engine exits early in its start, with GPU memory left.",
        evidence=_list_start_evidence(starts),
        changes=(
            Change(
                text=(
                    "Read vLLM's log for NCCL, CUDA and the driver, and the kernel's log for an Xid"
                    " (dmesg -T | grep -i xid)"
                ),
                cost=NO_COST,
            ),
        ),
        remark="No option that sizes memory affects it.",
    )


LOOK_FOR_MEMORY: Final = 'vLLM\'s log shows the step: look for "memory" in it.'


def _advise_on_shared_memory(facts: Facts, starts: Sequence[Ending]) -> Advice | None:
    """Return the advice to increase the size of /dev/shm.

    Returns None if vLLM's largest inter-process queue fits. Also returns None if the size of
    /dev/shm is unknown.
    """
    host = facts.host
    if host is None or host.shm_limit_bytes is None or host.shm_used_bytes is None:
        return None
    room_bytes = host.shm_limit_bytes - host.shm_used_bytes
    if room_bytes >= SHM_QUEUE_BYTES:
        return None
    limit = format_size(host.shm_limit_bytes)
    room_evidence = list_evidence(
        ("shm_room_bytes", float(max(0, room_bytes)), f"{{}} of the {limit} of /dev/shm were left")
    )
    return Advice(
        cause=Cause.START_UP,
        summary="The engine exits while it starts, with /dev/shm full.",
        evidence=(*_list_start_evidence(starts), *room_evidence),
        changes=(
            Change(
                text="Remove what a killed run left in /dev/shm (vllm_*, psm_*, nccl-*)",
                cost=NO_COST,
            ),
            Change(
                text="Make /dev/shm larger (--shm-size, or an emptyDir with medium: Memory)",
                cost="a restart",
            ),
        ),
    )


def _find_others_bytes(start: Ending) -> float:
    """Return the most bytes that other processes held on a GPU.

    The values are the last of a failed start. Returns 0 if all are unknown.
    """
    return max((gpu.last_other_bytes or 0 for gpu in start.gpus), default=0)


def _find_held_bytes(start: Ending) -> float:
    """Return the most bytes that the engine held on a GPU.

    The values are the last of a failed start. Returns 0 if all are unknown.
    """
    return max((gpu.last_engine_bytes or 0 for gpu in start.gpus), default=0)


def _list_rooms_bytes(starts: Sequence[Ending]) -> list[int]:
    """Return the room on the fullest GPU at each failed start, where known."""
    # Only GPUs with known room can be the fullest, so this room is known.
    gpus = [start.fullest_gpu for start in starts]
    return [gpu.last_room_bytes or 0 for gpu in gpus if gpu is not None]


def _list_loaded_starts(facts: Facts, starts: Sequence[Ending]) -> list[Ending]:
    """Return the starts that had loaded the model.

    The list is empty if no GPU's size is known.
    """
    usable_bytes = min((gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes), default=inf)
    return [
        start for start in starts if _find_held_bytes(start) >= MODEL_LOADED_RATIO * usable_bytes
    ]


def _list_start_evidence(starts: Sequence[Ending]) -> tuple[Figure, ...]:
    """Return the number of failed starts, and the figures on memory when they ended."""
    most_held_bytes = max(_find_held_bytes(start) for start in starts)
    most_others_bytes = max(_find_others_bytes(start) for start in starts)
    least_room_bytes = min(_list_rooms_bytes(starts), default=None)
    return list_evidence(
        ("failed_starts", len(starts), "{} starts exited before they served"),
        ("most_held_bytes", most_held_bytes, "it held at most {} of a GPU"),
        ("least_room_bytes", least_room_bytes, "at least {} were left"),
        ("most_others_bytes", most_others_bytes or None, "others held {}"),
    )


def _avoid_others(facts: Facts) -> tuple[Change, ...]:
    """Return two changes: move other processes off the GPU, and lower vLLM's share.

    The new share is the share of memory that was free before the starts. The new share is omitted
    in these cases:

    - The free memory is unknown.
    - The KV cache's size is set in bytes.
    - The new share would not be lower than the current share.
    """
    move = Change(
        text=(
            "Find them with nvidia-smi on the node, and have their owner move or stop them; end a"
            " left-over process of this engine with kill"
        ),
        cost=NO_COST,
    )
    free_bytes = _find_free_bytes(facts.failed_starts)
    if free_bytes is None or facts.usable_bytes is None or facts.settings.sizes_cache_in_bytes:
        return (move,)
    # The same share takes the most bytes on the largest GPU. Therefore, compute the share for the
    # largest GPU, and round the share down to a hundredth.
    share = floor((free_bytes - AIM_BYTES) / facts.usable_bytes * 100) / 100
    # An unknown share is probably vLLM's default, which is not above `share`.
    if facts.settings.gpu_memory_utilization is None and share >= SAFE_UTILIZATION:
        return (move,)
    lower_share = lower_option(
        facts,
        Flag.GPU_MEMORY_UTILIZATION,
        share,
        f"{format_size(free_bytes)} were free before the start, and vLLM refuses to start with less"
        " than its share",
        "a smaller KV cache, or none at all if the model does not fit; a restart",
    )
    return drop_none(move, lower_share)


def _find_free_bytes(starts: Sequence[Ending]) -> int | None:
    """Return the fewest bytes free on a GPU before a start.

    Returns None if unknown. The bytes held in the engine's first sample count as free before the
    start.
    """
    least_free_bytes = None
    for start in starts:
        for gpu in start.gpus:
            if gpu.first_room_bytes is None:
                continue
            free_bytes = gpu.first_room_bytes + (gpu.first_held_bytes or 0)
            if least_free_bytes is None or free_bytes < least_free_bytes:
                least_free_bytes = free_bytes
    return least_free_bytes


def _shrink_engine(facts: Facts) -> tuple[Change, ...]:
    """Return the changes that make an engine use less memory during startup."""
    rooms_bytes = _list_rooms_bytes(facts.failed_starts)
    smaller_share = None
    if rooms_bytes and facts.gpus:
        # Our choice: compute the value for the first GPU. The option is the same for all GPUs.
        smaller_share = take_less(facts, facts.gpus[0], AIM_BYTES - min(rooms_bytes))
    fewer_requests = lower_option(
        facts,
        Flag.MAX_NUM_SEQS,
        (facts.settings.max_num_seqs or 0) // 2,
        "warming up the sampler and the graphs take less",
        "in a burst requests wait in the queue; a restart",
    )
    no_graphs = Change(
        flag=Flag.ENFORCE_EAGER,
        text="captures no CUDA graphs, if it exits while it captures them",
        cost="every token comes slower; a restart",
    )
    more_gpus = split_model(facts, "if it exits while it loads the weights, which then do not fit")
    return drop_none(smaller_share, fewer_requests, no_graphs, more_gpus)


def _raise_share(facts: Facts, starts: Sequence[Ending]) -> Change | None:
    """Return a larger share for vLLM, if all these starts left enough room.

    Returns None in three cases:

    - The share or the room is unknown.
    - Memory ran short later.
    - The room at any start was AIM_BYTES or less.
    """
    settings = facts.settings
    if settings.sizes_cache_in_bytes or settings.gpu_memory_utilization is None:
        return None
    rooms_bytes = _list_rooms_bytes(starts)
    if not rooms_bytes or has_run_short(facts):
        return None
    room_bytes = min(rooms_bytes)
    if room_bytes <= AIM_BYTES:
        return None
    return change_share(
        facts,
        facts.usable_bytes or 0.0,
        room_bytes - AIM_BYTES,
        f"{format_size(room_bytes)} were left when it exited",
        "less room for bursts; a restart",
    )


# Crashes of an engine that served.


def find_crash(facts: Facts) -> Advice | None:
    """Judge exits of a serving engine that GPU memory does not explain.

    Exits from `find_crashes` are only used if the room on the GPUs is known. The rule applies to at
    least FAILED_STARTS of these exits. A single exit is enough if engine processes kept running
    after the exit. The rule proposes reading the logs, which show whether an allocation failed. If
    no allocation failed, changing the options for memory sizes does not help. Returns None if the
    rule does not apply.
    """
    crashes = [end for end in find_crashes(facts) if end.fullest_gpu is not None]
    orphan_bytes = max((end.orphan_bytes for end in crashes), default=0)
    # A single exit may have been planned, but not if engine processes outlived it.
    if len(crashes) < FAILED_STARTS and not orphan_bytes:
        return None
    newest = crashes[-1]
    when = format_instant(newest.seconds)
    times = "once," if len(crashes) == 1 else f"{len(crashes)} times, the last"
    room_bytes = 0
    if newest.fullest_gpu is not None:
        room_bytes = newest.fullest_gpu.last_room_bytes or 0
    exited = "exited at work, by a crash or on purpose"
    if orphan_bytes or any(_is_surely_a_crash(end) for end in crashes):
        exited = "crashed"
    return Advice(
        cause=Cause.CRASH,
        summary=f"The engine {exited}, and no figure shows that GPU memory ran out.",
        evidence=list_evidence(
            ("crashes", len(crashes), f"it exited {times} at {when}"),
            ("running", newest.running, "{} requests ran just before"),
            ("room_bytes", room_bytes, "{} were left then"),
            ("orphan_bytes", orphan_bytes or None, "its left-over processes still held {}"),
        ),
        changes=(
            Change(
                text=(
                    f"Read vLLM's log up to {when} ({facts.log_command}): for"
                    f" OutOfMemoryError with a size above {format_size(room_bytes)}; and the"
                    " kernel's log for an Xid"
                ),
                cost=NO_COST,
            ),
        ),
        remark=(
            "Without such an error no option that sizes GPU memory affects it. Planned restarts"
            " during requests look the same where no process was left over."
        ),
    )


def find_crashes(facts: Facts) -> tuple[Ending, ...]:
    """Return the exits in which a serving engine crashed while GPU memory was left.

    In a crash, requests were running at the exit, or some engine processes did not exit. An exit is
    included even if the room on the GPUs is unknown.
    """
    crashes = []
    for end in facts.ends:
        was_at_work = end.running or end.orphan_bytes
        if not end.has_served or not was_at_work:
            continue
        gpu = end.fullest_gpu
        if _is_crash(end) and (gpu is None or (gpu.last_room_bytes or 0) >= LOW_BYTES):
            crashes.append(end)
    return tuple(crashes)


def _is_crash(end: Ending) -> bool:
    """Return whether an exit was a crash.

    A possible failed allocation without a full GPU also counts.
    """
    answer = judge_ending(end)[0]
    if answer.cause is EndCause.CRASH:
        return True
    is_only_possible = answer.sureness is Sureness.POSSIBLE
    return answer.cause is EndCause.BURST and is_only_possible and find_full_gpu(end) is None


def _is_surely_a_crash(end: Ending) -> bool:
    """Return whether the most likely cause of an exit is more than a possibility."""
    return judge_ending(end)[0].sureness is not Sureness.POSSIBLE


# Host memory.

HOST_LOW_RATIO: Final = 0.05
"""Our choice: below this free share of its limit, host memory is short. A single request with a
large video can use up the rest.
"""

PROCESSOR_CACHE_GB: Final = 1.0
"""Our choice: the proposed value of --mm-processor-cache-gb, a quarter of vLLM's default."""


def find_host_shortage(facts: Facts) -> Advice | None:
    """Judge host memory that ran short.

    The rule applies if the kernel's out-of-memory killer ended a process. The rule also applies if
    less than HOST_LOW_RATIO of the container's memory limit was free. The proposals are a smaller
    cache for processed images, less data in host memory, and a higher limit, in this order. Returns
    None if the rule does not apply.
    """
    host = facts.host
    if host is None:
        return None
    limit_bytes = host.limit_bytes
    room_bytes = host.room_bytes
    is_low = False
    if room_bytes is not None and limit_bytes is not None:
        is_low = room_bytes < HOST_LOW_RATIO * limit_bytes
    # A kill is judged even if the samples show room. Memory may run out between two samples.
    if not host.oom_kills and not is_low:
        return None
    used_bytes = None if limit_bytes is None else host.used_bytes
    used_text = (
        f"at most {{}} of {format_size(limit_bytes or 0)} were in use, without the cache of files"
    )
    return Advice(
        cause=Cause.HOST_MEMORY,
        summary="Host memory, not the GPU's, is too small for this engine.",
        evidence=list_evidence(
            (
                "oom_kills",
                host.oom_kills or None,
                f"out-of-memory kills in its container: {host.oom_kills}",
            ),
            ("host_used_bytes", used_bytes, used_text),
            ("shm_used_bytes", host.shm_used_bytes or None, "{} of it in /dev/shm"),
        ),
        changes=(
            Change(
                text="Keep fewer processed images and videos; no gain without any in the traffic",
                cost=(
                    "more to process again; the default is 4 for each API server and each"
                    " data-parallel rank"
                ),
                flag=Flag.MM_PROCESSOR_CACHE_GB,
                value=PROCESSOR_CACHE_GB,
            ),
            Change(
                text=(
                    "Keep less on the host where it is configured: offloaded weights, an offloaded"
                    " KV cache, unused adapters"
                ),
                cost="more of the GPU's memory, or slower where it is fetched again; a restart",
            ),
            Change(text="Raise the container's memory limit", cost="the node's memory; a restart"),
        ),
        remark=(
            "Sleep level 1 keeps the weights in host memory: the limit has to hold them as well."
        ),
    )


# Memory held by other processes on the engine's GPUs.


def find_other_tenant(facts: Facts) -> Advice | None:
    """Judge memory held by processes that do not belong to the engine.

    The rule applies if other processes hold more than NEIGHBOUR_BYTES on the engine's GPUs. In
    addition, these processes must have allocated that much during the trace, or must leave less
    than AIM_BYTES free. Constant memory that leaves enough room is no problem (runbook
    HeadroomNeighbourGrowing, "Do nothing when"). A page has no history. For a page, only the memory
    that other processes currently hold counts. The rule proposes moving the other processes. If
    they cannot be moved, the rule proposes a smaller share for vLLM. Returns None if the rule does
    not apply.
    """
    gpu = None
    others_memory = None
    # Find the GPU on which other processes held the most memory.
    for candidate in facts.gpus:
        memory = candidate.others_memory
        if memory is None or not _is_problem(facts, candidate, memory):
            continue
        if others_memory is None or memory.highest_bytes > others_memory.highest_bytes:
            gpu = candidate
            others_memory = memory
    if gpu is None or others_memory is None:
        return None
    now = ""
    highest_bytes: float | None = others_memory.highest_bytes
    if facts.origin is FactsSource.PAGE:
        now = " now"
        highest_bytes = None
    smaller_share = _make_room_for_others(facts, gpu, others_memory)
    remark = None
    if smaller_share is not None:
        remark = "A smaller share for vLLM is right only if both have to stay on this GPU."
    return Advice(
        cause=Cause.ANOTHER_TENANT,
        summary=f"Another process takes memory of {gpu.display_name}{now}.",
        evidence=list_evidence(
            (
                "others_bytes",
                others_memory.newest_bytes,
                f"processes that are not the engine's hold {{}} of {gpu.display_name}",
            ),
            (
                "most_others_bytes",
                highest_bytes,
                f"between {format_size(others_memory.lowest_bytes)} and {{}}",
            ),
            ("least_room_bytes", gpu.least_room_bytes, "{} were left at the highest peak"),
        ),
        changes=drop_none(
            Change(
                text=(
                    "Find it with nvidia-smi on the node, and have its owner move it to another GPU"
                    " or stop it"
                ),
                cost=NO_COST,
            ),
            smaller_share,
        ),
        remark=remark,
    )


def _is_problem(facts: Facts, gpu: GpuFacts, others_memory: Extent) -> bool:
    """Return whether other processes allocated a lot during the trace, or leave too little.

    For a page, return whether other processes currently hold much memory.
    """
    if others_memory.highest_bytes <= NEIGHBOUR_BYTES:
        return False
    if facts.origin is FactsSource.PAGE:
        return True
    if others_memory.highest_bytes - others_memory.lowest_bytes > NEIGHBOUR_BYTES:
        return True
    return gpu.least_room_bytes is not None and gpu.least_room_bytes < AIM_BYTES


def _make_room_for_others(facts: Facts, gpu: GpuFacts, others_memory: Extent) -> Change | None:
    """Return a smaller share.

    Returns None if the current share is unknown or leaves enough. The new share leaves AIM_BYTES at
    peaks. The new share is at most the memory that other processes leave free. With a larger share,
    vLLM would refuse to start (worker/utils.py).
    """
    missing_bytes = 0.0
    if gpu.least_room_bytes is not None:
        missing_bytes = max(missing_bytes, AIM_BYTES - gpu.least_room_bytes)
    utilization = facts.settings.gpu_memory_utilization
    if utilization is not None and gpu.usable_bytes is not None:
        beside_share_bytes = (1.0 - utilization) * gpu.usable_bytes
        missing_bytes = max(missing_bytes, others_memory.highest_bytes - beside_share_bytes)
    return take_less(facts, gpu, missing_bytes) if missing_bytes > 0 else None


def find_leftovers(facts: Facts) -> Advice | None:
    """Judge processes that outlived their engine.

    The rule applies if such a process uses a GPU when a trace ends. The rule proposes ending the
    leftover process. A page does not list leftover processes. Returns None if the rule does not
    apply.
    """
    figures: list[tuple[str, float | str, str]] = []
    for gpu in facts.gpus:
        for leftover in gpu.leftovers:
            used = "unknown" if leftover.used_bytes is None else leftover.used_bytes
            text = f"{gpu.display_name}: {describe_leftover(leftover)}"
            figures.append(("left_behind_bytes", used, text))
    if not figures:
        return None
    return Advice(
        cause=Cause.LEFT_BEHIND,
        summary="Left-over processes of an exited engine hold GPU memory.",
        evidence=list_evidence(*figures),
        changes=(
            Change(
                text=(
                    "End it, or reset the GPU if nothing runs any more:"
                    " vllm-headroom doctor names its pid"
                ),
                cost="none to this engine; a reset needs a GPU that nothing else uses",
            ),
        ),
    )
