"""Describe what the engine's log reports about a failure, without quoting the log."""

from collections.abc import Mapping
from typing import Final

from vllm_headroom.model.start import LogFailure, LogTime, Refusal
from vllm_headroom.units import format_instant, format_size
from vllm_headroom.vocabulary import LogFailureKind, StartPhase

PHASE_WORDS: Final[Mapping[StartPhase, str]] = {
    StartPhase.BEGINNING: "before the model was loaded",
    StartPhase.LOADING: "while the weights were loaded",
    StartPhase.PROFILING: "in the profile run",
    StartPhase.CACHE: "while the KV cache and the CUDA graphs were set up",
    StartPhase.READY: "just before it served",
    StartPhase.SERVING: "while it served",
}
"""Words that say when a failure happened, for each phase of the engine's start."""

SENTENCES: Final[Mapping[LogFailureKind, str]] = {
    LogFailureKind.NO_KV_CACHE_MEMORY: "No GPU memory was left for the KV cache",
    LogFailureKind.CONTEXT_TOO_LONG: "The KV cache is too small for one request of full length",
    LogFailureKind.TOO_FEW_STATE_BLOCKS: "The cache has fewer state blocks than --max-num-seqs",
    LogFailureKind.LITTLE_FREE_MEMORY: "Less GPU memory was free than the engine's share",
    LogFailureKind.MEMORY_CHANGED: "Another process freed GPU memory during the profile run",
    LogFailureKind.BLOCK_BEYOND_BATCH: "A block of the cache is larger than a batch",
    LogFailureKind.CONTEXT_BEYOND_MODEL: "--max-model-len is above the model's own limit",
    LogFailureKind.MODEL_UNAVAILABLE: "The model's files could not be read",
    LogFailureKind.TOO_FEW_GPUS: "The engine sees fewer GPUs than its options name",
    LogFailureKind.NCCL: "NCCL failed",
    LogFailureKind.SHARED_MEMORY: "The folder /dev/shm is too small",
    LogFailureKind.CUDA: "CUDA reported an error other than a lack of memory",
    LogFailureKind.DRIVER: "The driver or the GPU cannot be used",
    LogFailureKind.HOST_OUT_OF_MEMORY: "An allocation of host memory was refused",
    LogFailureKind.KILLED: "A process of the engine was killed from outside (SIGKILL)",
    LogFailureKind.HANG: "The engine made no progress until a time limit ended it",
    LogFailureKind.DISK_FULL: "A disk is full",
    LogFailureKind.PORT_IN_USE: "Another process listens on the engine's port",
    LogFailureKind.UNSUPPORTED: "This model, dtype or quantization does not run here",
    LogFailureKind.BAD_OPTION: "The engine does not accept an option",
    LogFailureKind.EXCEPTION: "The engine raised an exception that is none of memory",
    LogFailureKind.ENGINE_DIED: "The engine's core exited, and the log does not say why",
}
"""What each failure means. GPU_OUT_OF_MEMORY is missing, because it is described by its phase and
figures.
"""


def describe_failure(failure: LogFailure) -> str:
    """Return a sentence, without a full stop, that describes a failure with its figures."""
    if failure.kind is LogFailureKind.GPU_OUT_OF_MEMORY:
        when = PHASE_WORDS[failure.phase]
        refusal = failure.refusal
        if refusal is None or refusal.asked_bytes is None:
            return f"GPU memory ran out {when}"
        return f"GPU memory ran out {when}: {describe_refusal(refusal)}"
    sentence = SENTENCES[failure.kind]
    details = _describe_figures(failure)
    return sentence if details is None else f"{sentence}: {details}"


def describe_refusal(refusal: Refusal) -> str:
    """Return the figures of a refused allocation, as far as they are known."""
    gpu = "" if refusal.gpu is None else f" on GPU {refusal.gpu}"
    asked = "an amount not known"
    if refusal.asked_bytes is not None:
        asked = format_size(refusal.asked_bytes)
    parts = [f"{asked} were refused{gpu}"]
    if refusal.free_bytes is not None:
        parts.append(f"{format_size(refusal.free_bytes)} were free")
    if refusal.cached_bytes:
        parts.append(f"{format_size(refusal.cached_bytes)} were unused in torch's own cache")
    if refusal.other_bytes:
        parts.append(f"other processes held {format_size(refusal.other_bytes)}")
    return ", ".join(parts)


