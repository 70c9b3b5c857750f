"""vLLM's checks during a start, in their order, with the results for an estimate."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.units import GIB, format_gib
from vllm_headroom_tools.sizing.assumptions import Range
from vllm_headroom_tools.sizing.estimate import MemoryEstimate


class CheckName(StrEnum):
    """The names of the checks."""

    GPUS = "gpus"
    MODEL_LENGTH = "model_length"
    ALIGNED_BLOCK = "aligned_block"
    HOST_MEMORY = "host_memory"
    FREE_MEMORY = "free_memory"
    WEIGHTS = "weights"
    PROFILE = "profile"
    CACHE_BLOCKS = "cache_blocks"
    LONGEST_SEQUENCE = "longest_sequence"
    STATE_BLOCKS = "state_blocks"
    SAMPLER_WARMUP = "sampler_warmup"
    CARD = "card"


class StartCheck(Struct, frozen=True, kw_only=True):
    """One check of a start, and its result."""

    name: CheckName
    # None if a figure is unknown or only the lower bounds pass the check.
    passes: bool | None
    # Why the check fails, or may fail.
    problem: str
    # vLLM's error message, or None if vLLM itself does not refuse to start.
    refusal: str | None = None


CUDA_OUT_OF_MEMORY: Final = "torch.OutOfMemoryError: CUDA out of memory."
"""The beginning of torch's error message when an allocation on the card fails."""


def check_start(estimate: MemoryEstimate) -> list[StartCheck]:
    """Return the checks that this start reaches, in vLLM's order.

    vLLM stops at the first check that fails. The checks of host memory and unified memory are not
    made by vLLM itself. If one of these checks fails, the kernel kills the processes, or the
    machine hangs.
    """
    return [
        *_check_gpus(estimate),
        *_check_model_length(estimate),
        *_check_aligned_block(estimate),
        *_check_host(estimate),
        *_check_free_memory(estimate),
        *_check_weights(estimate),
        *_check_profile(estimate),
        *_check_cache_blocks(estimate),
        *_check_longest_sequence(estimate),
        *_check_state_blocks(estimate),
        *_check_sampler_warmup(estimate),
        *_check_card(estimate),
    ]


def find_failed_check(estimate: MemoryEstimate) -> StartCheck | None:
    """Return the first check that is certain to fail, or None if no check is."""
    return next((check for check in check_start(estimate) if check.passes is False), None)


def can_start(estimate: MemoryEstimate) -> bool | None:
    """Return whether vLLM starts, that is, whether it passes all checks.

    Returns None if the start passes only with the estimates' lower bounds. Also returns None if
    something is unknown, such as the model type or the weights.
    """
    question = estimate.question
    if question.shape.unknown_type is not None:
        return None
    # The checks are in vLLM's order, because its log shows the first check that fails.
    answers = [check.passes for check in check_start(estimate)]
    if False in answers:
        return False
    # All checks pass here. A check may fail if uncounted weights or inputs use up the remaining
    # memory.
    if question.has_uncounted_weights or question.has_uncounted_activations:
        return None
    if question.has_unknown_draft or question.max_model_len is None:
        return None
    if question.gpu_memory_bytes is None or None in answers:
        return None
    return True


def is_available(needed: Range, available: Range) -> bool | None:
    """Return whether enough memory is available, or None if that depends on the bounds."""
    if needed.low > available.high:
        return False
    if needed.high > available.low:
        return None
    return True


def _write_gib(memory_bytes: float) -> str:
    """Return a size as formatted in vLLM's messages."""
    return f"{memory_bytes / GIB:.2f}"


