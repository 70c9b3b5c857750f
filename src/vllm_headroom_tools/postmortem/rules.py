"""The rules on the cause of an exit or a stall."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.life.lives import TIGHT_BYTES
from vllm_headroom.trace.flight import IncidentKind
from vllm_headroom.units import GIB, format_duration, format_size
from vllm_headroom.vocabulary import ExitReason, LeakState
from vllm_headroom_tools.postmortem.facts import Circumstances, GpuAtEnd


class EndCause(StrEnum):
    """The cause of an exit or a stall; a closed set, for scripts."""

    LEAK = "out_of_memory_leak"
    BURST = "out_of_memory_burst"
    NEIGHBOUR = "out_of_memory_neighbour"
    KILLED = "killed_by_kernel"
    NEVER_FITTED = "start_never_fitted"
    HANG = "hang"
    CRASH = "crash"
    STOPPED = "orderly_end"
    IDLE = "ended_while_idle"
    UNKNOWN = "unknown"
    NOTHING = "nothing_ended"


class Sureness(StrEnum):
    """How sure a finding is: nothing else fits; it fits best; it cannot be excluded."""

    SURE = "sure"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Diagnosis(Struct, frozen=True, kw_only=True):
    """One cause that fits, in a sentence, with its evidence."""

    cause: EndCause
    sureness: Sureness
    sentence: str
    evidence: tuple[str, ...] = ()


Remedy = tuple[str, str | None]
"""What to do, and a link."""

CONSERVE: Final = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"
TROUBLE: Final = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"
REPORT: Final = "https://github.com/vllm-project/vllm/issues/new/choose"
XIDS: Final = "https://docs.nvidia.com/deploy/xid-errors/index.html"
OOM: Final = "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/"
LOGS: Final = "Read vLLM's log up to the end: kubectl logs --previous"

TODO: Final[dict[EndCause, tuple[Remedy, ...]]] = {
    EndCause.LEAK: (
        ("No option fixes a leak: restart before the GPU is full, and upgrade vLLM", None),
        ("Report it to vLLM, with the figures above", REPORT),
        ("Have HeadroomOutOfMemorySoon page somebody next time (alerts/runbooks/HeadroomOutOfMemorySoon.md)", None),
    ),
    EndCause.BURST: (
        ("Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs", CONSERVE),
        ("`vllm-headroom advise` on this file computes the values", None),
    ),
    EndCause.NEIGHBOUR: (
        ("Give the engine a dedicated GPU, or move the other process away", None),
        ("Until then leave room for it: a lower --gpu-memory-utilization", CONSERVE),
    ),
    EndCause.KILLED: (
        ("Raise the memory limit of vLLM's container, or lower what it keeps on the host", OOM),
        ("Find out what was killed: dmesg -T | grep -i 'killed process'", None),
    ),
    EndCause.NEVER_FITTED: (
        ("Run `vllm-headroom preflight` and `vllm-headroom plan` before the next start", None),
        (
            "Lower --gpu-memory-utilization where others hold memory, else raise --tensor-parallel-size",
            CONSERVE,
        ),
    ),
    EndCause.HANG: (
        ("Take a stack of every process before the restart: py-spy dump --pid PID", TROUBLE),
        ("Look for an XID and for NCCL in the logs", XIDS),
    ),
    EndCause.CRASH: ((LOGS, TROUBLE), ("Look for an XID in the kernel's log: dmesg -T | grep -i xid", XIDS)),
    EndCause.STOPPED: (
        ("Running requests were cut off: drain the engine first, or give vLLM --shutdown-timeout", None),
    ),
    EndCause.IDLE: (
        ("Nothing, if it was planned: see kubectl get events", None),
        ("Look at its exit code (kubectl describe pod): 0 or 143 is a stop, 137 a kill", None),
    ),
    EndCause.UNKNOWN: ((LOGS, TROUBLE),),
    EndCause.NOTHING: (),
}


MOSTLY: Final = 0.5
NEARLY_ALL: Final = 0.8
"""Growth that took half of the lost room fits best; with four fifths, no other cause can."""

FEW_BYTES: Final = GIB
"""A failed allocation takes no memory; a large one is a gigabyte (the logits of 2,048 tokens)."""

LONGER_SECONDS: Final = 600.0
"""A shorter record does not show the memory before a burst."""

OTHERS_BYTES: Final = GIB
"""Less is only CUDA contexts of others."""

FAILED: Final = "Out of GPU memory in a burst: an allocation of torch failed."

LITTLE_RATIO: Final = 0.08
"""Less of the GPU than vLLM leaves free by default: the start had taken all that it could."""


def diagnose_start(facts: Circumstances) -> Diagnosis | None:
    """Fit where an engine exited before it served, with little left or with others on its GPU."""
    gpu = facts.worst
    if facts.what is not IncidentKind.ENDED or facts.served or gpu is None or gpu.last_room_bytes is None:
        return None
    others = gpu.last_other_bytes or 0
    little = gpu.total_bytes is not None and gpu.last_room_bytes < LITTLE_RATIO * gpu.total_bytes
    if others < OTHERS_BYTES and not little:
        return None
    holders = (f"others held {format_size(others)} of it",) if others >= OTHERS_BYTES else ()
    return Diagnosis(
        cause=EndCause.NEVER_FITTED,
        sureness=Sureness.SURE if gpu.last_room_bytes <= TIGHT_BYTES else Sureness.LIKELY,
        sentence=f"A start that never fitted: it exited after {format_duration(facts.seen_seconds)}, before it served.",
        evidence=(describe_room(gpu), *holders),
    )


def diagnose_leak(facts: Circumstances) -> Diagnosis | None:
    """Fit where the engine's memory grew over the whole run; sure with the alarm, where nothing else took memory."""
    gpu = _find_full_gpu(facts)
    if gpu is None or gpu.share(gpu.jumped_bytes) >= MOSTLY or gpu.share(gpu.others_bytes) >= MOSTLY:
        return None
    says = gpu.leak in (LeakState.LEAKING, LeakState.GROWING)
    if not says and gpu.share(gpu.grown_bytes) < MOSTLY:
        return None
    told_apart = gpu.others_bytes is not None and gpu.jumped_bytes is not None
    sure = gpu.leak is LeakState.LEAKING and gpu.is_full and told_apart
    return Diagnosis(
        cause=EndCause.LEAK,
        sureness=Sureness.SURE if sure else Sureness.LIKELY if says else Sureness.POSSIBLE,
        sentence=f"Out of GPU memory by a leak: the engine grew until {gpu.called} was full.",
        evidence=tuple(_list_leak_evidence(facts, gpu)),
    )


