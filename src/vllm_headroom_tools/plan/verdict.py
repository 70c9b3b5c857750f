"""The answer in sentences: whether it fits, why, and what to know about the figures."""

from collections.abc import Iterator
from math import ceil, floor
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.configured import OFFLOAD_FACTOR
from vllm_headroom.units import GIB, format_gib
from vllm_headroom_tools.sizing.estimate import (
    LEFT_TO_THE_MACHINE_BYTES,
    MemoryEstimate,
    Range,
    can_start,
    estimate_host,
    estimate_memory,
    estimate_outside,
)
from vllm_headroom_tools.sizing.question import SAFE_UTILIZATION, Question, find_problem


def list_unknown(estimate: MemoryEstimate) -> list[str]:
    """Return what is needed to judge and not known, each with the options that set it."""
    question = estimate.question
    model_type = question.shape.unknown_type
    unknown = []
    if model_type is not None:
        unknown.append(
            f"what models of type {model_type!r} keep (--layers, --kv-heads and --head-size say it)"
        )
    if question.gpu_memory_bytes is None:
        unknown.append("the card (--gpu-memory)")
    if estimate.weights_bytes is None:
        unknown.append("the weights (--parameters)")
    if question.has_uncounted_weights:
        unknown.append("the image or audio encoder's weights (--parameters)")
    if question.has_uncounted_activations:
        unknown.append("its largest image or sound (else --language-model-only)")
    if estimate.activations is None:
        unknown.append("the activations (--hidden-size and --vocabulary)")
    if question.max_model_len is None:
        unknown.append("the length (--max-model-len)")
    return unknown


def explain_verdict(estimate: MemoryEstimate) -> str:
    """Return whether vLLM starts, and why."""
    # A certain answer needs no list of what is unknown.
    fits = can_start(estimate)
    if fits:
        return f"It fits: vLLM starts. {_explain_concurrency(estimate)}"
    if fits is False:
        return f"It does not fit: {_explain_obstacle(estimate)}."
    unknown = list_unknown(estimate)
    if unknown:
        verb = "is" if len(unknown) == 1 else "are"
        return f"Cannot tell whether it fits: not known {verb} {', '.join(unknown)}."
    return f"Too close to call: {_explain_margin(estimate)}."


def format_range(amount: Range) -> str:
    """Return a range as a number of GiB, or two."""
    low = f"{amount.low / GIB:,.2f}"
    return low if amount.low == amount.high else f"{low} to {amount.high / GIB:,.2f}"


def _explain_margin(estimate: MemoryEstimate) -> str:
    """Return what fits by the low end of the estimates, and not by the high one."""
    host_bytes = estimate.question.host_memory_bytes
    if host_bytes is not None and estimate.host.high > host_bytes:
        needed = format_range(estimate.host)
        return f"vLLM's processes need {needed} GiB of the host's {format_gib(host_bytes)}"
    if estimate.kv_cache is None or estimate.budget_bytes is None:
        return "with the higher estimates it is more than the card has"
    sequence = format_gib(estimate.count_sequence_bytes(estimate.question.max_model_len or 1))
    cache = format_range(estimate.kv_cache)
    return f"{cache} GiB are left for the KV cache, and one sequence needs {sequence}"


def _explain_obstacle(estimate: MemoryEstimate) -> str:
    """Return what does not fit even by the low end of the estimates.

    The first that does not, of host, budget, cache and card.
    """
    question = estimate.question
    kv_cache = estimate.kv_cache
    budget_bytes = estimate.budget_bytes
    overhead = estimate.overhead
    host_bytes = question.host_memory_bytes
    card_bytes = question.gpu_memory_bytes or 0
    length = question.max_model_len or 1
    sequence_bytes = estimate.count_sequence_bytes(length)

    if host_bytes is not None and estimate.host.low > host_bytes:
        needed = format_gib(estimate.host.low)
        return f"vLLM's processes need at least {needed} of the host's {format_gib(host_bytes)}"

    leaves_no_cache = kv_cache is not None and kv_cache.high <= 0
    if leaves_no_cache and budget_bytes is not None and overhead is not None:
        needed = format_gib((estimate.weights_bytes or 0) + overhead.low)
        budget = format_gib(budget_bytes)
        return (
            f"weights and activations need at least {needed} of each GPU,"
            f" and the budget is {budget}"
        )

    if kv_cache is not None and kv_cache.high < sequence_bytes:
        needed = format_gib(sequence_bytes)
        cache = format_gib(kv_cache.high)
        return f"one sequence of {length:,} tokens needs {needed} of KV cache, of at most {cache}"

    # Where the size of the KV cache is set there is no budget: the card as a whole is too small.
    if budget_bytes is None:
        card = format_gib(card_bytes)
        return f"weights, activations and the KV cache are more than the card's {card}"

    beside_budget = format_gib(card_bytes - budget_bytes)
    outside = format_range(estimate.outside)
    if question.unified_memory:
        return (
            f"the budget leaves {beside_budget} of the machine, and it needs {outside} GiB:"
            " vLLM would start, and it would hang"
        )
    return f"the budget leaves {beside_budget} of the card, and {outside} GiB lie outside of it"


