"""The one judge of why a run of the engine ended or stalled: the counter, the page and every command ask it.

docs/commands/postmortem.md has the table of causes.
"""

from collections.abc import Callable, Iterator
from typing import Final

from vllm_headroom.derive.life.signs import EngineRun, Signs
from vllm_headroom.model import Diagnosis, Ending, GpuAtEnd
from vllm_headroom.model.status import FULL_BYTES
from vllm_headroom.units import GIB, format_duration, format_size
from vllm_headroom.vocabulary import EndCause, ExitReason, IncidentKind, LeakState, Sureness

MOSTLY: Final = 0.5
NEARLY_ALL: Final = 0.8
"""Growth that took half of the lost room fits best; with four fifths, no other cause can."""

FEW_BYTES: Final = GIB
"""A failed allocation takes no memory; a large one is a gigabyte (the logits of 2,048 tokens)."""

LONGER_SECONDS: Final = 600.0
"""A shorter record does not show the memory before a burst."""

OTHERS_BYTES: Final = GIB
"""Less is only CUDA contexts of others."""

LITTLE_RATIO: Final = 0.08
"""Less of the GPU than vLLM leaves free by default: the start had taken all that it could."""

FATAL_XIDS: Final = frozenset({13, 31, 48, 62, 74, 79, 94, 95, 119, 120})
"""Errors that end the program, by NVIDIA's table; 43 and 45 can follow its exit, 63 and 64 may leave it running."""

UNSEEN_SECONDS: Final = 15.0
"""Memory fills within seconds: after a longer gap the engine may have run out of it."""

SHUT_SECONDS: Final = 15.0
"""A server whose core has died exits within seconds and refuses its page until then."""

Fit = tuple[Sureness, str, tuple[str, ...]]
"""How sure a cause is, its sentence, and what else speaks for or against it."""

VISIBLE_SECONDS: Final = 60.0
"""A stall that the page or a canary shows lasts at least so long; other signs show one that began idle."""

GROWN: Final = (LeakState.LEAKING, LeakState.GROWING)


def find_reason(
    run: EngineRun, seen: Signs, gpus: tuple[GpuAtEnd, ...], *, replaced: bool
) -> ExitReason:
    """Return why a run ended, as far as it is known at once: the kernel's count first, then full memory.

    `replaced` is whether another run answers in its place.
    """
    if seen.host.oom_kills is not None and seen.host.oom_kills > run.oom_kills:
        return ExitReason.OOM_KILLED
    if any(gpu.is_full for gpu in gpus) or (seen.oom_seconds or -1.0) >= (run.began_seconds or 0.0):
        return ExitReason.OUT_OF_MEMORY
    return ExitReason.REPLACED if replaced else ExitReason.GONE


def judge_ending(end: Ending) -> tuple[Diagnosis, ...]:
    """Return the causes that fit, the surest first, at least one; a sure one excludes those that are only possible."""
    evidence = tuple(_list_evidence(end))
    known = ((cause, fit(end)) for cause, fit in CAUSES)
    found = [
        Diagnosis(cause, fits[0], fits[1], (*evidence, *fits[2]))
        for cause, fits in known
        if fits is not None
    ]
    if any(finding.sureness is Sureness.SURE for finding in found):
        found = [finding for finding in found if finding.sureness is not Sureness.POSSIBLE]
    return tuple(sorted(found, key=lambda finding: list(Sureness).index(finding.sureness))) or (
        UNKNOWN,
    )


UNKNOWN: Final = Diagnosis(
    cause=EndCause.UNKNOWN,
    sureness=Sureness.POSSIBLE,
    sentence="The cause of the exit is not known.",
    evidence=("look in vLLM's log (kubectl logs --previous), and in the kernel's (dmesg -T)",),
)


def _fit_kill(end: Ending) -> Fit | None:
    """Fit where the kernel counted an out-of-memory kill in the engine's container at this exit."""
    if end.reason is not ExitReason.OOM_KILLED:
        return None
    return Sureness.SURE, "Killed by the kernel: host memory ran out, not GPU memory.", ()


def _fit_start(end: Ending) -> Fit | None:
    """Fit where an engine exited before it served, with little left or with others on its GPU."""
    gpu = end.worst
    if (
        end.what is not IncidentKind.ENDED
        or end.served
        or gpu is None
        or gpu.last_room_bytes is None
    ):
        return None
    others = gpu.last_other_bytes or 0
    little = gpu.total_bytes is not None and gpu.last_room_bytes < LITTLE_RATIO * gpu.total_bytes
    if others < OTHERS_BYTES and not little:
        return None
    sentence = f"A start that never fitted: it exited after {format_duration(end.seen_seconds)}, before it served."
    holders = (f"others held {format_size(others)} of it",) if others >= OTHERS_BYTES else ()
    return (
        Sureness.SURE if gpu.last_room_bytes <= FULL_BYTES else Sureness.LIKELY,
        sentence,
        holders,
    )


