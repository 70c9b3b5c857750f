"""The nearest changes that would make it fit, each alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.sizing.estimate import Estimate, estimate, fits
from vllm_headroom.sizing.overhead import outside
from vllm_headroom.sizing.question import Question, unusable

SMALLEST_LENGTH: Final = 256
"""Tokens; a server for shorter sequences is of no use to anyone."""

MOST_RANKS: Final = 64
SIXTEEN_BITS: Final = 2.0
HIGHEST_UTILIZATION: Final = 0.95

Option = tuple[str, str, str, Question]
"""Option, value, price, and what is asked with it."""


class Saving(Struct, frozen=True, kw_only=True):
    """Settings of vLLM, pairs of option and value, and their price."""

    settings: tuple[tuple[str, str], ...]
    price: str


def changes(found: Estimate) -> tuple[Saving, ...]:
    """Return every setting that surely lets vLLM start, with the nearest value that does, the cheapest first.

    Where a shorter `max_model_len` alone is not enough, also each setting that does together with one.
    """
    good: dict[tuple[str, ...], Saving] = {}
    for change, question in (*_shorter(found.question), *_candidates(found.question)):
        kind = tuple(option for option, _ in change.settings)
        if kind not in good and _starts(question):
            good[kind] = change
    return tuple(good.values())


def _starts(question: Question) -> bool:
    found = None if unusable(question) else estimate(question)
    return found is not None and fits(found) is True


def _candidates(question: Question) -> Iterator[tuple[Saving, Question]]:
    enough = any(_starts(shorter) for _, shorter in _shorter(question))
    for option, value, price, changed in (
        *_fewer_sequences(question),
        *_other_share(question),
        *_rounded(question),
        *_wider(question),
    ):
        yield Saving(settings=((option, value),), price=price), changed
        for change, shorter in () if enough or unusable(changed) else _shorter(changed):
            yield (
                Saving(settings=((option, value), *change.settings), price=f"{price}; {change.price}"),
                shorter,
            )


def _shorter(question: Question) -> Iterator[tuple[Saving, Question]]:
    found, asked = estimate(question), question.max_model_len
    longest = (found.longest(1) if found else None) or 0
    if asked is not None and SMALLEST_LENGTH <= longest < asked:
        settings = (("--max-model-len", str(longest)),)
        yield (
            Saving(settings=settings, price="longer requests are refused"),
            replace(question, max_model_len=longest),
        )


def _fewer_sequences(question: Question) -> Iterator[Option]:
    """Yield ever fewer sequences at once: sampling needs room for the logits of each."""
    sequences = question.max_num_seqs // 2
    while sequences >= 1:
        yield "--max-num-seqs", str(sequences), "more requests wait", replace(question, max_num_seqs=sequences)
        sequences //= 2


def _other_share(question: Question) -> Iterator[Option]:
    """Yield a larger share of the card; of a machine's one memory all but what it needs, be that more or less."""
    card = question.gpu_memory_bytes
    if question.unified_memory and card is not None and question.kv_cache_memory_bytes is None:
        share = floor((card - outside(question).high) / card * 100) / 100
        if share > 0:
            price = "the system and vLLM's own processes keep what they need"
            yield "--gpu-memory-utilization", str(share), price, replace(question, gpu_memory_utilization=share)
    elif question.kv_cache_memory_bytes is None and question.gpu_memory_utilization < HIGHEST_UTILIZATION:
        changed = replace(question, gpu_memory_utilization=HIGHEST_UTILIZATION)
        price = "less is left for what lies beside the budget"
        yield "--gpu-memory-utilization", str(HIGHEST_UTILIZATION), price, changed


def _rounded(question: Question) -> Iterator[Option]:
    shape, dtype = question.shape, question.kv_cache_dtype
    if dtype in {"float16", "bfloat16"} or (dtype == "auto" and shape.kv_dtype_bytes >= SIXTEEN_BITS):
        yield "--kv-cache-dtype", "fp8", "keys and values are rounded", replace(question, kv_cache_dtype="fp8")
    if shape.quantisation is None:
        yield "--quantization", "fp8", "weights are rounded", replace(question, shape=shape.quantised("fp8", 1.0))


def _wider(question: Question) -> Iterator[Option]:
    for ranks in range(question.tensor_parallel_size + 1, MOST_RANKS + 1):
        wider = replace(question, tensor_parallel_size=ranks)
        yield "--tensor-parallel-size", str(ranks), f"{wider.gpus} GPUs instead of {question.gpus}", wider
