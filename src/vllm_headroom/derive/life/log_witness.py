"""What the engine's own log adds to the causes of an end: it makes one sure, or contradicts it."""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.engine_log import describe_failure, describe_place, describe_refusal
from vllm_headroom.model import Diagnosis, Ending
from vllm_headroom.model.start import LogFailure, Refusal
from vllm_headroom.vocabulary import EndCause, ExitReason, LogFailureKind, Sureness

MEMORY_CAUSES: Final = (
    EndCause.NEIGHBOUR,
    EndCause.OVER_BUDGET,
    EndCause.LEAK,
    EndCause.BURST,
)
"""Causes of an engine at work that ran out of GPU memory. The log shows that it did; the samples
show which of these it was."""

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
"""The causes that the log itself states. A lack of GPU memory, a kill and a bare exception need the
samples too."""


def add_log(end: Ending, diagnoses: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """Return the causes with the log's evidence, the surest first.

    `diagnoses` are the causes by all other evidence, at least one, the surest first.
    """
    if end.log is None:
        return diagnoses
    if end.log.failure is not None:
        return _add_failure(end, end.log.failure, diagnoses)
    if end.log.is_stopped:
        return _state(
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
    """Return the causes with a failure that the log reports."""
    evidence = _cite(failure)
    if failure.kind is LogFailureKind.GPU_OUT_OF_MEMORY:
        if not end.has_served:
            sentence = f"A start that never fitted: {_begin_lower(describe_failure(failure))}."
            return _state(EndCause.NEVER_FITTED, Sureness.SURE, sentence, evidence, diagnoses)
        return _add_refusal(failure, diagnoses)
    if failure.kind is LogFailureKind.KILLED:
        is_by_kernel = end.reason is ExitReason.OOM_KILLED
        sureness = Sureness.SURE if is_by_kernel else Sureness.LIKELY
        sentence = (
            "Killed from outside (SIGKILL): by the kernel, if host memory ran out, or by a person."
        )
        if is_by_kernel:
            # The samples have the kernel's count, which says more than the log.
            sentence = diagnoses[0].sentence
        return _state(EndCause.KILLED, sureness, sentence, evidence, diagnoses)
    cause = SURE_CAUSES.get(failure.kind)
    if cause is not None:
        sentence = f"{describe_failure(failure)}."
        return _state(cause, Sureness.SURE, sentence, evidence, diagnoses)
    # A bare exception may be that of one request, and the end of the core has any cause.
    return _add_evidence(evidence, diagnoses)


def _add_refusal(failure: LogFailure, diagnoses: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """Return the causes of an engine at work of which the log shows that GPU memory ran out.

    Where one of them fits best by the samples, it is sure; where two fit alike, both stay as sure
    as they were. Where none is likely, one allocation was larger than what was left.
    """
    evidence = _cite(failure)
    likely = [
        item
        for item in diagnoses
        if item.cause in MEMORY_CAUSES and item.sureness is not Sureness.POSSIBLE
    ]
    if not likely:
        refusal = failure.refusal or Refusal()
        details = describe_refusal(refusal) if refusal.asked_bytes else "its log says so"
        sentence = f"Out of GPU memory in a burst: {details}."
        return _state(EndCause.BURST, Sureness.SURE, sentence, evidence, diagnoses)
    best = likely[0]
    # Between causes that fit alike the log does not decide.
    rivals = [item for item in likely[1:] if item.sureness is best.sureness]
    sureness = best.sureness if rivals else Sureness.SURE
    stated = _state(best.cause, sureness, best.sentence, evidence, diagnoses)
    return stated + _add_evidence(evidence, rivals)


def _add_silence(end: Ending, diagnoses: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """Return the causes with a log that goes on until the exit and reports no failure.

    An engine that runs out of GPU memory or crashes says so. One that is killed, or whose machine
    ends, does not. So once the run is over, causes of memory are left out. Where that leaves no
    likely cause, the cause is a crash.
    """
    evidence = "its log goes on until then, and has no error and no shutdown"
    cited = _add_evidence(evidence, diagnoses)
    if not end.is_over:
        return cited
    # Such a cause would have been logged: the silence refutes it.
    kept = tuple(item for item in cited if item.cause not in MEMORY_CAUSES)
    if len(kept) == len(cited):
        return cited
    if kept and kept[0].sureness is not Sureness.POSSIBLE:
        return kept
    return _state(
        EndCause.CRASH,
        Sureness.LIKELY,
        "Killed from outside, or crashed without a word: its log has no failed allocation.",
        evidence,
        diagnoses,
    )


def _state(
    cause: EndCause,
    sureness: Sureness,
    sentence: str,
    evidence: str,
    diagnoses: tuple[Diagnosis, ...],
) -> tuple[Diagnosis, ...]:
    """Return the cause that the log supports, with what the samples alone would have said."""
    best = diagnoses[0]
    all_evidence = [evidence]
    if best.cause is cause:
        if best.sureness is not sureness:
            all_evidence.append(f"by the samples alone that was {best.sureness}")
    elif best.cause is not EndCause.UNKNOWN:
        alone = _begin_lower(best.sentence.rstrip("."))
        all_evidence.append(f"the log contradicts the samples, which alone fit: {alone}")
    # The evidence for the same cause, if the samples had it; else for their best one.
    own = [item for item in diagnoses if item.cause is cause]
    all_evidence += (own[0] if own else best).evidence
    return (
        Diagnosis(cause=cause, sureness=sureness, sentence=sentence, evidence=tuple(all_evidence)),
    )


def _add_evidence(evidence: str, diagnoses: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses, each with one more piece of evidence."""
    return tuple(replace(item, evidence=(*item.evidence, evidence)) for item in diagnoses)


def _cite(failure: LogFailure) -> str:
    """Return what the log reports and where, as a sentence without a full stop."""
    return f"its log: {_begin_lower(describe_failure(failure))} ({describe_place(failure)})"


def _begin_lower(sentence: str) -> str:
    """Return a sentence as a part of another; names in capitals and options stay as they are."""
    first_word = sentence.split(" ", 1)[0]
    if first_word.isupper() and first_word not in {"A", "I"}:
        return sentence
    return sentence[:1].lower() + sentence[1:]
