"""Find GPU counts and settings that can handle the traffic of a running engine."""

from collections.abc import Iterator
from math import ceil, floor
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom_tools.plan.traffic import Traffic
from vllm_headroom_tools.sizing.cards import CARDS, Card
from vllm_headroom_tools.sizing.checks import can_start
from vllm_headroom_tools.sizing.estimate import MemoryEstimate, estimate_memory
from vllm_headroom_tools.sizing.question import SMALL_CARD, Question, choose_defaults, find_problem

SPARE_FACTOR: Final = 1.25
"""Our choice: a size must handle this multiple of the traffic. The trace does not cover every hour
of a day. `advise` uses a similar rule to propose lengths (LENGTH_MARGIN).
"""

GROUP_SIZES: Final = (1, 2, 4, 8)
"""The values of `--tensor-parallel-size` to try for each card."""

AMD_PREFIX: Final = "MI"
"""The prefix of AMD card names."""

PROPOSED_CARDS: Final = (
    "A10",
    "L4",
    "RTX 4090",
    "RTX 5090",
    "A100-40GB",
    "L40S",
    "A100-80GB",
    "H100",
    "H100 NVL",
    "RTX PRO 6000",
    "H200",
    "B200",
    "B300",
    "MI300X",
    "MI325X",
    "MI355X",
)
"""Our choice: cards that are commonly rented or bought."""


class Size(Struct, frozen=True, kw_only=True):
    """A number of GPUs, and the settings that let them handle the traffic."""

    # For example "2 x L40S".
    name: str
    gpus: int
    # The total memory of all GPUs.
    total_bytes: int
    # vLLM's options and their values.
    settings: tuple[tuple[str, str], ...]
    # The largest possible value of `max_model_len`.
    longest_tokens: int | None
    capacity_tokens: int | None
    # The largest share of the KV cache that the traffic used.
    used_ratio: float | None


class Waste(Struct, frozen=True, kw_only=True):
    """The memory on each GPU that the traffic never used; unknown figures are None."""

    # The part of the KV cache beyond SPARE_FACTOR times the traffic's need.
    kv_cache_bytes: float | None
    # The card's memory that was still free at the highest peak.
    free_bytes: float | None

    @property
    def total_bytes(self) -> float | None:
        """Return the sum of the known figures, or None if neither is known."""
        if self.kv_cache_bytes is None and self.free_bytes is None:
            return None
        return (self.kv_cache_bytes or 0.0) + (self.free_bytes or 0.0)


class Sizing(Struct, frozen=True, kw_only=True):
    """Whether an engine's size suits its traffic, and which other sizes would work."""

    traffic: Traffic
    # The engine with its current settings.
    estimate: MemoryEstimate
    now: Size
    # The concurrent requests and cached tokens that the traffic needs, times SPARE_FACTOR.
    needed_requests: int
    needed_tokens: float
    waste: Waste
    # The engine's GPUs with less memory for vLLM. None if vLLM needs all of it.
    smaller_share: Size | None
    # For each card, the smallest number of GPUs for the traffic, sorted by memory.
    others: tuple[Size, ...]

    @property
    def has_room(self) -> bool:
        """Return whether the engine's settings can handle SPARE_FACTOR times the traffic."""
        return self.now.used_ratio is not None and self.now.used_ratio * SPARE_FACTOR <= 1

    @property
    def smaller(self) -> tuple[Size, ...]:
        """Return the sizes with less memory than the engine has."""
        return tuple(size for size in self.others if size.total_bytes < self.now.total_bytes)

    @property
    def larger(self) -> tuple[Size, ...]:
        """Return the sizes with at least as much memory as the engine has."""
        return tuple(size for size in self.others if size.total_bytes >= self.now.total_bytes)