def _check_gpus(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that each rank has a GPU, if the number of GPUs is given.

    Sources: config/parallel.py, and v1/worker/gpu_worker.py, `init_device`.
    """
    question = estimate.question
    card_count = question.card_count
    if card_count is None:
        return
    ranks = question.tensor_parallel_size * question.pipeline_parallel_size
    refusal = (
        f"World size ({ranks}) is larger than the number of available GPUs ({card_count}) in this"
        " node."
    )
    if ranks <= card_count:
        refusal = f"DP adjusted local rank {card_count} is out of bounds"
    yield StartCheck(
        name=CheckName.GPUS,
        passes=question.gpus <= card_count,
        problem=f"it needs {question.gpus} GPUs, and --gpu names {card_count}",
        refusal=refusal,
    )


def _check_model_length(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that `max_model_len` is not longer than the model's own limit (config/model.py)."""
    length = estimate.question.max_model_len
    limit = estimate.question.shape.max_model_len
    # Without a length, vLLM uses the model's own limit, which passes the check.
    if length is None or limit is None:
        return
    yield StartCheck(
        name=CheckName.MODEL_LENGTH,
        passes=length <= limit,
        problem=f"the model takes at most {limit:,} tokens, and --max-model-len is {length:,}",
        refusal=(
            f"User-specified max_model_len ({length}) is greater than the derived max_model_len"
            f" ({limit})"
        ),
    )


def _check_aligned_block(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that a batch can hold the tokens of a block.

    A block is as large as a state. Source: vLLM up to 0.26, config/vllm.py, `validate_block_size`
    with `mamba_cache_mode` "align".
    """
    question = estimate.question
    has_check = question.release.has_aligned_block_check and question.has_prefix_states
    if not has_check or not question.shape.stateful_layers:
        return
    block_tokens = estimate.layout.block_tokens
    batch_tokens = question.max_num_batched_tokens
    yield StartCheck(
        name=CheckName.ALIGNED_BLOCK,
        passes=block_tokens <= batch_tokens,
        problem=(
            f"with prefix caching a block of this model has {block_tokens:,} tokens,"
            f" and a batch at most {batch_tokens:,}"
        ),
        refusal=(
            f"In Mamba cache align mode, block_size ({block_tokens}) must be <="
            f" max_num_batched_tokens ({batch_tokens})."
        ),
    )


def _check_host(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that the host has room for vLLM's processes, if the host's memory is given."""
    host_bytes = estimate.question.host_memory_bytes
    if host_bytes is None:
        return
    host = Range(low=host_bytes, high=host_bytes)
    needed = format_gib(estimate.host.low)
    yield StartCheck(
        name=CheckName.HOST_MEMORY,
        passes=is_available(estimate.host, host),
        problem=f"vLLM's processes need at least {needed} of the host's {format_gib(host_bytes)}",
    )


def _check_free_memory(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that vLLM's share of the card is free (v1/worker/utils.py, `request_memory`).

    With unified memory, `_check_card` later checks the memory that the machine itself needs.
    """
    question = estimate.question
    visible = estimate.visible
    if visible is None or estimate.budget_bytes is None or question.unified_memory:
        return
    missing = estimate.assumptions.missing_at_start.range
    ratio = question.gpu_memory_utilization
    # Our choice: the check uses the lower bound. A note warns that more may be needed.
    passes = visible.high * (1 - ratio) >= missing.low
    requested_bytes = visible.high * ratio
    free_bytes = visible.high - missing.low
    yield StartCheck(
        name=CheckName.FREE_MEMORY,
        passes=passes,
        problem=(
            f"the budget leaves {format_gib(visible.high - requested_bytes)} of the card,"
            f" and {format_range(missing)} GiB of it are not free at the start"
        ),
        refusal=(
            f"Free memory on device cuda:0 ({_write_gib(free_bytes)}/{_write_gib(visible.high)}"
            f" GiB) on startup is less than desired GPU memory utilization ({ratio:g},"
            f" {_write_gib(requested_bytes)} GiB)."
        ),
    )


def _check_weights(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that the card can hold the weights, regardless of the budget."""
    visible = estimate.visible
    weights_bytes = estimate.weights_bytes
    if visible is None or weights_bytes is None:
        return
    weights = Range(low=weights_bytes, high=weights_bytes)
    needed = weights + estimate.assumptions.missing_at_start.range
    yield StartCheck(
        name=CheckName.WEIGHTS,
        passes=is_available(needed, visible),
        problem=(
            f"the weights take {format_gib(weights_bytes)} of each GPU,"
            f" which has {format_gib(visible.high)}"
        ),
        refusal=CUDA_OUT_OF_MEMORY,
    )


def _check_profile(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that the card can hold the profile run's memory in addition to the weights."""
    visible = estimate.visible
    weights_bytes = estimate.weights_bytes
    activations = estimate.activations
    if visible is None or weights_bytes is None or activations is None:
        return
    weights = Range(low=weights_bytes, high=weights_bytes)
    assumptions = estimate.assumptions
    # Memory in use before the start is not available to the profile run either.
    needed = weights + assumptions.missing_at_start.range + activations
    yield StartCheck(
        name=CheckName.PROFILE,
        passes=is_available(needed, visible),
        problem=(
            f"weights and activations take at least {format_gib(weights_bytes + activations.low)}"
            f" of each GPU, which has {format_gib(visible.high)}"
        ),
        refusal=CUDA_OUT_OF_MEMORY,
    )


def _check_cache_blocks(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that the budget leaves any memory for the KV cache (v1/core/kv_cache_utils.py)."""
    kv_cache = estimate.kv_cache
    overhead = estimate.overhead
    budget_bytes = estimate.budget_bytes
    if kv_cache is None or overhead is None or budget_bytes is None:
        return
    needed = format_gib((estimate.weights_bytes or 0) + overhead.low)
    yield StartCheck(
        name=CheckName.CACHE_BLOCKS,
        # One byte is enough for this check; `_check_longest_sequence` requires more.
        passes=is_available(Range(low=1, high=1), kv_cache),
        problem=(
            f"weights and activations need at least {needed} of each GPU,"
            f" and the budget is {format_gib(budget_bytes)}"
        ),
        refusal="No available memory for the cache blocks.",
    )


def _check_longest_sequence(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that the KV cache can hold one sequence of length `max_model_len`.

    If the length is unknown, one token is required. Source: v1/core/kv_cache_utils.py,
    `_check_enough_kv_cache_memory`.
    """
    kv_cache = estimate.kv_cache
    # vLLM requires room for the model's full length. If that is unknown, one token is the minimum.
    length = estimate.question.max_model_len or 1
    sequence_bytes = estimate.count_sequence_bytes(length)
    needed = format_gib(sequence_bytes)
    if kv_cache is None:
        yield StartCheck(
            name=CheckName.LONGEST_SEQUENCE,
            passes=None,
            problem=f"one sequence of {length:,} tokens needs {needed} of KV cache",
        )
        return
    model = "models's" if estimate.question.release.has_misspelt_refusal else "model's"
    yield StartCheck(
        name=CheckName.LONGEST_SEQUENCE,
        passes=is_available(Range(low=sequence_bytes, high=sequence_bytes), kv_cache),
        problem=(
            f"one sequence of {length:,} tokens needs {needed} of KV cache,"
            f" of at most {format_gib(kv_cache.high)}"
        ),
        refusal=(
            f"To serve at least one request with the {model} max seq len ({length}),"
            f" ({_write_gib(sequence_bytes)} GiB KV cache is needed, which is larger than the"
            f" available KV cache memory ({_write_gib(kv_cache.high)} GiB)."
        ),
    )


def _check_state_blocks(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that there is a state block for each sequence, if whole-model graphs are captured.

    Source: config/compilation.py, `resolve_cudagraph_mode_and_sizes`, since 0.20.
    """
    question = estimate.question
    kv_cache = estimate.kv_cache
    block_bytes = estimate.layout.block_bytes
    has_check = question.release.has_state_check and not question.enforce_eager
    if not has_check or not question.shape.stateful_layers or kv_cache is None or not block_bytes:
        return
    # A block holds the state of one sequence.
    sequences = question.max_num_seqs
    most_blocks = int(max(0.0, kv_cache.high) // block_bytes)
    least_blocks = int(max(0.0, kv_cache.low) // block_bytes)
    bound = f"at most {most_blocks:,}"
    if least_blocks < sequences <= most_blocks:
        bound = f"{least_blocks:,} to {most_blocks:,}"
    yield StartCheck(
        name=CheckName.STATE_BLOCKS,
        passes=is_available(
            Range(low=sequences, high=sequences), Range(low=least_blocks, high=most_blocks)
        ),
        problem=f"the KV cache has {bound} blocks, and {sequences:,} sequences need one each",
        refusal=(
            f"max_num_seqs ({sequences}) exceeds available Mamba cache blocks"
            f" (at most {most_blocks})."
        ),
    )


def _check_sampler_warmup(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that all logits fit besides the KV cache and the CUDA graphs.

    Source: v1/worker/gpu_worker.py, `compile_or_warm_up_model`. At this point, vLLM can also use
    the activation memory. The KV cache leaves it free. In the first model runner, the profile run
    has already set the warm-up's memory aside. Since vLLM 0.33, this is also true of the second.
    """
    question = estimate.question
    needed = estimate.sampler_warmup
    room = _find_warmup_room(estimate)
    # If there is no room at all, an earlier check has already failed.
    if needed is None or room is None or room.high <= 0 or not estimate.layout.block_bytes:
        return
    release = question.release
    is_profiled = not question.may_have_second_runner or release.has_wide_profile
    passes = is_available(needed, room)
    if passes is None and is_profiled and question.kv_cache_memory_bytes is None:
        passes = True
    refusal = (
        f"CUDA out of memory occurred when warming up sampler with {question.max_num_seqs} dummy"
        " requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when"
        " initializing the engine."
    )
    if question.has_only_second_runner:
        refusal = CUDA_OUT_OF_MEMORY
    yield StartCheck(
        name=CheckName.SAMPLER_WARMUP,
        passes=passes,
        problem=(
            f"warming up the sampler with {question.max_num_seqs:,} sequences takes"
            f" {format_range(needed)} GiB, and {format_range(_clip_at_zero(room))} GiB of the card"
            " are left for it"
        ),
        refusal=refusal,
    )


def _find_warmup_room(estimate: MemoryEstimate) -> Range | None:
    """Return the card's free memory after the KV cache and CUDA graphs are allocated.

    Returns None if the memory is unknown. Also returns None with unified memory, which
    `_check_card` covers.
    """
    question = estimate.question
    visible = estimate.visible
    activations = estimate.activations
    if visible is None or activations is None or question.unified_memory:
        return None
    missing = estimate.assumptions.missing_at_start.range
    graphs = estimate.graphs
    if estimate.budget_bytes is not None:
        beside_bytes = visible.high * (1 - question.gpu_memory_utilization)
        # vLLM has passed the earlier checks, so at least its whole share was free.
        spare = Range(
            low=max(0.0, beside_bytes - missing.high), high=max(0.0, beside_bytes - missing.low)
        )
        if not question.release.has_graphs_in_budget:
            # Our choice: only the lower bound of the graphs is subtracted, as in `_check_card`.
            spare = Range(low=spare.low - graphs.low, high=spare.high - graphs.low)
        return spare + activations
    cache_bytes = question.kv_cache_memory_bytes
    if estimate.weights_bytes is None or cache_bytes is None:
        return None
    own_bytes = estimate.weights_bytes + cache_bytes
    used = missing + graphs + estimate.assumptions.non_torch.range
    return Range(low=visible.low - own_bytes - used.high, high=visible.high - own_bytes - used.low)


def _clip_at_zero(amount: Range) -> Range:
    return Range(low=max(0.0, amount.low), high=max(0.0, amount.high))


def _check_card(estimate: MemoryEstimate) -> Iterator[StartCheck]:
    """Check that the card has room for all parts together.

    With a budget, the check only covers the parts outside the budget. With unified memory, these
    parts include the memory that the machine itself needs. In releases whose budget does not count
    CUDA graphs, these parts also include the graphs. If the size of the KV cache is set, there is
    no budget.
    """
    question = estimate.question
    visible = estimate.visible
    if visible is None:
        return
    if estimate.budget_bytes is not None:
        beside_budget_bytes = visible.high * (1 - question.gpu_memory_utilization)
        beside_budget = format_gib(beside_budget_bytes)
        outside = format_range(estimate.outside)
        problem = (
            f"the budget leaves {beside_budget} of the card, and {outside} GiB lie outside of it"
        )
        refusal: str | None = CUDA_OUT_OF_MEMORY
        if question.unified_memory:
            problem = (
                f"the budget leaves {beside_budget} of the machine, and it needs {outside} GiB:"
                " vLLM would start, and it would hang"
            )
            refusal = None
        yield StartCheck(
            name=CheckName.CARD,
            # Our choice: the check uses the lower bound. A note warns that more may be needed.
            passes=beside_budget_bytes >= estimate.outside.low,
            problem=problem,
            refusal=refusal,
        )
        return
    overhead = estimate.overhead
    cache_bytes = question.kv_cache_memory_bytes
    if estimate.weights_bytes is None or overhead is None or cache_bytes is None:
        yield StartCheck(name=CheckName.CARD, passes=None, problem=TOO_MUCH_FOR_CARD)
        return
    own_bytes = estimate.weights_bytes + cache_bytes
    needed = Range(low=own_bytes, high=own_bytes) + overhead + estimate.outside
    # The driver's reserve is already included in the overhead.
    card_bytes = question.gpu_memory_bytes or 0
    yield StartCheck(
        name=CheckName.CARD,
        passes=is_available(needed, Range(low=card_bytes, high=card_bytes)),
        problem=(
            "weights, activations and the KV cache are more than the card's"
            f" {format_gib(card_bytes)}"
        ),
        refusal=CUDA_OUT_OF_MEMORY,
    )


TOO_MUCH_FOR_CARD: Final = "with the higher estimates it is more than the card has"


def format_range(amount: Range) -> str:
    """Format a range in GiB, as a single number if both bounds are equal."""
    low = f"{amount.low / GIB:,.2f}"
    return low if amount.low == amount.high else f"{low} to {amount.high / GIB:,.2f}"
