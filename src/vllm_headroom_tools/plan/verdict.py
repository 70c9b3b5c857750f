"""The verdict in sentences: whether the model fits, why, and notes on the figures."""

from collections.abc import Iterator
from math import ceil, floor
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.configured import OFFLOAD_FACTOR
from vllm_headroom.units import GIB, GIGABYTE, format_gib
from vllm_headroom_tools.sizing.assumptions import assume_start
from vllm_headroom_tools.sizing.checks import (
    CheckName,
    can_start,
    check_start,
    find_failed_check,
    format_range,
)
from vllm_headroom_tools.sizing.estimate import (
    LEFT_TO_THE_MACHINE_BYTES,
    MemoryEstimate,
    estimate_host,
    estimate_memory,
    estimate_outside,
)
from vllm_headroom_tools.sizing.question import SAFE_UTILIZATION, Question, find_problem


def list_unknown(estimate: MemoryEstimate) -> list[str]:
    """Return a text on each missing figure, with the options that set it."""
    question = estimate.question
    model_type = question.shape.unknown_type
    # Name all unknown figures at once, so one run is enough to find them.
    unknown = []
    if model_type is not None:
        unknown.append(
            f"what models of type {model_type!r} keep (--layers, --kv-heads and --head-size say it)"
        )
    if question.gpu_memory_bytes is None:
        unknown.append("the card (--gpu or --gpu-memory)")
    if estimate.weights_bytes is None:
        unknown.append("the weights (--parameters)")
    if question.has_uncounted_weights:
        unknown.append("the image or audio encoder's weights (--parameters)")
    if question.has_unknown_draft:
        unknown.append("the size of the draft model, which may be any (--draft-model-config)")
    if question.has_uncounted_activations:
        unknown.append("its largest image or sound (else --language-model-only)")
    if estimate.activations is None:
        unknown.append("the activations (--hidden-size and --vocabulary)")
    if question.max_model_len is None:
        unknown.append("the length (--max-model-len)")
    return unknown


def explain_verdict(estimate: MemoryEstimate) -> str:
    """Return a sentence that says whether vLLM will start, and why."""
    # If the answer is certain, unknown figures do not matter.
    fits = can_start(estimate)
    if fits:
        return f"It fits: vLLM starts. {_explain_concurrency(estimate)}"
    if fits is False:
        return f"It does not fit: {_explain_obstacle(estimate)}"
    unknown = list_unknown(estimate)
    if unknown:
        return f"Cannot tell whether it fits; missing: {', '.join(unknown)}."
    return f"Too close to call: {_explain_margin(estimate)}."


def _explain_margin(estimate: MemoryEstimate) -> str:
    """Return a text on the check that passes only with the lower bounds."""
    # If several checks are undecided, report the one that vLLM runs first.
    check = next(check for check in check_start(estimate) if check.passes is None)
    if check.name is CheckName.HOST_MEMORY:
        needed = format_range(estimate.host)
        host = format_gib(estimate.question.host_memory_bytes or 0)
        return f"vLLM's processes need {needed} of the host's {host}"
    if check.name in (CheckName.STATE_BLOCKS, CheckName.SAMPLER_WARMUP):
        return check.problem
    if estimate.kv_cache is None or estimate.budget_bytes is None:
        return "with the higher estimates it is more than the card has"
    sequence = format_gib(estimate.count_sequence_bytes(estimate.question.max_model_len or 1))
    cache = format_range(estimate.kv_cache)
    return f"{cache} GiB are left for the KV cache, and one sequence needs {sequence}"


def _explain_obstacle(estimate: MemoryEstimate) -> str:
    """Describe the first check that fails even with lower bounds, and vLLM's error."""
    check = find_failed_check(estimate)
    if check is None:
        return "it is more than the card has."
    refusal = "" if check.refusal is None else f' vLLM: "{check.refusal}"'
    return f"{check.problem}.{refusal}"