def judge_sizes(question: Question, traffic: Traffic, typed_batch_tokens: int | None) -> Sizing:
    """Return the sizes that can handle the traffic of an engine with these settings.

    `typed_batch_tokens` is the operator's `--max-num-batched-tokens`. If the value is None, each
    card uses its default.
    """
    estimate = estimate_memory(question)
    used_tokens = traffic.needed_tokens
    if used_tokens is None:
        used_tokens = _estimate_used_tokens(estimate, traffic)
    needed_tokens = SPARE_FACTOR * used_tokens
    needed_requests = ceil(SPARE_FACTOR * traffic.needed_requests)
    settled = replace(
        question,
        max_num_seqs=min(needed_requests, question.max_num_batched_tokens),
    )
    now = replace(_describe_size(estimate, used_tokens), settings=())
    capacity_tokens = traffic.capacity_tokens
    if capacity_tokens:
        used_ratio = used_tokens / capacity_tokens
        now = replace(now, capacity_tokens=int(capacity_tokens), used_ratio=used_ratio)
    trials = Trials(question=settled, needed_tokens=needed_tokens, batch_tokens=typed_batch_tokens)
    return Sizing(
        traffic=traffic,
        estimate=estimate,
        now=now,
        needed_requests=needed_requests,
        needed_tokens=needed_tokens,
        waste=_measure_waste(estimate, traffic, now, needed_tokens),
        smaller_share=_find_smaller_share(trials),
        others=tuple(sorted(_list_others(trials), key=lambda size: size.total_bytes)),
    )


def _estimate_used_tokens(estimate: MemoryEstimate, traffic: Traffic) -> float:
    """Return the largest number of tokens in use, for the planned KV cache."""
    kv_cache = estimate.kv_cache
    if kv_cache is None or not estimate.layout.block_bytes:
        return 0.0
    blocks = max(0.0, kv_cache.high) // estimate.layout.block_bytes
    return traffic.highest_used_ratio * blocks / _count_blocks_per_token(estimate)


def _count_blocks_per_token(estimate: MemoryEstimate) -> float:
    """Return the number of blocks per token of the KV cache, as vLLM counts tokens.

    With sliding-window or state-space layers, the number is for sequences of length
    `max_model_len`.
    """
    length = estimate.question.max_model_len
    if estimate.question.shape.has_every_token or length is None:
        return 1 / estimate.layout.block_tokens
    return estimate.layout.count_blocks(length) / length


def _measure_waste(
    estimate: MemoryEstimate, traffic: Traffic, now: Size, needed_tokens: float
) -> Waste:
    """Return the memory on each GPU that the traffic never used."""
    unused_bytes = None
    if now.capacity_tokens is not None:
        unused_tokens = max(0.0, now.capacity_tokens - needed_tokens)
        token_bytes = _count_blocks_per_token(estimate) * estimate.layout.block_bytes
        unused_bytes = unused_tokens * token_bytes
    return Waste(kv_cache_bytes=unused_bytes, free_bytes=traffic.least_free_bytes)


class Trials(Struct, frozen=True, kw_only=True):
    """Tries sizes for an engine, with as many concurrent requests as the traffic needs."""

    question: Question
    needed_tokens: float
    batch_tokens: int | None

    def holds(self, question: Question) -> bool:
        """Return whether vLLM is certain to start with these settings and to handle the traffic."""
        if find_problem(question):
            return False
        estimate = estimate_memory(question)
        if can_start(estimate) is not True:
            return False
        needed_blocks = self.needed_tokens * _count_blocks_per_token(estimate)
        return estimate.blocks is None or estimate.blocks >= needed_blocks

    def describe(self, question: Question, settings: tuple[tuple[str, str], ...]) -> Size:
        """Return this question as a size for the table, with `settings`."""
        size = _describe_size(estimate_memory(question), self.needed_tokens / SPARE_FACTOR)
        requests = (("--max-num-seqs", str(question.max_num_seqs)),)
        return replace(size, settings=settings + requests)


