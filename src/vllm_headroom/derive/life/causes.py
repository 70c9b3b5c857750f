"""The causes of an exit or a stall, and how certain each is.

The exit counter, the page and all commands take the cause from this module. The table of causes is
in docs/commands/postmortem.md.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from vllm_headroom.derive.attribution import NEIGHBOUR_BYTES
from vllm_headroom.derive.engine_log import describe_failure, describe_place, describe_refusal
from vllm_headroom.model import BudgetExcess, Diagnosis, Ending, GpuAtEnd, StraightGrowth
from vllm_headroom.model.start import LogFailure, Refusal
from vllm_headroom.units import GIB, MIB, format_duration, format_size
from vllm_headroom.vocabulary import (
    GROWING_STATES,
    EndCause,
    ExitReason,
    IncidentKind,
    LeakState,
    LogFailureKind,
    Sureness,
)

FULL_ROOM_BYTES: Final = 256 * MIB
"""A GPU was full if its lowest free memory was at most this. The amount is about a dozen of torch's
20 MiB segments. In addition, the lowest free memory must have been at most FULL_ROOM_RATIO of the
free memory when the engine started to serve.
"""

FULL_ROOM_RATIO: Final = 0.5
"""A full GPU has at most this share of its initially free memory left. A GPU that had little free
memory from the start is therefore not considered full.
"""

FILL_SECONDS: Final = 30.0
"""Memory that straight growth would use up within this time counts as used. At the exit, the newest
sample may be up to this old.
"""

REFUSING_SECONDS: Final = 15.0
"""A running server that has refused connections for this long is shutting down on request. A server
whose core has died also refuses connections, but exits within seconds.
"""

LIKELY_SHARE: Final = 0.5
"""Growth is a likely cause from this share of the lost free memory."""

SURE_SHARE: Final = 0.8
"""Growth can be a certain cause from this share of the lost free memory."""

LARGE_ALLOCATION_BYTES: Final = 4 * GIB
"""If less was free, an allocation may have failed although the GPU was not full. A failed
allocation takes no memory. According to `plan`, the activations of a step take 1.9 to 4 GiB. In one
report, 3.74 GiB were refused while 3.68 GiB were free (vllm-project/vllm#49182). In another report,
the sampler was refused 786 MiB while 552 MiB were free. If more was free, a failed allocation is
unlikely. Only other evidence can rule it out.
"""

KNOWN_BEFORE_SECONDS: Final = 600.0
"""A shorter record does not show how much memory was used before a burst."""

LITTLE_ROOM_RATIO: Final = 0.08
"""By default, vLLM leaves this share of a GPU free. If less was free at a failed start, the engine
may have taken the rest.
"""

FATAL_XIDS: Final = frozenset({13, 31, 48, 62, 74, 79, 94, 95, 119, 120})
"""XID errors that end the program that caused them, according to NVIDIA's table. XIDs 43 and 45 are
omitted, because they can result from the program's exit. XIDs 63 and 64 are omitted, because the
program may keep running after them.
"""

FULL_REASONS: Final = frozenset({ExitReason.OUT_OF_MEMORY, ExitReason.OVER_BUDGET})
"""The exit reasons which state that GPU memory ran out."""

UNOBSERVED_SECONDS: Final = 15.0
"""If no sample was taken for longer than this, memory may have run out unobserved. Filling it takes
only seconds.
"""

VISIBLE_STALL_SECONDS: Final = 60.0
"""A stall detected from the page or a canary has lasted at least this long. A shorter stall was
detected by other signs, and began while the engine was idle.
"""


MEMORY_CAUSES: Final = (
    EndCause.NEIGHBOUR,
    EndCause.OVER_BUDGET,
    EndCause.LEAK,
    EndCause.BURST,
)
"""The causes that can make a working engine run out of GPU memory. If the log shows that memory ran
out, the samples show which cause applies.
"""

LEAST_NEWCOMER_BYTES: Final = 256 * MIB
"""A new process takes more than this on a GPU. Its CUDA context alone takes 300 to 500 MiB."""

SURE_CAUSES: Final[Mapping[LogFailureKind, EndCause]] = {
    LogFailureKind.NO_KV_CACHE_MEMORY: EndCause.NEVER_FITTED,
    LogFailureKind.CONTEXT_TOO_LONG: EndCause.NEVER_FITTED,
    LogFailureKind.TOO_FEW_STATE_BLOCKS: EndCause.NEVER_FITTED,
    LogFailureKind.LITTLE_FREE_MEMORY: EndCause.NEVER_FITTED,
    LogFailureKind.HANG: EndCause.HANG,
    **dict.fromkeys(
        (
            LogFailureKind.MEMORY_CHANGED,
            LogFailureKind.BLOCK_BEYOND_BATCH,
            LogFailureKind.CONTEXT_BEYOND_MODEL,
            LogFailureKind.MODEL_UNAVAILABLE,
            LogFailureKind.TOO_FEW_GPUS,
            LogFailureKind.NCCL,
            LogFailureKind.SHARED_MEMORY,
            LogFailureKind.CUDA,
            LogFailureKind.DRIVER,
            LogFailureKind.HOST_OUT_OF_MEMORY,
            LogFailureKind.DISK_FULL,
            LogFailureKind.PORT_IN_USE,
            LogFailureKind.UNSUPPORTED,
            LogFailureKind.BAD_OPTION,
        ),
        EndCause.CRASH,
    ),
}
"""The causes for which the log is sufficient evidence. Three other causes can be judged only
together with the samples: a lack of GPU memory, a kill, and an unknown exception.
"""


class CauseFit(NamedTuple):
    """How well a cause fits an exit or a stall."""

    sureness: Sureness
    sentence: str
    remarks: tuple[str, ...] = ()
    """Further evidence for or against the cause."""


UNKNOWN_CAUSE: Final = Diagnosis(
    cause=EndCause.UNKNOWN,
    sureness=Sureness.POSSIBLE,
    sentence="The cause of the exit is not known.",
    evidence=("look in vLLM's log, and in the kernel's (dmesg -T)",),
)
"""The result if no cause fits."""


def judge_ending(end: Ending) -> tuple[Diagnosis, ...]:
    """Return the causes that fit, with the most certain first, or UNKNOWN_CAUSE if none fits.

    If one cause is certain, causes that are merely possible are omitted. What the engine's own log
    reports is weighed against all other evidence.
    """
    return _add_log(end, _judge_samples(_take_logged_reason(end)))


def _take_logged_reason(end: Ending) -> Ending:
    """Return the ending without its reason if the reason comes only from the log."""
    has_other_witness = bool(end.ooms) or any(is_gpu_full(gpu) for gpu in end.gpus)
    if end.log is None or end.reason is not ExitReason.OUT_OF_MEMORY or has_other_witness:
        return end
    return replace(end, reason=ExitReason.GONE)


def _judge_samples(end: Ending) -> tuple[Diagnosis, ...]:
    """Return the causes that fit all evidence besides the log, with the most certain first."""
    evidence = tuple(_list_evidence(end))
    diagnoses = []
    for cause, find_fit in CAUSES:
        fit = find_fit(end)
        if fit is not None:
            diagnosis = Diagnosis(cause, fit.sureness, fit.sentence, (*evidence, *fit.remarks))
            diagnoses.append(diagnosis)
    # If one cause is certain, merely possible ones would only distract.
    if any(diagnosis.sureness is Sureness.SURE for diagnosis in diagnoses):
        diagnoses = [
            diagnosis for diagnosis in diagnoses if diagnosis.sureness is not Sureness.POSSIBLE
        ]
    if not diagnoses:
        return (UNKNOWN_CAUSE,)
    surest_first = list(Sureness)
    return tuple(sorted(diagnoses, key=lambda diagnosis: surest_first.index(diagnosis.sureness)))


def is_gpu_full(gpu: GpuAtEnd) -> bool:
    """Return whether almost no memory was left free, or False if that is unknown.

    With growth in a straight line, memory used up within FILL_SECONDS counts as taken.
    """
    if gpu.last_room_bytes is None:
        return False
    full_room_bytes = float(FULL_ROOM_BYTES)
    if gpu.straight_growth is not None:
        growth_bytes = FILL_SECONDS * gpu.straight_growth.bytes_per_second
        full_room_bytes = max(full_room_bytes, growth_bytes)
    if gpu.last_room_bytes > full_room_bytes:
        return False
    if gpu.first_room_bytes is None:
        return True
    # A GPU that had little free memory from the start is not considered full.
    return gpu.last_room_bytes <= FULL_ROOM_RATIO * gpu.first_room_bytes


def find_full_gpu(end: Ending) -> GpuAtEnd | None:
    """Return the GPU whose lack of memory can explain the exit or stall.

    The GPU is the fullest one if memory is known to have run out, and otherwise the first full one.
    Returns None if no GPU is full. Also returns None if the run is not over or has never served.
    """
    if not end.is_over or not end.has_served:
        return None
    if end.reason in FULL_REASONS:
        return end.fullest_gpu
    return next((gpu for gpu in end.gpus if is_gpu_full(gpu)), None)


def is_shutdown(end: Ending) -> bool:
    """Return whether the server had been serving, then closed its port and kept running."""
    if not end.has_served or end.refused_seconds is None:
        return False
    return end.refused_seconds >= REFUSING_SECONDS


def _fit_kill(end: Ending) -> CauseFit | None:
    """Judge whether the kernel killed the engine because host memory ran out.

    Returns None if the kernel counted no such kill for this exit.
    """
    if end.reason is not ExitReason.OOM_KILLED:
        return None
    return CauseFit(Sureness.SURE, "Killed by the kernel: host memory ran out, not GPU memory.")


def _fit_failed_start(end: Ending) -> CauseFit | None:
    """Judge whether the engine exited before serving because it did not fit into memory.

    Returns None if the engine has served. Also returns None if much memory was free and other
    processes held little. The cause is certain if the GPU was full.
    """
    gpu = end.fullest_gpu
    if end.kind is not IncidentKind.ENDED or end.has_served:
        return None
    if gpu is None or gpu.last_room_bytes is None:
        return None
    other_bytes = gpu.last_other_bytes or 0
    has_neighbour = other_bytes >= NEIGHBOUR_BYTES
    total_bytes = gpu.total_bytes
    # The missing memory may have been taken by the starting engine itself.
    is_filled = total_bytes is not None and gpu.last_room_bytes < LITTLE_ROOM_RATIO * total_bytes
    if not has_neighbour and not is_filled:
        return None
    remarks: tuple[str, ...] = ()
    if has_neighbour:
        remarks = (f"others held {format_size(other_bytes)} of it",)
    duration = format_duration(end.observed_seconds)
    return CauseFit(
        _grade(is_sure=gpu.last_room_bytes <= FULL_ROOM_BYTES),
        f"A start that never fitted: it exited after {duration}, before it served.",
        remarks,
    )


def _grade(*, is_sure: bool) -> Sureness:
    """Return the certainty of a cause that is at least likely."""
    return Sureness.SURE if is_sure else Sureness.LIKELY


def _fit_neighbour(end: Ending) -> CauseFit | None:
    """Judge whether other processes took most of the memory that filled a GPU.

    If the memory of other processes is unknown, a new process on the GPU suffices. Returns None if
    no GPU was full, or if other processes took little memory.
    """
    gpu = find_full_gpu(end)
    if gpu is None:
        return None
    cause = "Out of GPU memory by a neighbour"
    other_growth_bytes = gpu.other_growth_bytes
    if other_growth_bytes is None:
        # Without figures, only a new process is evidence of a neighbour.
        if not gpu.has_new_process:
            return None
        return CauseFit(
            Sureness.LIKELY,
            f"{cause}: another process had appeared on {gpu.display_name}.",
            ("its memory is not known: the sidecar could not attribute memory to processes",),
        )
    share = gpu.share_of_lost_room(other_growth_bytes)
    if share < LIKELY_SHARE:
        return None
    # A failed allocation takes no memory. If the GPU is not full, the allocation may have failed
    # for another reason.
    is_sure = is_gpu_full(gpu) and share >= SURE_SHARE
    size = format_size(other_growth_bytes)
    return CauseFit(
        _grade(is_sure=is_sure),
        f"{cause}: other processes took {size} of {gpu.display_name}.",
    )


def is_over_budget(end: Ending) -> bool:
    """Return whether the engine likely exited because it was over its budget from the start."""
    fit = _fit_over_budget(end)
    return fit is not None and fit.sureness is not Sureness.POSSIBLE


def _fit_over_budget(end: Ending) -> CauseFit | None:
    """Judge whether the engine has exceeded its budget since it first processed requests.

    Returns None if the engine stayed within its budget, or if enough memory was left. The cause is
    certain if the GPU was full and later growth was small. Small growth is much less than the
    excess. The cause is merely possible if little memory was left. In that case, a single
    allocation may have needed more than the free memory.
    """
    gpu = find_over_budget_gpu(end)
    if gpu is None or gpu.excess is None:
        return None
    excess = gpu.excess
    size = format_size(excess.excess_bytes)
    if not _is_memory_short(end, gpu, excess):
        room_bytes = gpu.last_room_bytes or 0
        if not _may_allocation_have_failed(end, room_bytes):
            return None
        room = format_size(room_bytes)
        return CauseFit(
            Sureness.POSSIBLE,
            f"Over its budget from the start, perhaps: the engine held {size}"
            f" ({100 * excess.ratio:.1f} %) more than it on {gpu.display_name}, {room} were left,"
            " and one allocation may have needed more.",
            (_describe_search(room_bytes), _describe_lower_budget(end, excess)),
        )
    is_attributed = gpu.other_growth_bytes is not None and not gpu.is_peak_unattributed
    is_settled = excess.seconds >= KNOWN_BEFORE_SECONDS
    # If later growth is large compared with the excess, it may be the real cause.
    later_growth_bytes = _measure_later_growth(gpu, excess)
    is_alone = later_growth_bytes <= LIKELY_SHARE * excess.first_excess_bytes
    is_sure = is_gpu_full(gpu) and is_attributed and is_settled and is_alone
    duration = format_duration(excess.seconds)
    return CauseFit(
        _grade(is_sure=is_sure),
        f"Over its budget from the start: the engine held {size} ({100 * excess.ratio:.1f} %) more"
        f" than it on {gpu.display_name}, for {duration}.",
        (_describe_lower_budget(end, excess),),
    )


def _is_memory_short(end: Ending, gpu: GpuAtEnd, excess: BudgetExcess) -> bool:
    """Return whether the GPU was full, or a working engine exited with little memory left."""
    if is_gpu_full(gpu) or end.ooms or end.reason in FULL_REASONS:
        return True
    # A run that was replaced between two samples may have been restarted on purpose.
    if end.reason is ExitReason.REPLACED:
        return False
    # Memory held by other processes is treated as free here. Without them, the engine could have
    # used it.
    room_bytes = (gpu.last_room_bytes or 0) + (gpu.last_other_bytes or 0)
    return bool(end.running) and room_bytes < excess.tight_bytes


def find_over_budget_gpu(end: Ending) -> GpuAtEnd | None:
    """Return the fullest GPU on which the engine was over its budget from the start.

    Returns None if something else explains the exit or stall. Other explanations are growth, other
    processes, a GPU fault, a kill, a hang and a stop.
    """
    if not end.is_over or not end.has_served:
        return None
    if end.reason in (ExitReason.OOM_KILLED, ExitReason.STOPPED) or is_shutdown(end):
        return None
    if end.unreadable or FATAL_XIDS & set(end.xids):
        return None
    # A hang explains the end unless an allocation failed in torch.
    if end.hung_seconds is not None and not end.ooms:
        return None
    gpus = [gpu for gpu in end.gpus if _is_excess_decisive(gpu)]
    return min(gpus, key=lambda gpu: gpu.last_room_bytes or 0, default=None)


def _is_excess_decisive(gpu: GpuAtEnd) -> bool:
    """Return whether the excess in the first minutes took more memory than all later growth."""
    excess = gpu.excess
    if excess is None or not excess.is_from_start or gpu.last_room_bytes is None:
        return False
    if gpu.leak in GROWING_STATES or _has_grown_straight(gpu):
        return False
    if gpu.share_of_lost_room(gpu.other_growth_bytes) >= LIKELY_SHARE:
        return False
    return _measure_later_growth(gpu, excess) <= excess.first_excess_bytes


def _measure_later_growth(gpu: GpuAtEnd, excess: BudgetExcess) -> int:
    """Return the engine's highest use at the end minus its use in the first minutes."""
    first_bytes = excess.budget_bytes + excess.first_excess_bytes
    return (gpu.last_engine_bytes or 0) - first_bytes


def _has_grown_straight(gpu: GpuAtEnd) -> bool:
    """Return whether straight-line growth under level load took most of the lost memory."""
    growth = gpu.straight_growth
    if growth is None or gpu.share_of_lost_room(gpu.other_growth_bytes) >= LIKELY_SHARE:
        return False
    return gpu.share_of_lost_room(growth.grown_bytes) >= LIKELY_SHARE


def _describe_lower_budget(end: Ending, excess: BudgetExcess) -> str:
    return f"{describe_lower_budget(end, excess)} gives that back"


def describe_lower_budget(end: Ending, excess: BudgetExcess) -> str:
    """Return the option that makes up for an excess, with its value if known."""
    option = "--gpu-memory-utilization"
    ratios = {engine.gpu_memory_utilization_ratio for engine in end.engines}
    # If the engines of one server use different values, no single value is correct.
    ratio = ratios.pop() if len(ratios) == 1 else None
    if ratio is None:
        return f"{format_size(excess.excess_bytes)} less for vLLM (a lower {option})"
    return f"{option} {excess.lower_utilization(ratio):.2f} in place of {ratio:g}"


def _fit_leak(end: Ending) -> CauseFit | None:
    """Judge whether the engine leaked.

    A leak covers the whole run, or is a straight line at the end. Returns None if no GPU was full.
    Also returns None if a burst, other processes or an excess took the memory. A leak is certain if
    the detector raised an alarm and nothing else took memory.
    """
    gpu = find_full_gpu(end)
    if gpu is None or is_over_budget(end):
        return None
    if gpu.straight_growth is not None and _has_grown_straight(gpu):
        is_sure = (
            gpu.leak is LeakState.LEAKING
            and is_gpu_full(gpu)
            and gpu.other_growth_bytes is not None
        )
        return CauseFit(
            _grade(is_sure=is_sure), _describe_straight_growth(gpu, gpu.straight_growth)
        )
    # Growth in the last minutes is attributed to a burst. Growth of other processes is attributed
    # to a neighbour. Neither is a leak.
    recent_share = gpu.share_of_lost_room(gpu.recent_growth_bytes)
    other_share = gpu.share_of_lost_room(gpu.other_growth_bytes)
    if max(recent_share, other_share) >= LIKELY_SHARE:
        return None
    sentence = f"Out of GPU memory by a leak: the engine grew until {gpu.display_name} was full."
    if gpu.leak in GROWING_STATES:
        # The check above treats unknown growth as 0. Unknown growth may still have taken the
        # memory.
        is_attributed = gpu.other_growth_bytes is not None and gpu.recent_growth_bytes is not None
        is_sure = gpu.leak is LeakState.LEAKING and is_gpu_full(gpu) and is_attributed
        return CauseFit(_grade(is_sure=is_sure), sentence)
    if gpu.share_of_lost_room(gpu.growth_bytes) < LIKELY_SHARE:
        return None
    doubt = "it may be high-water marks that add up, not a leak"
    return CauseFit(Sureness.POSSIBLE, sentence, (doubt,))


def find_straight_growth_gpu(end: Ending) -> GpuAtEnd | None:
    """Return the GPU that straight growth has filled, or None if there is none."""
    gpu = find_full_gpu(end)
    if gpu is None or is_over_budget(end) or not _has_grown_straight(gpu):
        return None
    return gpu


def _describe_straight_growth(gpu: GpuAtEnd, growth: StraightGrowth) -> str:
    """Return the sentence on a leak that the leak detector was too slow to detect."""
    rate = f"{format_size(growth.bytes_per_second)} a second"
    duration = format_duration(growth.seconds)
    return (
        f"Out of GPU memory by a leak: the engine grew in a straight line under a level load, by"
        f" {rate} for {duration}, until {gpu.display_name} was full."
    )


FAILED_ALLOCATION: Final = "Out of GPU memory in a burst: an allocation of torch failed."


def _fit_burst(end: Ending) -> CauseFit | None:
    """Judge whether memory ran out in a burst.

    A burst takes a few minutes, or is a single allocation. Returns None if the memory was taken by
    straight growth, other processes or an excess.
    """
    if is_over_budget(end):
        return None
    gpu = find_full_gpu(end)
    if gpu is None:
        return _fit_failed_allocation(end)
    if _has_grown_straight(gpu):
        return None
    if gpu.share_of_lost_room(gpu.other_growth_bytes) >= LIKELY_SHARE:
        return None
    sentence = f"Out of GPU memory in a burst: {gpu.display_name} was filled within minutes."
    if end.ooms:
        sentence = _describe_failed_allocation(end)
    if _is_surely_burst(end, gpu):
        return CauseFit(Sureness.SURE, sentence)
    share = gpu.share_of_lost_room(gpu.recent_growth_bytes)
    # torch recorded the failed allocation. A burst is therefore likely even without observed
    # growth.
    if share >= LIKELY_SHARE or end.ooms:
        return CauseFit(Sureness.LIKELY, sentence)
    return CauseFit(Sureness.POSSIBLE, sentence)


def _is_surely_burst(end: Ending, gpu: GpuAtEnd) -> bool:
    """Return whether the engine alone filled the GPU within minutes, after a level phase.

    Also returns True if the probe saw a step that raised an OutOfMemoryError just before the end.
    """
    if gpu.leak in GROWING_STATES:
        return False
    if end.failed_step is not None:
        return True
    # A peak between two samples may have been caused by another process.
    is_attributed = gpu.other_growth_bytes is not None and not gpu.is_peak_unattributed
    is_before_known = end.observed_seconds >= KNOWN_BEFORE_SECONDS
    if not is_attributed or not is_before_known:
        return False
    share = gpu.share_of_lost_room(gpu.recent_growth_bytes)
    return is_gpu_full(gpu) and share >= SURE_SHARE


def _fit_failed_allocation(end: Ending) -> CauseFit | None:
    """Judge whether an allocation failed even though no GPU was full.

    The cause is certain if the probe saw a step that raised an OutOfMemoryError just before the
    end. The cause is likely if torch counted an OutOfMemoryError. The cause is possible if requests
    were running and little memory was free. In that case, an allocation may have failed unobserved.
    If none of these conditions holds, returns None.
    """
    if not end.is_over or not end.has_served:
        return None
    if end.ooms:
        has_grown_before = any(gpu.leak in GROWING_STATES for gpu in end.gpus)
        is_sure = end.failed_step is not None and not has_grown_before
        sureness = Sureness.SURE if is_sure else Sureness.LIKELY
        return CauseFit(sureness, _describe_failed_allocation(end))
    gpu = end.fullest_gpu
    if gpu is None:
        return None
    # The free memory of the fullest GPU is always known.
    room_bytes = gpu.last_room_bytes or 0
    # An excess over the budget explains the same failure, and has been measured.
    if not _may_allocation_have_failed(end, room_bytes) or _fit_over_budget(end) is not None:
        return None
    room = format_size(room_bytes)
    return CauseFit(
        Sureness.POSSIBLE,
        f"Out of GPU memory in a burst, perhaps: {room} were left on {gpu.display_name}, and one"
        " allocation may have needed more.",
        (_describe_search(room_bytes), *_list_excess(end, gpu)),
    )


def _describe_failed_allocation(end: Ending) -> str:
    """Return the sentence on a failed allocation, naming the step that needed it if known."""
    if end.failed_step is None:
        return FAILED_ALLOCATION
    return f"{FAILED_ALLOCATION.removesuffix('.')} in a step of {end.failed_step}."


def _may_allocation_have_failed(end: Ending, room_bytes: int) -> bool:
    """Return whether, with requests running, an allocation above `room_bytes` may have failed."""
    # A probe would have recorded the failed allocation.
    return bool(end.running) and not end.is_probed and room_bytes < LARGE_ALLOCATION_BYTES


def _list_excess(end: Ending, gpu: GpuAtEnd) -> tuple[str, ...]:
    """Return a remark on the engine's excess on a GPU, or nothing without an excess."""
    excess = gpu.excess
    if excess is None:
        return ()
    size = format_size(excess.excess_bytes)
    return (f"it held {size} more than its budget: {_describe_lower_budget(end, excess)}",)


def _describe_search(room_bytes: int) -> str:
    """Return a remark on how to find out whether an allocation failed."""
    return (
        "no figure shows a failed allocation: look in vLLM's log for OutOfMemoryError with a size"
        f" above {format_size(room_bytes)}"
    )


def _fit_hang(end: Ending) -> CauseFit | None:
    """Judge whether the engine hung: it had work but made no progress.

    Returns None if the engine did not hang, had never served, or was shutting down. The cause is
    certain if the engine's page was served and showed running requests.
    """
    # A server that is shutting down also makes no progress. The server waits for its clients.
    if end.hung_seconds is None or not end.has_served or is_shutdown(end):
        return None
    duration = format_duration(end.hung_seconds)
    sentence = f"A hang: the engine had work and made no progress for {duration}."
    if not end.is_page_answering:
        remark = "its page did not answer, and its processes ran"
        return CauseFit(Sureness.LIKELY, sentence, (remark,))
    if end.idle_seconds is not None and end.hung_seconds < VISIBLE_STALL_SECONDS:
        sentence = "A hang that began idle: its page shows no work, and the engine does not run."
    pause = "an engine that /pause stopped (development mode) looks the same"
    remark = f"its page still answered; {pause}"
    return CauseFit(_grade(is_sure=bool(end.running)), sentence, (remark,))


def _fit_shutdown(end: Ending) -> CauseFit | None:
    """Judge whether a shutdown was requested: the server closed its port and kept running.

    Returns None for any other kind of end.
    """
    if not is_shutdown(end):
        return None
    return CauseFit(
        Sureness.LIKELY,
        "A requested shutdown: the server closed its port, stopped its core and waited.",
        ("on shutdown vLLM cuts off running requests and waits until its clients disconnect",),
    )


def _fit_idle_exit(end: Ending) -> CauseFit | None:
    """Judge whether all processes of an idle engine exited together, for no visible reason.

    Returns None if:

    - the engine was working or had hung
    - its processes exited one after another
    - a GPU was full or had a fault
    """
    if end.kind is not IncidentKind.ENDED or not end.has_served or end.idle_seconds is None:
        return None
    if end.lost_processes or find_full_gpu(end) is not None or end.hung_seconds is not None:
        return None
    # If there is a GPU fault, the exit is a crash.
    if end.unreadable or FATAL_XIDS & set(end.xids):
        return None
    # After a longer gap, the engine may have worked again since the last sample.
    is_observed = (end.unobserved_seconds or 0.0) <= UNOBSERVED_SECONDS
    duration = format_duration(end.idle_seconds)
    return CauseFit(
        Sureness.LIKELY if is_observed else Sureness.POSSIBLE,
        "Exited while idle: a stop, a kill and a crash look the same from outside.",
        (f"nothing had run or waited for {duration} when its page was last seen",),
    )


def _fit_crash(end: Ending) -> CauseFit | None:
    """Judge whether the engine crashed, that is, exited for a reason other than memory.

    Returns None if a GPU was full, an allocation failed, or the engine hung. The cause is certain
    only if there is a fatal XID.
    """
    if not end.is_over or find_full_gpu(end) is not None or end.ooms:
        return None
    has_fault = bool(end.xids or end.unreadable)
    if end.hung_seconds is not None and not has_fault:
        return None
    room_bytes = _find_room_at_exit(end)
    remarks = tuple(_list_crash_remarks(end, room_bytes))
    return CauseFit(_grade_crash(end, room_bytes), _describe_crash(end, room_bytes), remarks)


def _list_crash_remarks(end: Ending, room_bytes: int | None) -> Iterator[str]:
    """Yield further evidence for or against a crash; `room_bytes` was free at the exit."""
    if end.running and not end.xids and not end.lost_processes:
        yield "a planned restart during requests looks the same"
    unobserved_seconds = end.unobserved_seconds or 0.0
    if unobserved_seconds > UNOBSERVED_SECONDS:
        gap = format_duration(unobserved_seconds)
        yield f"no sample in the {gap} before the exit: what was free at the exit is not known"
    if room_bytes is None:
        return
    if _is_memory_excluded(end):
        if end.is_probed:
            yield "torch raised no OutOfMemoryError, by the probe"
        return
    # A GPU that cannot be read explains the crash. There is no need to look for a failed
    # allocation.
    if end.running and not end.unreadable:
        yield _describe_search(room_bytes)


def _grade_crash(end: Ending, room_bytes: int | None) -> Sureness:
    """Return how certain a crash is, given how much GPU memory was free."""
    if FATAL_XIDS & set(end.xids):
        return Sureness.SURE
    if end.unreadable:
        return Sureness.LIKELY
    # If all processes of an idle engine exit together, the engine may have been stopped.
    was_at_work = end.has_served and bool(end.lost_processes or end.running)
    is_room_enough = room_bytes is not None and room_bytes >= LARGE_ALLOCATION_BYTES
    is_memory_excluded = room_bytes is not None and (is_room_enough or _is_memory_excluded(end))
    return Sureness.LIKELY if was_at_work and is_memory_excluded else Sureness.POSSIBLE


def _describe_crash(end: Ending, room_bytes: int | None) -> str:
    """Return the sentence on an unexplained exit.

    `room_bytes` was free at the exit.
    """
    crash = "A crash"
    crashed = "crashed"
    if not end.has_served:
        crash = "A failed start"
        crashed = "failed to start"
    if end.unreadable:
        return f"{crash}: one of its GPUs could no longer be read."
    if room_bytes is None:
        return f"{crash}; whether GPU memory ran out is not known."
    room = format_size(room_bytes)
    if _is_memory_excluded(end):
        return f"Not GPU memory: the engine {crashed} with {room} free."
    if room_bytes >= LARGE_ALLOCATION_BYTES:
        return f"{crash} with {room} of GPU memory free."
    return f"{crash} with {room} free; whether an allocation needed more is not known."


def _is_memory_excluded(end: Ending) -> bool:
    """Return whether a GPU error or the probe rules out a failed allocation.

    Also returns True if no request was running, because an idle engine allocates nothing.
    """
    is_idle = end.has_served and end.running == 0
    return bool(FATAL_XIDS & set(end.xids)) or end.is_probed or is_idle


def _find_room_at_exit(end: Ending) -> int | None:
    """Return the free memory on the fullest GPU at the exit.

    Returns None if no sample was recent.
    """
    if end.unobserved_seconds is None or end.unobserved_seconds > UNOBSERVED_SECONDS:
        return None
    if end.fullest_gpu is None:
        return None
    return end.fullest_gpu.last_room_bytes


CAUSES: Final[tuple[tuple[EndCause, Callable[[Ending], CauseFit | None]], ...]] = (
    (EndCause.KILLED, _fit_kill),
    (EndCause.NEVER_FITTED, _fit_failed_start),
    (EndCause.NEIGHBOUR, _fit_neighbour),
    (EndCause.OVER_BUDGET, _fit_over_budget),
    (EndCause.LEAK, _fit_leak),
    (EndCause.BURST, _fit_burst),
    (EndCause.HANG, _fit_hang),
    (EndCause.STOPPED, _fit_shutdown),
    (EndCause.IDLE, _fit_idle_exit),
    (EndCause.CRASH, _fit_crash),
)
"""The causes, each with a function that judges how well the cause fits. The function returns None
if the cause does not fit. If several causes are equally certain, the first one takes precedence.
"""


def _list_evidence(end: Ending) -> Iterator[str]:
    """Yield what the driver, allocator, kernel, processes, memory and page show about the end."""
    yield from end.unreadable
    for xid in end.xids:
        yield f"the driver reported XID {xid}"
    yield from end.ooms
    if end.highest_peak is not None and (end.ooms or find_full_gpu(end) is not None):
        yield end.highest_peak
    if end.reason is ExitReason.OOM_KILLED:
        yield "the kernel counted an out-of-memory kill in the engine's container then"
    for lost in end.lost_processes:
        sentence = f"{lost.role.replace('_', ' ')} exited before the others"
        yield sentence if lost.pid is None else f"{sentence} (pid {lost.pid})"
    full_gpu = find_full_gpu(end)
    if full_gpu is not None:
        yield from _describe_full_gpu(full_gpu, end.observed_seconds)
    elif end.fullest_gpu is not None:
        yield _describe_room(end.fullest_gpu)
    yield _describe_load(end)


def _describe_load(end: Ending) -> str:
    """Return how many requests were running at the end, for use as evidence."""
    if end.running is None:
        return "its load is not known" if end.has_served else "its page had not answered yet"
    if not end.running:
        return "no request ran"
    sentence = f"{end.running:.0f} requests ran when its page was last seen"
    if end.usual_running is not None:
        sentence += f", {end.usual_running:.0f} before"
    return sentence


def _describe_full_gpu(gpu: GpuAtEnd, observed_seconds: float) -> Iterator[str]:
    """Yield the evidence on a GPU: free memory, growth by process, the leak detector's state."""
    yield _describe_room(gpu)
    if gpu.growth_bytes is not None:
        duration = format_duration(observed_seconds)
        yield f"the engine grew by {format_size(gpu.growth_bytes)} in {duration}"
    if gpu.recent_growth_bytes is not None:
        yield f"the engine held {format_size(gpu.recent_growth_bytes)} more than minutes before"
    # On most cards, there is no other process, so there is nothing to report.
    if gpu.last_other_bytes or gpu.first_other_bytes:
        last_size = format_size(gpu.last_other_bytes or 0)
        first_size = format_size(gpu.first_other_bytes or 0)
        yield f"others held {last_size}, {first_size} before"
    sentence = f"the leak detector reported {gpu.leak}"
    if gpu.leak_bytes_per_request is not None:
        size = format_size(1000 * gpu.leak_bytes_per_request)
        sentence += f", {size} per thousand requests"
    yield sentence


def _describe_room(gpu: GpuAtEnd) -> str:
    """Return the evidence on a GPU's free memory at the end and at the start."""
    if gpu.last_room_bytes is None:
        return f"the memory left on {gpu.display_name} is not known"
    sentence = f"{format_size(max(0, gpu.last_room_bytes))} were left on {gpu.display_name}"
    if gpu.first_room_bytes is not None:
        sentence += f", {format_size(max(0, gpu.first_room_bytes))} at first"
    return sentence


def _add_log(end: Ending, diagnoses: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """Return the causes with the log's evidence added, with the most certain first.

    `diagnoses` has the causes that fit all other evidence. The most certain cause comes first.
    There is at least one diagnosis.
    """
    if end.log is None:
        return diagnoses
    if end.log.failure is not None:
        return _add_failure(end, end.log.failure, diagnoses)
    if end.log.is_stopped:
        return _conclude_by_log(
            EndCause.STOPPED,
            Sureness.SURE,
            "A requested shutdown: the engine's own log says so.",
            "its log has a requested shutdown",
            diagnoses,
        )
    return _add_silence(end, diagnoses)


def _add_failure(
    end: Ending, failure: LogFailure, diagnoses: tuple[Diagnosis, ...]
) -> tuple[Diagnosis, ...]:
    """Return the causes, taking into account a failure that the log reports."""
    evidence = _cite(failure)
    if failure.kind is LogFailureKind.GPU_OUT_OF_MEMORY:
        if not end.has_served:
            sentence = f"A start that never fitted: {_begin_lower(describe_failure(failure))}."
            return _conclude_by_log(
                EndCause.NEVER_FITTED, Sureness.SURE, sentence, evidence, diagnoses
            )
        return _add_refusal(end, failure, diagnoses)
    if failure.kind is LogFailureKind.KILLED:
        is_by_kernel = end.reason is ExitReason.OOM_KILLED
        sureness = Sureness.SURE if is_by_kernel else Sureness.LIKELY
        sentence = (
            "Killed from outside (SIGKILL): by the kernel, if host memory ran out, or by a person."
        )
        if is_by_kernel:
            # The samples include the kernel's count of kills, which is better evidence than the
            # log.
            sentence = diagnoses[0].sentence
        return _conclude_by_log(EndCause.KILLED, sureness, sentence, evidence, diagnoses)
    cause = SURE_CAUSES.get(failure.kind)
    if cause is not None:
        sentence = f"{describe_failure(failure)}."
        return _conclude_by_log(cause, Sureness.SURE, sentence, evidence, diagnoses)
    # Any other failure proves nothing. An exception without a known cause may affect only a single
    # request. The core may exit for any cause.
    return _append_evidence(evidence, diagnoses)


def _add_refusal(
    end: Ending, failure: LogFailure, diagnoses: tuple[Diagnosis, ...]
) -> tuple[Diagnosis, ...]:
    """Return the causes for a working engine whose log shows that GPU memory ran out.

    If one cause fits the samples best, it becomes certain. If several causes fit equally well,
    their certainty does not change. If no cause is likely, the cause is a burst. A single
    allocation exceeded the memory that was left.
    """
    evidence = _cite(failure)
    newcomer_bytes = _measure_newcomer(end, failure.refusal or Refusal())
    if newcomer_bytes is not None:
        sentence = (
            "Out of GPU memory by a neighbour: other processes had taken"
            f" {format_size(newcomer_bytes)} since the engine began to serve."
        )
        return _conclude_by_log(EndCause.NEIGHBOUR, Sureness.SURE, sentence, evidence, diagnoses)
    likely = [
        item
        for item in diagnoses
        if item.cause in MEMORY_CAUSES and item.sureness is not Sureness.POSSIBLE
    ]
    if not likely:
        refusal = failure.refusal or Refusal()
        details = describe_refusal(refusal) if refusal.asked_bytes else "its log says so"
        sentence = f"Out of GPU memory in a burst: {details}."
        return _conclude_by_log(EndCause.BURST, Sureness.SURE, sentence, evidence, diagnoses)
    best = likely[0]
    # If several causes fit equally well, the log cannot decide between them.
    rivals = [item for item in likely[1:] if item.sureness is best.sureness]
    sureness = best.sureness if rivals else Sureness.SURE
    stated = _conclude_by_log(best.cause, sureness, best.sentence, evidence, diagnoses)
    return stated + _append_evidence(evidence, rivals)


def _measure_newcomer(end: Ending, refusal: Refusal) -> int | None:
    """Return how much memory other processes took while the engine served, from torch's message.

    Unlike the samples, torch's message includes a process that started after the last sample.
    Returns None if the refused allocation would not have fitted even without the new process. Also
    returns None if the memory is too little for a process. Also returns None if the engine has
    several GPUs. The driver numbers GPUs differently than torch.
    """
    if refusal.asked_bytes is None or refusal.free_bytes is None or refusal.other_bytes is None:
        return None
    if len(end.gpus) != 1 or end.gpus[0].first_other_bytes is None:
        return None
    newcomer_bytes = refusal.other_bytes - end.gpus[0].first_other_bytes
    missing_bytes = refusal.asked_bytes - refusal.free_bytes
    is_decisive = newcomer_bytes >= max(missing_bytes, LEAST_NEWCOMER_BYTES)
    return newcomer_bytes if is_decisive else None


def _add_silence(end: Ending, diagnoses: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """Return the causes, given that the log continues until the exit and reports no failure.

    The log reports it if an engine runs out of GPU memory or crashes. The log reports nothing if
    the engine is killed or the machine goes down. Once the run is over, memory-related causes are
    therefore omitted. If no likely cause remains, the cause is a crash.
    """
    evidence = "its log goes on until then, and has no error and no shutdown"
    cited = _append_evidence(evidence, diagnoses)
    if not end.is_over:
        return cited
    # The log would report such a cause, so its silence rules that cause out.
    kept = tuple(item for item in cited if item.cause not in MEMORY_CAUSES)
    if len(kept) == len(cited):
        return cited
    if kept and kept[0].sureness is not Sureness.POSSIBLE:
        return kept
    return _conclude_by_log(
        EndCause.CRASH,
        Sureness.LIKELY,
        "Killed from outside, or crashed without a word: its log has no failed allocation.",
        evidence,
        diagnoses,
    )


def _conclude_by_log(
    cause: EndCause,
    sureness: Sureness,
    sentence: str,
    evidence: str,
    diagnoses: tuple[Diagnosis, ...],
) -> tuple[Diagnosis, ...]:
    """Return the cause that the log supports, and mention what the samples alone would suggest."""
    best = diagnoses[0]
    all_evidence = [evidence]
    if best.cause is cause:
        if best.sureness is not sureness:
            all_evidence.append(f"by the samples alone that was {best.sureness}")
    elif best.cause is not EndCause.UNKNOWN:
        alone = _begin_lower(best.sentence.rstrip("."))
        all_evidence.append(f"the log contradicts the samples, which alone fit: {alone}")
    # The samples' evidence for the same cause is used. Without such evidence, the evidence for the
    # cause with the best fit is used.
    own = [item for item in diagnoses if item.cause is cause]
    all_evidence += (own[0] if own else best).evidence
    return (
        Diagnosis(cause=cause, sureness=sureness, sentence=sentence, evidence=tuple(all_evidence)),
    )


def _append_evidence(evidence: str, diagnoses: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses with one more piece of evidence added to each."""
    return tuple(replace(item, evidence=(*item.evidence, evidence)) for item in diagnoses)


def _cite(failure: LogFailure) -> str:
    """Return what the log reports and where, as a sentence without a full stop."""
    return f"its log: {_begin_lower(describe_failure(failure))} ({describe_place(failure)})"


def _begin_lower(sentence: str) -> str:
    """Return a sentence with its first letter in lower case, for use inside another sentence.

    A sentence that begins with an option or a name in capitals does not change.
    """
    first_word = sentence.split(" ", 1)[0]
    if first_word.isupper() and first_word not in {"A", "I"}:
        return sentence
    return sentence[:1].lower() + sentence[1:]
