"""What fits, in numbers: bytes per GPU, tokens and sequences."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.sizing.footprint import bytes_per_token
from vllm_headroom.sizing.kv_layout import KvLayout, kv_layout
from vllm_headroom.sizing.overhead import GRAPHS, LIBRARIES, NOTHING, Range, activations, outside
from vllm_headroom.sizing.question import Question

LONGEST: Final = 2**24
"""Tokens of a sequence, where the model does not say; none takes more."""

SEQUENCES: Final = (1, 4, 16, 64, 256, 1024)
LENGTHS: Final = (1024, 4096, 16384, 65536, 262144)


class Estimate(Struct, frozen=True, kw_only=True):
    """What one GPU needs and has, all in bytes; None where it is not known.

    `kv_cache` is what is left for the KV cache: the low end with the highest overhead; both the same where it is told.
    `engine_bytes_per_token` is one token on all GPUs of an engine together.
    """

    question: Question
    layout: KvLayout
    bytes_per_token: int
    engine_bytes_per_token: int
    weights: int | None
    budget: float | None
    activations: Range | None
    graphs: Range
    outside: Range
    kv_cache: Range | None

    @property
    def overhead(self) -> Range | None:
        """What the budget has to hold besides weights and KV cache."""
        return None if self.activations is None else self.activations + self.graphs + LIBRARIES

    @property
    def blocks(self) -> int | None:
        """The blocks that the KV cache has at least, vLLM's `num_gpu_blocks`; None, too, where nothing is kept."""
        if self.kv_cache is None or not self.layout.block_bytes:
            return None
        return int(max(0.0, self.kv_cache.low) // self.layout.block_bytes)

    @property
    def capacity_tokens(self) -> int | None:
        """The tokens that the KV cache holds at least, counted as vLLM counts them (`get_kv_cache_capacity`).

        Where layers keep a window or a state, that is how many sequences of `max_model_len` fit, times this length.
        """
        if self.blocks is None or self.question.shape.keeps_every_token:
            return None if self.blocks is None else self.blocks * self.layout.block_tokens
        length = self.question.max_model_len
        return None if length is None else self.blocks * length // self.layout.blocks(length)

    def sequence_bytes(self, tokens: int) -> int:
        """Return what a sequence of this many tokens takes."""
        return self.layout.blocks(tokens) * self.layout.block_bytes

    def sequences(self, tokens: int) -> float | None:
        """Return how many sequences of this many tokens fit at once, at least."""
        return None if self.blocks is None else self.blocks / self.layout.blocks(tokens)

    def longest(self, sequences: int) -> int | None:
        """Return the most tokens, up to the model's own limit, that so many sequences can have at once; 0 for none."""
        limits = [limit for limit in (self.question.shape.max_model_len, self.question.max_model_len) if limit]
        ceiling = max(limits, default=LONGEST)
        return None if self.blocks is None else self.layout.longest(self.blocks // sequences, ceiling)


def estimate(question: Question) -> Estimate | None:
    """Return the estimate; None when the KV cache's dtype is not known here."""
    layout, token = _layout(question), _bytes_per_token(question, spread=True)
    engine = _bytes_per_token(question, spread=False)
    if layout is None or token is None or engine is None:
        return None
    found = Estimate(
        question=question,
        layout=layout,
        bytes_per_token=token,
        engine_bytes_per_token=engine,
        weights=question.weights_bytes,
        budget=_budget(question),
        activations=activations(question),
        graphs=NOTHING if question.enforce_eager else GRAPHS,
        outside=outside(question),
        kv_cache=None,
    )
    return replace(found, kv_cache=_kv_cache(found))


def _layout(question: Question) -> KvLayout | None:
    """Return the cut of the cache; a draft's layers, which keep every token too, make its blocks larger."""
    found = kv_layout(
        question.shape,
        block_tokens=question.block_size,
        in_flight_tokens=(question.pipeline_parallel_size + 1) * question.max_num_batched_tokens,
        kv_dtype=question.kv_cache_dtype,
        tensor_parallel=question.tensor_parallel_size,
        pipeline_parallel=question.pipeline_parallel_size,
    )
    draft = _draft_bytes_per_token(question)
    if found is None or draft is None:
        return None
    return replace(found, block_bytes=found.block_bytes + draft * found.block_tokens)


def _bytes_per_token(question: Question, *, spread: bool) -> int | None:
    """Return the bytes of a token on the GPU that holds most, or on all GPUs of an engine together."""
    stages, ranks = question.pipeline_parallel_size, question.tensor_parallel_size
    own = bytes_per_token(
        question.shape,
        kv_dtype=question.kv_cache_dtype,
        tensor_parallel=ranks,
        pipeline_parallel=stages if spread else 1,
    )
    draft = _draft_bytes_per_token(question)
    return None if own is None or draft is None else (own + draft) * (1 if spread else ranks)


def _draft_bytes_per_token(question: Question) -> int | None:
    if question.draft is None:
        return 0
    ranks = question.tensor_parallel_size
    return bytes_per_token(question.draft, kv_dtype=question.kv_cache_dtype, tensor_parallel=ranks)


def _budget(question: Question) -> float | None:
    if question.gpu_memory_bytes is None or question.kv_cache_memory_bytes is not None:
        return None
    return question.gpu_memory_bytes * question.gpu_memory_utilization


def _kv_cache(found: Estimate) -> Range | None:
    told, overhead = found.question.kv_cache_memory_bytes, found.overhead
    if told is not None:
        return Range(low=told, high=told)
    if found.budget is None or found.weights is None or overhead is None:
        return None
    left = found.budget - found.weights
    return Range(low=left - overhead.high, high=left - overhead.low)


def fits(found: Estimate) -> bool | None:
    """Tell whether vLLM starts: one sequence of `max_model_len` fits, and everything is on the card.

    None where it starts with the low end of the estimates and not with the high one, or something is not known: such as
    this type of model, or the weights or the largest input of its encoder.
    """
    if found.question.shape.unknown_type is not None:
        return None
    surely, possibly = _starts(found, worst=True), _starts(found, worst=False)
    if possibly is False:
        return False
    untold = found.question.more_weights or found.question.more_activations
    return True if surely and not untold else None


def _starts(found: Estimate, *, worst: bool) -> bool | None:
    length, room = found.question.max_model_len, found.kv_cache
    needed = found.sequence_bytes(length or 1)
    held = None if room is None else (room.low if worst else room.high) >= needed
    checks = (held, _within_card(found, worst=worst))
    if False in checks:
        return False
    return None if None in checks or length is None else True


def _within_card(found: Estimate, *, worst: bool) -> bool | None:
    """Tell whether budget and what lies outside of it are no more than the card has; vLLM refuses less free memory."""
    card, overhead, told = found.question.gpu_memory_bytes, found.overhead, found.question.kv_cache_memory_bytes
    if card is None:
        return None
    if found.budget is not None:
        return card - found.budget >= found.outside.low
    if found.weights is None or overhead is None or told is None:
        return None
    rest = overhead + found.outside
    return found.weights + told + (rest.high if worst else rest.low) <= card


def longest(found: Estimate) -> list[tuple[int, int]]:
    """Return for several `max_num_seqs` the largest `max_model_len` that all can use up at once; 0 for none."""
    asked = found.question.max_num_seqs
    counts = sorted({count for count in SEQUENCES if count <= asked} | {asked})
    return [(count, length) for count in counts if (length := found.longest(count)) is not None]


def most(found: Estimate) -> list[tuple[int, int]]:
    """Return for several `max_model_len`, up to what one sequence can have, how many can use it up at once."""
    limit, asked = found.longest(1) or 0, found.question.max_model_len
    lengths = sorted({length for length in LENGTHS if length <= limit} | ({asked} if asked is not None else set()))
    return [(length, int(count)) for length in lengths if (count := found.sequences(length)) is not None]