def _describe_size(estimate: MemoryEstimate, used_tokens: float) -> Size:
    """Return a size for the table, with its capacity and used share."""
    question = estimate.question
    used_ratio = None
    if estimate.blocks:
        used_ratio = used_tokens * _count_blocks_per_token(estimate) / estimate.blocks
    memory_bytes = question.gpu_memory_bytes or 0
    card_name = question.card_name or f"{memory_bytes / 2**30:.2f} GiB"
    return Size(
        name=f"{question.gpus} x {card_name}",
        gpus=question.gpus,
        total_bytes=question.gpus * memory_bytes,
        settings=(),
        longest_tokens=estimate.find_longest(1),
        capacity_tokens=estimate.capacity_tokens,
        used_ratio=used_ratio,
    )


def _find_smaller_share(trials: Trials) -> Size | None:
    """Return the engine's own GPUs with the smallest vLLM budget that can handle the traffic.

    Returns None if no budget below the current one can handle the traffic.
    """
    question = trials.question
    if question.kv_cache_memory_bytes is not None:
        estimate = estimate_memory(question)
        needed_blocks = ceil(trials.needed_tokens * _count_blocks_per_token(estimate))
        cache_bytes = needed_blocks * estimate.layout.block_bytes
        smaller = replace(question, kv_cache_memory_bytes=cache_bytes)
        if cache_bytes >= question.kv_cache_memory_bytes or not trials.holds(smaller):
            return None
        return trials.describe(smaller, (("--kv-cache-memory-bytes", str(cache_bytes)),))
    # If a budget is enough for the traffic, every larger budget is enough too. Therefore, bisection
    # finds the smallest one.
    lowest_percent = 1
    highest_percent = floor(question.gpu_memory_utilization * 100)
    while lowest_percent < highest_percent:
        middle_percent = (lowest_percent + highest_percent) // 2
        if trials.holds(replace(question, gpu_memory_utilization=middle_percent / 100)):
            highest_percent = middle_percent
        else:
            lowest_percent = middle_percent + 1
    share = lowest_percent / 100
    smaller = replace(question, gpu_memory_utilization=share)
    if share >= question.gpu_memory_utilization or not trials.holds(smaller):
        return None
    return trials.describe(smaller, (("--gpu-memory-utilization", f"{share:g}"),))


def _list_others(trials: Trials) -> Iterator[Size]:
    """Yield, for each card, the smallest of GROUP_SIZES that can handle the traffic, if any."""
    for card in _list_alternatives(trials.question.card_name or ""):
        for ranks in GROUP_SIZES:
            question = _move_to_card(trials, card, ranks)
            if _is_same_size(question, trials.question):
                break
            if trials.holds(question):
                yield trials.describe(question, (("--tensor-parallel-size", str(ranks)),))
                break


def _list_alternatives(card_name: str) -> Iterator[Card]:
    """Yield the cards of the same manufacturer, to which an engine could move."""
    is_amd = card_name.startswith(AMD_PREFIX)
    for card in CARDS:
        if card.name != card_name and card.name not in PROPOSED_CARDS:
            continue
        if card.name.startswith(AMD_PREFIX) == is_amd and not card.has_unified_memory:
            yield card


def _is_same_size(question: Question, now: Question) -> bool:
    """Return whether the number of GPUs and their memory are the same as the engine's."""
    return (question.gpus, question.gpu_memory_bytes) == (now.gpus, now.gpu_memory_bytes)


def _move_to_card(trials: Trials, card: Card, ranks: int) -> Question:
    """Return the question for this many GPUs of another card, with that card's defaults."""
    question = trials.question
    defaults = choose_defaults(card.memory_bytes, question.release)
    if card.has_small_defaults:
        defaults = SMALL_CARD
    batch_tokens = trials.batch_tokens or max(
        defaults.max_num_batched_tokens, question.max_num_seqs
    )
    return replace(
        question,
        card_name=card.name,
        card_count=None,
        gpu_memory_bytes=card.memory_bytes,
        unified_memory=False,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=1,
        kv_cache_memory_bytes=None,
        max_num_batched_tokens=batch_tokens,
        measured=None,
    )
