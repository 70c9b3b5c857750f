"""Rules on GPU memory that ran out, at the start or while the engine served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.postmortem.facts import Circumstances, GpuAtEnd
from vllm_headroom.commands.postmortem.finding import Diagnosis, EndCause, Sureness
from vllm_headroom.derive.life.lives import TIGHT_BYTES
from vllm_headroom.trace.incidents import What
from vllm_headroom.units import GIB, duration, size
from vllm_headroom.vocabulary import LeakState

MOSTLY: Final = 0.5
NEARLY_ALL: Final = 0.8
"""Whose growth took half of the lost room is the cause that fits best; with four fifths no other can be it."""

FEW_BYTES: Final = GIB
"""An allocation that fails takes nothing: one of a gigabyte is a large one (the logits of 2,048 tokens)."""

LONGER_SECONDS: Final = 600.0
"""Of an engine seen for less it is not known how it stood before a burst."""

OTHERS_BYTES: Final = GIB
"""Others that hold less are contexts."""

LITTLE_RATIO: Final = 0.08
"""Less of the card than what vLLM leaves free by default: the start went as far as it could."""


def never_fitted(facts: Circumstances) -> Diagnosis | None:
    """Fit where an engine ended before it served, with little left, or with others on its GPU."""
    gpu = facts.worst
    if facts.what is not What.ENDED or facts.served or gpu is None or gpu.last_room_bytes is None:
        return None
    others = gpu.last_other_bytes or 0
    little = gpu.total_bytes is not None and gpu.last_room_bytes < LITTLE_RATIO * gpu.total_bytes
    if others < OTHERS_BYTES and not little:
        return None
    told = (f"others held {size(others)} of it",) if others >= OTHERS_BYTES else ()
    return Diagnosis(
        cause=EndCause.NEVER_FITTED,
        sureness=Sureness.SURE if gpu.last_room_bytes <= TIGHT_BYTES else Sureness.LIKELY,
        sentence=f"A start that never fitted: it ended after {duration(facts.seen_seconds)} and had not served.",
        evidence=(left(gpu), *told),
    )


def leak(facts: Circumstances) -> Diagnosis | None:
    """Fit where the engine's memory grew over all its time; sure by the alarm, where nothing else took it."""
    gpu = _ran_out(facts)
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
        evidence=tuple(_leaked(facts, gpu)),
    )


def neighbour(facts: Circumstances) -> Diagnosis | None:
    """Fit where what others took is most of the room that was lost, or, where that is not told, where one came."""
    gpu = _ran_out(facts)
    if gpu is not None and gpu.others_bytes is None and gpu.joined:
        return _joined(gpu)
    if gpu is None or gpu.others_bytes is None or gpu.share(gpu.others_bytes) < MOSTLY:
        return None
    sure = gpu.is_full and gpu.share(gpu.others_bytes) >= NEARLY_ALL
    return Diagnosis(
        cause=EndCause.NEIGHBOUR,
        sureness=Sureness.SURE if sure else Sureness.LIKELY,
        sentence=f"Out of GPU memory by a neighbour: other processes took {size(gpu.others_bytes)} of {gpu.called}.",
        evidence=(
            left(gpu),
            f"others held {size(gpu.last_other_bytes or 0)}, {size(gpu.first_other_bytes or 0)} before",
        ),
    )


def _joined(gpu: GpuAtEnd) -> Diagnosis:
    return Diagnosis(
        cause=EndCause.NEIGHBOUR,
        sureness=Sureness.LIKELY,
        sentence=f"Out of GPU memory by a neighbour: another process had come to {gpu.called}.",
        evidence=(left(gpu), "what it took is not told: the sidecar could not tell the processes on the GPU apart"),
    )


def burst(facts: Circumstances) -> Diagnosis | None:
    """Fit where the room went within the last minutes, or where little enough was left for one allocation to fail."""
    gpu = _ran_out(facts)
    if gpu is None:
        return _perhaps(facts)
    share = gpu.share(gpu.jumped_bytes)
    if gpu.share(gpu.others_bytes) >= MOSTLY:
        return None
    told_apart = gpu.others_bytes is not None and not gpu.between
    alone = gpu.leak not in (LeakState.LEAKING, LeakState.GROWING) and told_apart
    sure = alone and gpu.is_full and share >= NEARLY_ALL and facts.seen_seconds >= LONGER_SECONDS
    return Diagnosis(
        cause=EndCause.BURST,
        sureness=Sureness.SURE if sure else Sureness.LIKELY if share >= MOSTLY else Sureness.POSSIBLE,
        sentence=f"Out of GPU memory in a burst: {gpu.called} was filled within minutes.",
        evidence=tuple(_burst(facts, gpu)),
    )


def _ran_out(facts: Circumstances) -> GpuAtEnd | None:
    return facts.full if facts.what is What.ENDED and facts.served else None


def _perhaps(facts: Circumstances) -> Diagnosis | None:
    gpu = facts.worst
    if facts.what is not What.ENDED or not facts.served:
        return None
    if facts.ooms:
        text = "Out of GPU memory in a burst: torch was refused what it asked for."
        return Diagnosis(cause=EndCause.BURST, sureness=Sureness.LIKELY, sentence=text, evidence=facts.ooms)
    if not facts.running or gpu is None:
        return None
    if gpu.last_room_bytes is None or gpu.last_room_bytes >= FEW_BYTES:
        return None
    return Diagnosis(
        cause=EndCause.BURST,
        sureness=Sureness.POSSIBLE,
        sentence=f"Out of GPU memory in a burst, perhaps: {size(gpu.last_room_bytes)} were left on {gpu.called}.",
        evidence=(left(gpu), "an allocation that fails shows in no figure: vLLM's log has OutOfMemoryError then"),
    )


def _leaked(facts: Circumstances, gpu: GpuAtEnd) -> Iterator[str]:
    yield left(gpu)
    if gpu.grown_bytes is not None:
        yield f"the engine grew by {size(gpu.grown_bytes)} in {duration(facts.seen_seconds)}"
    if gpu.leak in (LeakState.LEAKING, LeakState.GROWING):
        yield f"the leak detector said {gpu.leak}"
    else:
        yield f"the leak detector said {gpu.leak}, so it may be high-water marks that add up, and no leak"
    if gpu.leaked is not None and gpu.leaked.bytes_per_request is not None:
        yield f"{size(1000 * gpu.leaked.bytes_per_request)} per thousand requests"


def _burst(facts: Circumstances, gpu: GpuAtEnd) -> Iterator[str]:
    yield left(gpu)
    if gpu.jumped_bytes is not None:
        yield f"the engine took {size(gpu.jumped_bytes)} more than minutes before"
    if facts.running is not None:
        usual = "" if facts.usual_running is None else f", {facts.usual_running:.0f} before"
        yield f"{facts.running:.0f} requests ran{usual}"
    yield f"the leak detector said {gpu.leak}"


def left(gpu: GpuAtEnd) -> str:
    """Return how much room a GPU had left."""
    if gpu.last_room_bytes is None:
        return f"what was left on {gpu.called} is not known"
    before = "" if gpu.first_room_bytes is None else f", {size(max(0, gpu.first_room_bytes))} at first"
    return f"{size(max(0, gpu.last_room_bytes))} were left on {gpu.called}{before}"