def describe_place(failure: LogFailure) -> str:
    """Return where a failure is in the log: line, time, process and code."""
    parts = [f"line {failure.line_number:,}"]
    time = describe_time(failure.time)
    if time is not None:
        parts.append(time)
    if failure.process:
        parts.append(failure.process)
    if failure.frames:
        # The last frame is the one that raised the exception.
        frame = failure.frames[-1]
        parts.append(f"{frame.file}:{frame.line} ({frame.function})")
    elif failure.code_line is not None:
        parts.append(failure.code_line)
    if failure.exception is not None:
        parts.append(failure.exception)
    return ", ".join(parts)


def describe_time(time: LogTime) -> str | None:
    """Return a log line's time: the container runtime's (in UTC), or else the engine's.

    Returns None if the line has no time.
    """
    if time.seconds is not None:
        return format_instant(time.seconds)
    return time.clock


def _describe_figures(failure: LogFailure) -> str | None:
    """Return a message's figures in words, or None if the message has too few figures."""
    figures = failure.figures
    for needed_names, text in DETAILS.get(failure.kind, ()):
        if all(name in figures for name in needed_names):
            sizes = {name: format_size(value) for name, value in figures.items()}
            return text.format(size=sizes, count=figures)
    return None


DETAILS: Final[Mapping[LogFailureKind, tuple[tuple[tuple[str, ...], str], ...]]] = {
    LogFailureKind.LITTLE_FREE_MEMORY: (
        (
            ("gpu", "free_bytes", "requested_bytes"),
            (
                "{size[free_bytes]} were free on GPU {count[gpu]:.0f}, and its share is"
                " {size[requested_bytes]}"
            ),
        ),
        (
            ("free_bytes", "requested_bytes"),
            "{size[free_bytes]} were free, and its share is {size[requested_bytes]}",
        ),
    ),
    LogFailureKind.CONTEXT_TOO_LONG: (
        (
            ("context_tokens", "needed_bytes", "kv_cache_bytes"),
            (
                "{count[context_tokens]:,.0f} tokens take {size[needed_bytes]}, and the cache has"
                " {size[kv_cache_bytes]}"
            ),
        ),
        (
            ("context_tokens", "kv_cache_tokens"),
            (
                "{count[context_tokens]:,.0f} tokens are needed, and the cache holds"
                " {count[kv_cache_tokens]:,.0f}"
            ),
        ),
    ),
    LogFailureKind.TOO_FEW_STATE_BLOCKS: (
        (
            ("state_blocks", "max_num_seqs"),
            "{count[state_blocks]:,.0f} blocks for {count[max_num_seqs]:,.0f} requests",
        ),
    ),
    LogFailureKind.BLOCK_BEYOND_BATCH: (
        (
            ("block_tokens", "batched_tokens"),
            "{count[block_tokens]:,.0f} tokens, and a batch has {count[batched_tokens]:,.0f}",
        ),
    ),
    LogFailureKind.CONTEXT_BEYOND_MODEL: (
        (
            ("context_tokens", "model_tokens"),
            "{count[context_tokens]:,.0f} tokens, and the model has {count[model_tokens]:,.0f}",
        ),
    ),
    LogFailureKind.MODEL_UNAVAILABLE: (
        (("http_status",), "its server answered HTTP {count[http_status]:.0f}"),
    ),
    LogFailureKind.TOO_FEW_GPUS: (
        (
            ("needed_gpus", "available_gpus"),
            "{count[needed_gpus]:.0f} are needed, {count[available_gpus]:.0f} are there",
        ),
    ),
}
"""The texts for each kind of failure, each with the figures that it requires. The first text for
which all figures are known is used.
"""