def _explain_concurrency(estimate: MemoryEstimate) -> str:
    """Return a sentence on whether `max_num_seqs` sequences of maximum length fit at once."""
    if not estimate.layout.block_bytes:
        return "It keeps nothing of a sequence: there is no KV cache."
    length = estimate.question.max_model_len or 1
    sequences = estimate.question.max_num_seqs
    # Use the lower bound of the number of sequences. If not all sequences fit, vLLM starts and
    # preempts requests.
    at_once = int(estimate.count_sequences(length) or 0)
    if at_once >= sequences:
        return f"All {sequences:,} sequences of {length:,} tokens fit at once."
    return (
        f"But {sequences:,} sequences of {length:,} tokens do not fit at once, {at_once:,} do:"
        " further ones wait or are preempted."
    )


def list_estimate_notes(estimate: MemoryEstimate) -> list[str]:
    """Return notes on figures that are only bounds and on figures that may be surprising."""
    return [
        *_note_layers(estimate),
        *_note_copies(estimate.question),
        *_note_omissions(estimate.question),
        *_note_memory_outside(estimate),
        *_note_decimal_card(estimate.question),
        *_note_ignored_options(estimate.question),
    ]


def _note_layers(estimate: MemoryEstimate) -> Iterator[str]:
    """Note sliding-window and state-space layers."""
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


def _note_decimal_card(question: Question) -> Iterator[str]:
    """Yield a note if the card's memory was given in GB.

    The card has more memory than that.
    """
    card_bytes = question.gpu_memory_bytes
    if card_bytes is not None and card_bytes % GIGABYTE == 0:
        label = card_bytes // GIGABYTE
        yield (
            f"{label} GB are {card_bytes / GIB:.2f} GiB. A card sold with {label} GB has more:"
            " what nvidia-smi shows, or --gpu NAME."
        )


def _note_ignored_options(question: Question) -> Iterator[str]:
    """Yield notes on an assumed draft model and on vLLM options that are not considered."""
    if question.assumed_draft is not None:
        yield (
            f"The draft {question.assumed_draft} is not known here. It counts as the largest of its"
            " kind for this model; --draft-model-config has its sizes."
        )
    if question.ignored_options:
        yield f"Not counted: {', '.join(question.ignored_options)}."


def _note_copies(question: Question) -> Iterator[str]:
    """Yield a note if tensor parallelism replicates the KV cache on several GPUs."""
    ranks = question.tensor_parallel_size
    kv_heads = question.shape.heads.count
    context_ranks = question.decode_context_parallel_size
    if context_ranks > 1:
        yield f"{context_ranks} GPUs share the tokens of each sequence (decode context parallel)."
    elif question.shape.latent_width is not None and ranks > 1:
        yield (
            "Latent attention keeps its whole vector on every GPU:"
            " tensor parallelism does not divide the KV cache."
        )
    elif ranks > kv_heads:
        yield f"{ranks} GPUs share {kv_heads} KV heads: each is kept {ranks // kv_heads} times."


def _note_omissions(question: Question) -> Iterator[str]:
    """Yield notes if weights or activations are omitted, or the model type is unchecked."""
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
    if question.draft is not None and question.cache_shape is not question.shape:
        yield "The draft's cache counts as further layers of the model, which is an upper bound."