def _explain_concurrency(estimate: MemoryEstimate) -> str:
    if not estimate.layout.block_bytes:
        return "It keeps nothing of a sequence: there is no KV cache."
    length = estimate.question.max_model_len or 1
    sequences = estimate.question.max_num_seqs
    # By the low end: vLLM starts either way, and preempts where it has room for fewer.
    at_once = int(estimate.count_sequences(length) or 0)
    if at_once >= sequences:
        return f"All {sequences:,} sequences of {length:,} tokens fit at once."
    return (
        f"But {sequences:,} sequences of {length:,} tokens do not fit at once, {at_once:,} do:"
        " further ones wait or are preempted."
    )


def list_notes(estimate: MemoryEstimate) -> list[str]:
    """Return where the figures are bounds, and what might surprise in them."""
    return [
        *_note_layers(estimate),
        *_note_copies(estimate.question),
        *_note_omissions(estimate.question),
        *_note_memory_outside(estimate),
    ]


def _note_layers(estimate: MemoryEstimate) -> Iterator[str]:
    """Note layers that keep a window or a state."""
    shape = estimate.question.shape
    windowed = shape.windowed_layers
    stateful = shape.stateful_layers
    if windowed:
        yield (
            f"{windowed} layers keep only the last {shape.window_tokens or 0:,} tokens:"
            " bytes per token are an upper bound;"
            " tokens and sequences are counted as vLLM's hybrid KV cache manager holds them."
        )
    if stateful and shape.state_bytes is None:
        yield (
            f"{stateful} layers keep a state of each sequence whose size is not known here:"
            " tokens and sequences are an upper bound."
        )
    elif stateful and shape.state_bytes is not None:
        state_bytes = shape.state_bytes // estimate.question.tensor_parallel_size
        yield (
            f"{stateful} layers keep {state_bytes:,} bytes of each sequence instead of its tokens;"
            f" a block has {estimate.layout.block_tokens} tokens to be as large as one of these."
        )


def _note_copies(question: Question) -> Iterator[str]:
    """Note what tensor parallelism does not divide."""
    ranks = question.tensor_parallel_size
    kv_heads = question.shape.heads.count
    if question.shape.latent_width is not None and ranks > 1:
        yield (
            "Latent attention keeps its whole vector on every GPU:"
            " tensor parallelism does not divide the KV cache."
        )
    elif ranks > kv_heads:
        yield f"{ranks} GPUs share {kv_heads} KV heads: each is kept {ranks // kv_heads} times."


def _note_omissions(question: Question) -> Iterator[str]:
    """Note what is not counted, or counted without a check."""
    model_type = question.shape.unknown_type
    if model_type is not None:
        yield (
            f"Models of type {model_type!r} have not been checked against vLLM:"
            " the figures assume the layers of a usual decoder."
        )
    if question.has_uncounted_weights:
        yield "The weights are those of the language model: an image or audio encoder adds its own."
    if question.has_uncounted_activations:
        yield "vLLM's profiling of the encoder adds to the activations."
    if question.draft is not None:
        yield "The draft model is counted whole; one that shares its embeddings takes less."


def _note_memory_outside(estimate: MemoryEstimate) -> Iterator[str]:
    """Note what memory outside of the budget is for."""
    question = estimate.question
    if question.unified_memory:
        offloaded = ""
        if question.cpu_offload_bytes:
            offloaded = "; weights that are offloaded lie in the same memory"
        yield (
            f"{format_gib(LEFT_TO_THE_MACHINE_BYTES)} of the machine's one memory are left"
            f" to its system and to vLLM's own processes{offloaded}."
            " Swap and zram count as no room."
        )
        yield (
            "While vLLM loads, the page cache of the weights' files takes this memory too,"
            " and an allocation can fail although the rest is available (vllm-project/vllm#54200):"
            " drop the page cache while it loads."
        )
        return
    if question.gpu_memory_bytes is None or estimate.budget_bytes is None:
        return
    beside_budget_bytes = question.gpu_memory_bytes - estimate.budget_bytes
    if estimate.outside.low <= beside_budget_bytes < estimate.outside.high:
        yield (
            f"Beside its budget vLLM takes {format_range(estimate.outside)} GiB of the card,"
            f" and {format_gib(beside_budget_bytes)} are left for that."
        )