def diagnose_neighbour(facts: Circumstances) -> Diagnosis | None:
    """Fit where others took most of the lost room, or, where that is unknown, where another process appeared."""
    gpu = _find_full_gpu(facts)
    if gpu is not None and gpu.others_bytes is None and gpu.joined:
        return _diagnose_newcomer(gpu)
    if gpu is None or gpu.others_bytes is None or gpu.share(gpu.others_bytes) < MOSTLY:
        return None
    sure = gpu.is_full and gpu.share(gpu.others_bytes) >= NEARLY_ALL
    return Diagnosis(
        cause=EndCause.NEIGHBOUR,
        sureness=Sureness.SURE if sure else Sureness.LIKELY,
        sentence=f"Out of GPU memory by a neighbour: other processes took"
        f" {format_size(gpu.others_bytes)} of {gpu.called}.",
        evidence=(
            describe_room(gpu),
            f"others held {format_size(gpu.last_other_bytes or 0)}, {format_size(gpu.first_other_bytes or 0)} before",
            *facts.ooms,
        ),
    )


def _diagnose_newcomer(gpu: GpuAtEnd) -> Diagnosis:
    return Diagnosis(
        cause=EndCause.NEIGHBOUR,
        sureness=Sureness.LIKELY,
        sentence=f"Out of GPU memory by a neighbour: another process had appeared on {gpu.called}.",
        evidence=(
            describe_room(gpu),
            "its memory is not known: the sidecar could not attribute memory to processes",
        ),
    )


def diagnose_burst(facts: Circumstances) -> Diagnosis | None:
    """Fit where the room was lost within the last minutes, or one allocation may have failed."""
    gpu = _find_full_gpu(facts)
    if gpu is None:
        return _diagnose_possible_burst(facts)
    share = gpu.share(gpu.jumped_bytes)
    if gpu.share(gpu.others_bytes) >= MOSTLY:
        return None
    told_apart = gpu.others_bytes is not None and not gpu.between
    alone = gpu.leak not in (LeakState.LEAKING, LeakState.GROWING) and told_apart
    sure = alone and gpu.is_full and share >= NEARLY_ALL and facts.seen_seconds >= LONGER_SECONDS
    return Diagnosis(
        cause=EndCause.BURST,
        sureness=Sureness.SURE if sure else Sureness.LIKELY if share >= MOSTLY or facts.ooms else Sureness.POSSIBLE,
        sentence=FAILED if facts.ooms else f"Out of GPU memory in a burst: {gpu.called} was filled within minutes.",
        evidence=tuple(_list_burst_evidence(facts, gpu)),
    )