def _fit_neighbour(end: Ending) -> Fit | None:
    """Fit where others took most of the lost room, or, where that is unknown, where another process appeared."""
    gpu = end.full
    if gpu is None:
        return None
    if gpu.others_bytes is None:
        said = (
            f"Out of GPU memory by a neighbour: another process had appeared on {gpu.display_name}."
        )
        why = "its memory is not known: the sidecar could not attribute memory to processes"
        return (Sureness.LIKELY, said, (why,)) if gpu.joined else None
    if gpu.share(gpu.others_bytes) < MOSTLY:
        return None
    said = f"Out of GPU memory by a neighbour: other processes took {format_size(gpu.others_bytes)} of {gpu.display_name}."
    sure = gpu.is_full and gpu.share(gpu.others_bytes) >= NEARLY_ALL
    return Sureness.SURE if sure else Sureness.LIKELY, said, ()


def _fit_leak(end: Ending) -> Fit | None:
    """Fit where the engine's memory grew over the whole run; sure with the alarm, where nothing else took memory."""
    gpu = end.full
    if gpu is None or max(gpu.share(gpu.jumped_bytes), gpu.share(gpu.others_bytes)) >= MOSTLY:
        return None
    said = f"Out of GPU memory by a leak: the engine grew until {gpu.display_name} was full."
    if gpu.leak in GROWN:
        is_attributed = gpu.others_bytes is not None and gpu.jumped_bytes is not None
        sure = gpu.leak is LeakState.LEAKING and gpu.is_full and is_attributed
        return Sureness.SURE if sure else Sureness.LIKELY, said, ()
    doubt = "it may be high-water marks that add up, not a leak"
    return (Sureness.POSSIBLE, said, (doubt,)) if gpu.share(gpu.grown_bytes) >= MOSTLY else None


def _fit_burst(end: Ending) -> Fit | None:
    """Fit where the room was lost within the last minutes, or one allocation failed or may have."""
    gpu, failed = end.full, "Out of GPU memory in a burst: an allocation of torch failed."
    if gpu is not None and gpu.share(gpu.others_bytes) < MOSTLY:
        share, alone = gpu.share(gpu.jumped_bytes), gpu.leak not in GROWN and not gpu.between
        is_attributed = gpu.others_bytes is not None and end.seen_seconds >= LONGER_SECONDS
        sure = alone and is_attributed and gpu.is_full and share >= NEARLY_ALL
        said = (
            failed
            if end.ooms
            else f"Out of GPU memory in a burst: {gpu.display_name} was filled within minutes."
        )
        likely = Sureness.LIKELY if share >= MOSTLY or end.ooms else Sureness.POSSIBLE
        return Sureness.SURE if sure else likely, said, ()
    worst = end.worst
    if gpu is not None or not (end.is_over and end.served):
        return None
    if end.ooms:
        return Sureness.LIKELY, failed, ()
    if not end.running or worst is None or (worst.last_room_bytes or 0) >= FEW_BYTES:
        return None
    said = f"Out of GPU memory in a burst, perhaps: {format_size(worst.last_room_bytes or 0)} were left on"
    why = "no figure shows a failed allocation: look for OutOfMemoryError in vLLM's log"
    return Sureness.POSSIBLE, f"{said} {worst.display_name}.", (why,)


def _fit_hang(end: Ending) -> Fit | None:
    """Fit where there was work and no progress; sure where its page showed it."""
    if end.hung_seconds is None or not end.served or is_shutting_down(end):
        return None
    page = "its page did not answer, and its processes ran"
    if end.answered:
        page = "its page still answered; an engine that /pause stopped (development mode) looks the same"
    said = (
        f"A hang: the engine had work and made no progress for {format_duration(end.hung_seconds)}."
    )
    if end.answered and end.idle_seconds is not None and end.hung_seconds < VISIBLE_SECONDS:
        said = "A hang that began idle: its page shows no work, and the engine does not run."
    return Sureness.SURE if end.answered and end.running else Sureness.LIKELY, said, (page,)


def _fit_stop(end: Ending) -> Fit | None:
    """Fit where the server closed its port, its core exited, and the server kept running."""
    if not is_shutting_down(end):
        return None
    said = "A requested shutdown: the server closed its port, stopped its core and waited."
    why = "on shutdown vLLM cuts off running requests and waits until its clients disconnect"
    return Sureness.LIKELY, said, (why,)


def is_shutting_down(end: Ending) -> bool:
    """Return whether the server had closed its port and kept running: an end that was asked for."""
    return end.served and end.shut_seconds is not None and end.shut_seconds >= SHUT_SECONDS