SMALLEST_LENGTH: Final = 256
"""Tokens; a server for shorter sequences is of no use to anyone."""

SIXTEEN_BIT_BYTES: Final = 2.0
"""Bytes of a value in 16 bits: a cache of smaller ones is rounded already."""

TENSOR_PARALLEL_LIMIT: Final = 64
"""Our choice: the most GPUs over which an engine is proposed to be spread."""

Settings = tuple[tuple[str, str], ...]
"""Pairs of option and value."""


class Saving(Struct, frozen=True):
    """Settings of vLLM and their price."""

    settings: Settings
    price: str


class Trial(Struct, frozen=True):
    """A question with other settings, which may let vLLM start."""

    settings: Settings
    price: str
    question: Question


def find_changes(estimate: MemoryEstimate) -> tuple[Saving, ...]:
    """Return every setting that surely lets vLLM start, the cheapest first.

    Of each setting the nearest value that does. Where a shorter `max_model_len` alone is not
    enough, also each setting that does together with one.
    """
    shortened = _shorten(estimate.question)
    is_shortening_enough = shortened is not None and _surely_starts(shortened.question)
    trials = [] if shortened is None else [shortened]
    for trial in _list_trials(estimate.question):
        trials.append(trial)
        if is_shortening_enough or find_problem(trial.question):
            continue
        shorter = _shorten(trial.question)
        if shorter is not None:
            both_settings = (*trial.settings, *shorter.settings)
            both_prices = f"{trial.price}; {shorter.price}"
            trials.append(Trial(both_settings, both_prices, shorter.question))

    # Trials of the same options are in the order of their distance: the first that starts counts.
    savings: dict[tuple[str, ...], Saving] = {}
    for trial in trials:
        options = tuple(option for option, _ in trial.settings)
        if options not in savings and _surely_starts(trial.question):
            savings[options] = Saving(trial.settings, trial.price)
    return tuple(savings.values())


def _surely_starts(question: Question) -> bool:
    return not find_problem(question) and can_start(estimate_memory(question)) is True


def _shorten(question: Question) -> Trial | None:
    """Return the trial with the longest sequences that fit.

    None where sequences as long as now fit, or only ones that are too short to be of use.
    """
    longest = estimate_memory(question).find_longest(1) or 0
    length = question.max_model_len
    if longest < SMALLEST_LENGTH or (length is not None and longest >= length):
        return None
    return Trial(
        (("--max-model-len", str(longest)),),
        "longer requests are refused",
        replace(question, max_model_len=longest),
    )


def _list_trials(question: Question) -> Iterator[Trial]:
    """Yield changes of one option, from what costs little to what costs GPUs, or speed."""
    yield from _run_fewer_sequences(question)
    yield from _change_share(question)
    yield from _round_cache(question)
    yield from _round_weights(question)
    yield from _offload_less_cache(question)
    yield from _use_more_gpus(question)
    # Last: it costs no GPU, but it slows every step.
    yield from _offload_weights(question)


def _run_fewer_sequences(question: Question) -> Iterator[Trial]:
    """Yield a half, a quarter and so on of the sequences: each needs room for its logits."""
    for halvings in range(1, question.max_num_seqs.bit_length()):
        sequences = question.max_num_seqs >> halvings
        yield Trial(
            (("--max-num-seqs", str(sequences)),),
            "more requests wait",
            replace(question, max_num_seqs=sequences),
        )


def _change_share(question: Question) -> Iterator[Trial]:
    """Yield a larger share of the card; with unified memory, all that the machine does not need.

    The latter may be less than the share now.
    """
    if question.kv_cache_memory_bytes is not None:
        return
    share = SAFE_UTILIZATION
    price = "less is left for what lies beside the budget"
    is_useful = share > question.gpu_memory_utilization
    if question.unified_memory and question.gpu_memory_bytes is not None:
        machine_bytes = question.gpu_memory_bytes
        budget_bytes = machine_bytes - estimate_outside(question).high
        # Rounded down to whole per cents.
        share = floor(budget_bytes / machine_bytes * 100) / 100
        price = "the system and vLLM's own processes keep what they need"
        is_useful = share > 0
    if is_useful:
        yield Trial(
            (("--gpu-memory-utilization", str(share)),),
            price,
            replace(question, gpu_memory_utilization=share),
        )