def _find_full_gpu(facts: Circumstances) -> GpuAtEnd | None:
    return facts.full if facts.what is IncidentKind.ENDED and facts.served else None


def _diagnose_possible_burst(facts: Circumstances) -> Diagnosis | None:
    gpu = facts.worst
    if facts.what is not IncidentKind.ENDED or not facts.served:
        return None
    if facts.ooms:
        return Diagnosis(cause=EndCause.BURST, sureness=Sureness.LIKELY, sentence=FAILED, evidence=facts.ooms)
    if not facts.running or gpu is None:
        return None
    if gpu.last_room_bytes is None or gpu.last_room_bytes >= FEW_BYTES:
        return None
    return Diagnosis(
        cause=EndCause.BURST,
        sureness=Sureness.POSSIBLE,
        sentence=f"Out of GPU memory in a burst, perhaps: {format_size(gpu.last_room_bytes)} were"
        f" left on {gpu.called}.",
        evidence=(
            describe_room(gpu),
            "no figure shows a failed allocation: look for OutOfMemoryError in vLLM's log",
        ),
    )


def _list_leak_evidence(facts: Circumstances, gpu: GpuAtEnd) -> Iterator[str]:
    yield describe_room(gpu)
    if gpu.grown_bytes is not None:
        yield f"the engine grew by {format_size(gpu.grown_bytes)} in {format_duration(facts.seen_seconds)}"
    if gpu.leak in (LeakState.LEAKING, LeakState.GROWING):
        yield f"the leak detector said {gpu.leak}"
    else:
        yield f"the leak detector said {gpu.leak}, so it may be high-water marks that add up, not a leak"
    if gpu.leaked is not None and gpu.leaked.bytes_per_request is not None:
        yield f"{format_size(1000 * gpu.leaked.bytes_per_request)} per thousand requests"
    yield from facts.ooms


def _list_burst_evidence(facts: Circumstances, gpu: GpuAtEnd) -> Iterator[str]:
    yield from facts.ooms
    yield describe_room(gpu)
    yield from facts.order
    if gpu.jumped_bytes is not None:
        yield f"the engine held {format_size(gpu.jumped_bytes)} more than minutes before"
    if facts.running is not None:
        usual = "" if facts.usual_running is None else f", {facts.usual_running:.0f} before"
        yield f"{facts.running:.0f} requests ran{usual}"
    yield f"the leak detector said {gpu.leak}"


def describe_room(gpu: GpuAtEnd) -> str:
    """Return the room that a GPU had left."""
    if gpu.last_room_bytes is None:
        return f"the memory left on {gpu.called} is not known"
    before = "" if gpu.first_room_bytes is None else f", {format_size(max(0, gpu.first_room_bytes))} at first"
    return f"{format_size(max(0, gpu.last_room_bytes))} were left on {gpu.called}{before}"


FATAL_XIDS: Final = frozenset({13, 31, 48, 62, 74, 79, 94, 95, 119, 120})
"""Errors that end the program, by NVIDIA's table; 43 and 45 can follow its exit, 63 and 64 may leave it running."""

UNSEEN_SECONDS: Final = 15.0
"""Memory fills within seconds: after a longer gap the engine may have run out of it."""

SHUT_SECONDS: Final = 15.0
"""A server whose core has died exits within seconds and refuses its page until then."""

ANSWERED: Final = "its page still answered; an engine that /pause stopped (development mode) looks the same"


def diagnose_kill(facts: Circumstances) -> Diagnosis | None:
    """Fit where the kernel counted an out-of-memory kill in the engine's container at this exit."""
    if facts.reason is not ExitReason.OOM_KILLED:
        return None
    return Diagnosis(
        cause=EndCause.KILLED,
        sureness=Sureness.SURE,
        sentence="Killed by the kernel: host memory ran out, not GPU memory.",
        evidence=(
            "the kernel counted an out-of-memory kill in the engine's container then",
            *facts.order,
            describe_work(facts),
        ),
    )