def _fit_idle_end(end: Ending) -> Fit | None:
    """Fit where an idle engine exited as a whole with memory left; the reason is not visible."""
    if (
        end.what is not IncidentKind.ENDED
        or not end.served
        or end.idle_seconds is None
        or end.first
    ):
        return None
    if (
        end.full is not None
        or end.hung_seconds is not None
        or end.unreadable
        or FATAL_XIDS & set(end.xids)
    ):
        return None
    said = "Exited while idle: a stop, a kill and a crash look the same from outside."
    why = f"nothing had run or waited for {format_duration(end.idle_seconds)} when its page was last seen"
    return (
        Sureness.LIKELY if (end.unseen_seconds or 0.0) <= UNSEEN_SECONDS else Sureness.POSSIBLE,
        said,
        (why,),
    )


def _fit_crash(end: Ending) -> Fit | None:
    """Fit where the engine exited at work or in parts, with memory left; sure only with an XID."""
    hung = end.hung_seconds is not None and not (end.xids or end.unreadable)
    if end.full is not None or end.ooms or not end.is_over or hung:
        return None
    room = None if end.worst is None else end.worst.last_room_bytes
    seen = end.unseen_seconds is not None and end.unseen_seconds <= UNSEEN_SECONDS
    at_ease = seen and room is not None and room >= FEW_BYTES
    likely = bool(end.unreadable) or (end.served and at_ease and bool(end.first or end.running))
    crash, crashed = ("A crash", "crashed") if end.served else ("A failed start", "failed to start")
    said = f"{crash}; whether GPU memory ran out is not known."
    if end.unreadable:
        said = f"{crash}: one of its GPUs could no longer be read."
    elif at_ease:
        said = f"Not GPU memory: the engine {crashed} with {format_size(room or 0)} free."
    alike = (
        ()
        if end.xids or end.first or not end.running
        else ("a planned restart during requests looks the same",)
    )
    sure = (
        Sureness.SURE
        if FATAL_XIDS & set(end.xids)
        else Sureness.LIKELY
        if likely
        else Sureness.POSSIBLE
    )
    return sure, said, alike


def _list_evidence(end: Ending) -> Iterator[str]:
    """Yield what every witness reports about the end: driver, allocator, kernel, processes, memory and page."""
    yield from end.unreadable
    yield from (f"the driver reported XID {xid}" for xid in end.xids)
    yield from end.ooms
    if end.reason is ExitReason.OOM_KILLED:
        yield "the kernel counted an out-of-memory kill in the engine's container then"
    for lost in end.first:
        pid = "" if lost.pid is None else f" (pid {lost.pid})"
        yield f"{lost.role.replace('_', ' ')} exited before the others{pid}"
    if end.full is not None:
        yield from _describe_full(end.full, end.seen_seconds)
    elif end.worst is not None:
        yield _describe_room(end.worst)
    if end.running is None:
        yield "its load is not known" if end.served else "its page had not answered yet"
    else:
        usual = "" if end.usual_running is None else f", {end.usual_running:.0f} before"
        ran = f"{end.running:.0f} requests ran when its page was last seen{usual}"
        yield ran if end.running else "no request ran"


def _describe_full(gpu: GpuAtEnd, seconds: float) -> Iterator[str]:
    yield _describe_room(gpu)
    if gpu.grown_bytes is not None:
        yield f"the engine grew by {format_size(gpu.grown_bytes)} in {format_duration(seconds)}"
    if gpu.jumped_bytes is not None:
        yield f"the engine held {format_size(gpu.jumped_bytes)} more than minutes before"
    if gpu.last_other_bytes or gpu.first_other_bytes:
        yield f"others held {format_size(gpu.last_other_bytes or 0)}, {format_size(gpu.first_other_bytes or 0)} before"
    rate = gpu.leak_bytes_per_request
    each = "" if rate is None else f", {format_size(1000 * rate)} per thousand requests"
    yield f"the leak detector said {gpu.leak}{each}"


def _describe_room(gpu: GpuAtEnd) -> str:
    if gpu.last_room_bytes is None:
        return f"the memory left on {gpu.display_name} is not known"
    before = (
        ""
        if gpu.first_room_bytes is None
        else f", {format_size(max(0, gpu.first_room_bytes))} at first"
    )
    return f"{format_size(max(0, gpu.last_room_bytes))} were left on {gpu.display_name}{before}"


CAUSES: Final[tuple[tuple[EndCause, Callable[[Ending], Fit | None]], ...]] = (
    (EndCause.KILLED, _fit_kill),
    (EndCause.NEVER_FITTED, _fit_start),
    (EndCause.NEIGHBOUR, _fit_neighbour),
    (EndCause.LEAK, _fit_leak),
    (EndCause.BURST, _fit_burst),
    (EndCause.HANG, _fit_hang),
    (EndCause.STOPPED, _fit_stop),
    (EndCause.IDLE, _fit_idle_end),
    (EndCause.CRASH, _fit_crash),
)
"""Of equally sure findings, the first counts."""