def _round_cache(question: Question) -> Iterator[Trial]:
    is_unrounded = question.shape.kv_dtype_bytes >= SIXTEEN_BIT_BYTES
    dtype = question.kv_cache_dtype
    # With "auto", a checkpoint with scales for its cache has one in 8 bits already.
    if dtype in {"float16", "bfloat16"} or (dtype == "auto" and is_unrounded):
        yield Trial(
            (("--kv-cache-dtype", "fp8"),),
            "keys and values are rounded",
            replace(question, kv_cache_dtype="fp8"),
        )


def _round_weights(question: Question) -> Iterator[Trial]:
    if question.shape.quantisation is None:
        # vLLM rounds weights of 16 bits to FP8 as it loads them, without another checkpoint.
        rounded_shape = question.shape.apply_quantisation("fp8", 1.0)
        yield Trial(
            (("--quantization", "fp8"),),
            "weights are rounded",
            replace(question, shape=rounded_shape),
        )


def _offload_less_cache(question: Question) -> Iterator[Trial]:
    """Yield the largest tier of the KV cache that the host has room for, in GiB of each engine."""
    host_bytes = question.host_memory_bytes
    if host_bytes is None or not question.kv_offloading_bytes:
        return
    without_tier = estimate_host(replace(question, kv_offloading_bytes=0))
    tier_bytes = (host_bytes - without_tier.high) / OFFLOAD_FACTOR / question.data_parallel_size
    tier_gib = max(0, floor(tier_bytes / GIB))
    price = "fewer prefixes are kept" if tier_gib else "no prefix is kept on the host"
    yield Trial(
        (("--kv-offloading-size", str(tier_gib)),),
        price,
        replace(question, kv_offloading_bytes=tier_gib * GIB),
    )


def _use_more_gpus(question: Question) -> Iterator[Trial]:
    for ranks in range(question.tensor_parallel_size + 1, TENSOR_PARALLEL_LIMIT + 1):
        # A number that does not divide the model's heads is left out later, as vLLM refuses it.
        wider = replace(question, tensor_parallel_size=ranks)
        yield Trial(
            (("--tensor-parallel-size", str(ranks)),),
            f"{wider.gpus} GPUs instead of {question.gpus}",
            wider,
        )


PCIE_BYTES_PER_SECOND: Final = 25e9
"""Our choice: what 16 lanes of PCIe 4.0 carry of their 31.5 GB/s, to show the order of size."""


def _offload_weights(question: Question) -> Iterator[Trial]:
    """Yield the least of each GPU's weights on the host that lets vLLM start, in whole GiB.

    Where none does, as many as the host can take. Nothing where the host's memory is not given, or
    is the card's own.
    """
    host_bytes = question.host_memory_bytes
    weights_bytes = question.weights_bytes
    if host_bytes is None or weights_bytes is None or question.unified_memory:
        return
    now_gib = ceil(question.cpu_offload_bytes / GIB)
    # The host has to hold vLLM's processes and, of each GPU, up to OFFLOAD_FACTOR of the offload.
    without_offload = estimate_host(replace(question, cpu_offload_bytes=0))
    host_room_bytes = (host_bytes - without_offload.high) / OFFLOAD_FACTOR / question.gpus
    most_bytes = min(host_room_bytes, weights_bytes + question.cpu_offload_bytes)
    most_gib = floor(most_bytes / GIB)
    if most_gib <= now_gib:
        return
    # What starts with some weights on the host starts with more of them, as far as the host has
    # room: the least is found by halving.
    lowest_gib = now_gib + 1
    highest_gib = most_gib
    while lowest_gib < highest_gib:
        middle_gib = (lowest_gib + highest_gib) // 2
        if _surely_starts(replace(question, cpu_offload_bytes=middle_gib * GIB)):
            highest_gib = middle_gib
        else:
            lowest_gib = middle_gib + 1
    # vLLM copies what it offloads in every forward pass (its documentation of cpu_offload_gb).
    step_seconds = lowest_gib * GIB / PCIE_BYTES_PER_SECOND
    price = f"slow: every step copies them over PCIe, about {step_seconds:.2g} s at 25 GB/s"
    yield Trial(
        (("--cpu-offload-gb", str(lowest_gib)),),
        price,
        replace(question, cpu_offload_bytes=lowest_gib * GIB),
    )