def diagnose_hang(facts: Circumstances) -> Diagnosis | None:
    """Fit where there was work and no progress; sure where its page showed it."""
    if facts.hung_seconds is None or not facts.served or _is_shutting_down(facts):
        return None
    page = ANSWERED if facts.answered else "its page did not answer, and its processes ran"
    return Diagnosis(
        cause=EndCause.HANG,
        sureness=Sureness.SURE if facts.answered and facts.running else Sureness.LIKELY,
        sentence=f"A hang: the engine had work and made no progress for {format_duration(facts.hung_seconds)}.",
        evidence=(*facts.lost, describe_work(facts), page),
    )


def diagnose_crash(facts: Circumstances) -> Diagnosis | None:
    """Fit where the engine exited at work or in parts, with memory left; sure only with an XID."""
    stalled = facts.what is IncidentKind.STALLED and not facts.first
    hung = facts.hung_seconds is not None and not (facts.xids or facts.lost)
    if facts.full is not None or facts.ooms or stalled or hung:
        return None
    fatal = FATAL_XIDS & set(facts.xids)
    room = None if facts.worst is None else facts.worst.last_room_bytes
    seen = facts.unseen_seconds is not None and facts.unseen_seconds <= UNSEEN_SECONDS
    at_ease = seen and room is not None and room >= FEW_BYTES
    likely = bool(facts.lost) or (facts.served and at_ease and bool(facts.first or facts.running))
    crash, crashed = ("A crash", "crashed") if facts.served else ("A failed start", "failed to start")
    sentence = f"{crash}; whether GPU memory ran out is not known."
    if facts.lost:
        sentence = f"{crash}: one of its GPUs could no longer be read."
    elif at_ease:
        sentence = f"Not GPU memory: the engine {crashed} with {format_size(room or 0)} free."
    return Diagnosis(
        cause=EndCause.CRASH,
        sureness=Sureness.SURE if fatal else Sureness.LIKELY if likely else Sureness.POSSIBLE,
        sentence=sentence,
        evidence=tuple(_list_crash_evidence(facts)),
    )


def diagnose_stop(facts: Circumstances) -> Diagnosis | None:
    """Fit where the server closed its port, its core exited, and the server kept running."""
    if not _is_shutting_down(facts):
        return None
    return Diagnosis(
        cause=EndCause.STOPPED,
        sureness=Sureness.LIKELY,
        sentence="A requested shutdown: the server closed its port, stopped its core and waited.",
        evidence=(
            describe_work(facts),
            "on shutdown vLLM cuts off running requests and waits until its clients disconnect",
        ),
    )


def diagnose_idle_end(facts: Circumstances) -> Diagnosis | None:
    """Fit where an idle engine exited as a whole with memory left; the reason is not visible."""
    if facts.what is not IncidentKind.ENDED or not facts.served or facts.idle_seconds is None or facts.first:
        return None
    if facts.full is not None or facts.hung_seconds is not None or facts.lost or FATAL_XIDS & set(facts.xids):
        return None
    gpu = facts.worst
    return Diagnosis(
        cause=EndCause.IDLE,
        sureness=Sureness.LIKELY if (facts.unseen_seconds or 0.0) <= UNSEEN_SECONDS else Sureness.POSSIBLE,
        sentence="Exited while idle: a stop, a kill and a crash look the same from outside.",
        evidence=(
            f"nothing had run or waited for {format_duration(facts.idle_seconds)} when its page was last seen",
            *(() if gpu is None else (describe_room(gpu),)),
        ),
    )


def _is_shutting_down(facts: Circumstances) -> bool:
    return facts.served and facts.shut_seconds is not None and facts.shut_seconds >= SHUT_SECONDS


def _list_crash_evidence(facts: Circumstances) -> Iterator[str]:
    yield from facts.lost
    for xid in facts.xids:
        yield f"the driver reported XID {xid}"
    yield from facts.order
    yield describe_work(facts)
    if facts.worst is not None:
        yield describe_room(facts.worst)
    if not facts.xids and not facts.first and facts.running:
        yield "a planned restart during requests looks the same"


def describe_work(facts: Circumstances) -> str:
    """Return the load on the engine's last page."""
    if facts.running is None:
        return "its load is not known" if facts.served else "its page had not answered yet"
    return f"{facts.running:.0f} requests ran when its page was last seen" if facts.running else "no request ran"