def _note_memory_outside(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield notes about memory outside the budget.

    With unified memory, the notes state how much memory the machine itself needs. Without unified
    memory, there is a note if the card is nearly full.
    """
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
    visible = estimate.visible
    if visible is None or estimate.budget_bytes is None:
        return
    beside_budget_bytes = visible.high - estimate.budget_bytes
    if estimate.outside.low <= beside_budget_bytes < estimate.outside.high:
        yield (
            f"Beside its budget vLLM takes {format_range(estimate.outside)} GiB of the card,"
            f" and {format_gib(beside_budget_bytes)} are left for that."
        )


SMALLEST_LENGTH: Final = 256
"""Our choice: the shortest sequence length, in tokens, that is proposed. A server with a shorter
limit would be useless.
"""

SIXTEEN_BIT_BYTES: Final = 2.0
"""The size of a 16-bit value in bytes. A cache with smaller values is already quantised."""

TENSOR_PARALLEL_LIMIT: Final = 64
"""Our choice: the largest number of GPUs to propose for an engine."""

OptionValues = tuple[tuple[str, str], ...]
"""Pairs of an option and its value."""


class Saving(Struct, frozen=True):
    """Settings that are certain to let vLLM start, and a description of their disadvantage."""

    settings: OptionValues
    price: str


class Trial(Struct, frozen=True):
    """A change of settings to try, because vLLM may start with it."""

    settings: OptionValues
    # A description of the change's disadvantage.
    price: str
    # The question with these settings.
    question: Question


def find_changes(estimate: MemoryEstimate) -> tuple[Saving, ...]:
    """Return the changes that are certain to let vLLM start, cheapest first.

    Each option is changed to the nearest value that helps. If a shorter `max_model_len` alone is
    not enough, it is combined with other changes. Returns an empty tuple if no change helps.
    """
    shortened = _shorten(estimate.question)
    is_shortening_enough = shortened is not None and _surely_starts(shortened.question)
    trials = [] if shortened is None else [shortened]
    for trial in _list_trials(estimate.question):
        trials.append(trial)
        # If the shorter length alone is not enough, each change is combined with it.
        if is_shortening_enough or find_problem(trial.question):
            continue
        shorter = _shorten(trial.question)
        if shorter is not None:
            both_settings = (*trial.settings, *shorter.settings)
            both_prices = f"{trial.price}; {shorter.price}"
            trials.append(Trial(both_settings, both_prices, shorter.question))

    # The trials of an option begin with the value nearest to the current one. The first trial that
    # lets vLLM start is used.
    savings: dict[tuple[str, ...], Saving] = {}
    for trial in trials:
        options = tuple(option for option, _ in trial.settings)
        if options not in savings and _surely_starts(trial.question):
            savings[options] = Saving(trial.settings, trial.price)
    return tuple(savings.values())


def _surely_starts(question: Question) -> bool:
    """Return whether vLLM starts even with the estimates' upper bounds."""
    return not find_problem(question) and can_start(estimate_memory(question)) is True


def _shorten(question: Question) -> Trial | None:
    """Return a trial with the longest `max_model_len` that fits.

    Returns None if the current length fits, or if only lengths below SMALLEST_LENGTH would fit.
    """
    longest = estimate_memory(question).find_longest(1) or 0
    length = question.max_model_len
    # Never exceed the length that the model supports.
    if question.shape.max_model_len is not None:
        longest = min(longest, question.shape.max_model_len)
    if longest < SMALLEST_LENGTH or (length is not None and longest >= length):
        return None
    return Trial(
        (("--max-model-len", str(longest)),),
        "longer requests are refused",
        replace(question, max_model_len=longest),
    )


def _list_trials(question: Question) -> Iterator[Trial]:
    """Yield trials that change one option, beginning with the cheapest."""
    yield from _use_present_gpus(question)
    yield from _run_fewer_sequences(question)
    yield from _enlarge_batch(question)
    yield from _change_share(question)
    yield from _leave_graphs(question)
    yield from _round_cache(question)
    yield from _round_weights(question)
    yield from _offload_less_cache(question)
    yield from _use_more_gpus(question)
    # Offloading comes last: it does not require another GPU, but it slows down every step.
    yield from _offload_weights(question)


def _run_fewer_sequences(question: Question) -> Iterator[Trial]:
    """Yield trials with fewer and fewer sequences, because each sequence needs room for logits.

    The first trial has as many sequences as there are state blocks. The next trials have half that
    number, a quarter, and so on.
    """
    blocks = estimate_memory(question).blocks or 0
    if question.shape.stateful_layers and 0 < blocks < question.max_num_seqs:
        yield Trial(
            (("--max-num-seqs", str(blocks)),),
            "more requests wait",
            replace(question, max_num_seqs=blocks),
        )
    # Halve the number repeatedly. The first trial that fits is nearest to the current number.
    for halvings in range(1, question.max_num_seqs.bit_length()):
        sequences = question.max_num_seqs >> halvings
        yield Trial(
            (("--max-num-seqs", str(sequences)),),
            "more requests wait",
            replace(question, max_num_seqs=sequences),
        )


def _enlarge_batch(question: Question) -> Iterator[Trial]:
    """Yield a trial with a batch as large as a block.

    Yields nothing if the batch is already that large.
    """
    block_tokens = estimate_memory(question).layout.block_tokens
    if question.shape.stateful_layers and block_tokens > question.max_num_batched_tokens:
        yield Trial(
            (("--max-num-batched-tokens", str(block_tokens)),),
            "activations take more",
            replace(question, max_num_batched_tokens=block_tokens),
        )


def _leave_graphs(question: Question) -> Iterator[Trial]:
    """Yield a trial without CUDA graphs if the model has state-space layers.

    With CUDA graphs, each sequence needs a block for its state.
    """
    if question.shape.stateful_layers and not question.enforce_eager:
        yield Trial(
            (("--enforce-eager", ""),),
            "without CUDA graphs decoding is slower",
            replace(question, enforce_eager=True),
        )


def _change_share(question: Question) -> Iterator[Trial]:
    """Yield a trial with a different share of the card.

    Yields nothing if an option sets the cache's size. The new share is the highest safe share. With
    unified memory, the machine's own need is subtracted, so the new share may be below the current
    share.
    """
    if question.kv_cache_memory_bytes is not None:
        return
    share = SAFE_UTILIZATION
    price = "less is left for what lies beside the budget"
    is_useful = share != question.gpu_memory_utilization
    if share < question.gpu_memory_utilization:
        price = "the KV cache is smaller"
    if question.unified_memory and question.gpu_memory_bytes is not None:
        machine_bytes = question.gpu_memory_bytes
        budget_bytes = machine_bytes - estimate_outside(question, assume_start(question)).high
        # Round the share down to a whole percent.
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
    """Yield a trial with keys and values in FP8.

    Yields nothing if they already use at most 8 bits.
    """
    is_unrounded = question.shape.kv_dtype_bytes >= SIXTEEN_BIT_BYTES
    dtype = question.kv_cache_dtype
    # With "auto", the cache already uses 8 bits if the checkpoint contains scales for it.
    if dtype in {"float16", "bfloat16"} or (dtype == "auto" and is_unrounded):
        yield Trial(
            (("--kv-cache-dtype", "fp8"),),
            "keys and values are rounded",
            replace(question, kv_cache_dtype="fp8"),
        )


def _round_weights(question: Question) -> Iterator[Trial]:
    """Yield a trial with weights in FP8, unless the model is already quantised."""
    if question.shape.quantisation is None:
        # vLLM converts 16-bit weights to FP8 while loading them, so no other checkpoint is needed.
        rounded_shape = question.shape.apply_quantisation("fp8", bytes_per_parameter=1.0)
        yield Trial(
            (("--quantization", "fp8"),),
            "weights are rounded",
            replace(question, shape=rounded_shape),
        )


def _offload_less_cache(question: Question) -> Iterator[Trial]:
    """Yield a trial with the largest KV cache tier that fits in the host's memory.

    Yields nothing if there is no tier, or if the host's memory is not given.
    """
    host_bytes = question.host_memory_bytes
    if host_bytes is None or not question.kv_offloading_bytes:
        return
    # The host memory that the other parts leave if they reach their upper bounds.
    without_tier = estimate_host(replace(question, kv_offloading_bytes=0))
    tier_bytes = (host_bytes - without_tier.high) / OFFLOAD_FACTOR / question.data_parallel_size
    tier_gib = max(0, floor(tier_bytes / GIB))
    price = "fewer prefixes are kept" if tier_gib else "no prefix is kept on the host"
    yield Trial(
        (("--kv-offloading-size", str(tier_gib)),),
        price,
        replace(question, kv_offloading_bytes=tier_gib * GIB),
    )


def _use_present_gpus(question: Question) -> Iterator[Trial]:
    """Yield a trial for each kind of parallelism that can fit the cards."""
    card_count = question.card_count
    if card_count is None or question.gpus <= card_count:
        return
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size = getattr(question, name)
        fewer = card_count // (question.gpus // size)
        if 0 < fewer < size:
            yield Trial(
                ((f"--{name.replace('_', '-')}", str(fewer)),),
                f"{card_count} GPUs are there",
                replace(question, **{name: fewer}),
            )


def _use_more_gpus(question: Question) -> Iterator[Trial]:
    """Yield a trial for each larger `--tensor-parallel-size`."""
    for ranks in range(question.tensor_parallel_size + 1, TENSOR_PARALLEL_LIMIT + 1):
        # `find_problem` later rejects this number of ranks if the heads cannot be divided evenly.
        # The number of cards is not limited here. The advice mentions additional cards as a
        # disadvantage.
        wider = replace(question, tensor_parallel_size=ranks, card_count=None)
        yield Trial(
            (("--tensor-parallel-size", str(ranks)),),
            f"{wider.gpus} GPUs instead of {question.gpus}",
            wider,
        )


PCIE_BYTES_PER_SECOND: Final = 25e9
"""Our choice: the assumed bandwidth of PCIe 4.0 x16, whose theoretical bandwidth is 31.5 GB/s. This
figure is only accurate to an order of magnitude.
"""


def _offload_weights(question: Question) -> Iterator[Trial]:
    """Yield a trial that offloads just enough weights per GPU for vLLM to start.

    If no amount is enough, the trial offloads as much as the host can hold. Yields nothing if the
    host's memory is unknown, shared with the card, or too small.
    """
    host_bytes = question.host_memory_bytes
    weights_bytes = question.weights_bytes
    if host_bytes is None or weights_bytes is None or question.unified_memory:
        return
    now_gib = ceil(question.cpu_offload_bytes / GIB)
    # The host holds vLLM's processes and the offloaded weights. Offloading takes up to
    # OFFLOAD_FACTOR times the amount for each GPU.
    without_offload = estimate_host(replace(question, cpu_offload_bytes=0))
    host_room_bytes = (host_bytes - without_offload.high) / OFFLOAD_FACTOR / question.gpus
    most_bytes = min(host_room_bytes, weights_bytes + question.cpu_offload_bytes)
    most_gib = floor(most_bytes / GIB)
    if most_gib <= now_gib:
        return
    # Offloading more weights never prevents a start, as long as the host has room. Therefore,
    # bisection finds the smallest amount.
    lowest_gib = now_gib + 1
    highest_gib = most_gib
    while lowest_gib < highest_gib:
        middle_gib = (lowest_gib + highest_gib) // 2
        if _surely_starts(replace(question, cpu_offload_bytes=middle_gib * GIB)):
            highest_gib = middle_gib
        else:
            lowest_gib = middle_gib + 1
    # vLLM copies the offloaded weights in every forward pass (see the documentation of
    # cpu_offload_gb).
    step_seconds = lowest_gib * GIB / PCIE_BYTES_PER_SECOND
    price = f"slow: every step copies them over PCIe, about {step_seconds:.2g} s at 25 GB/s"
    yield Trial(
        (("--cpu-offload-gb", str(lowest_gib)),),
        price,
        replace(question, cpu_offload_bytes=lowest_gib * GIB),
    )
