"""The answer in sentences: whether it fits, why, and what to know about the figures."""

from collections.abc import Iterator
from math import floor
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.units import GIB, format_gib
from vllm_headroom_tools.sizing.estimate import (
    LEFT_TO_THE_MACHINE_BYTES,
    OFFLOAD_HIGH,
    MemoryEstimate,
    Range,
    can_start,
    estimate_host,
    estimate_memory,
    estimate_outside,
)
from vllm_headroom_tools.sizing.question import Question, find_problem


def list_unknown(found: MemoryEstimate) -> list[str]:
    """Return what is not known and needed to judge whether it fits, each with the options that set it."""
    question = found.question
    kind = question.shape.unknown_type
    needs = (
        (None if kind else "", f"what models of type {kind!r} keep (--layers, --kv-heads and --head-size say it)"),
        (question.gpu_memory_bytes, "the card (--gpu-memory)"),
        (found.weights, "the weights (--parameters)"),
        (None if question.has_more_weights else "", "the image or audio encoder's weights (--parameters)"),
        (None if question.has_more_activations else "", "its largest image or sound (else --language-model-only)"),
        (found.activations, "the activations (--hidden-size and --vocabulary)"),
        (question.max_model_len, "the length (--max-model-len)"),
    )
    return [name for value, name in needs if value is None]


def explain_verdict(found: MemoryEstimate) -> str:
    """Return whether vLLM starts, and why."""
    answer, missing = can_start(found), list_unknown(found)
    if answer:
        return f"It fits: vLLM starts. {_explain_concurrency(found)}"
    if answer is False:
        return f"It does not fit: {_explain_obstacle(found)}."
    if missing:
        return f"Cannot tell whether it fits: not known {'is' if len(missing) == 1 else 'are'} {', '.join(missing)}."
    return f"Too close to call: {_explain_margin(found)}."


def format_range(amount: Range) -> str:
    """Return a range as a number of GiB, or two."""
    low = f"{amount.low / GIB:,.2f}"
    return low if amount.low == amount.high else f"{low} to {amount.high / GIB:,.2f}"


def _explain_obstacle(found: MemoryEstimate) -> str:
    question, kv_cache, overhead = found.question, found.kv_cache, found.overhead
    card, budget, length = question.gpu_memory_bytes or 0, found.budget, question.max_model_len or 1
    host = question.host_memory_bytes
    if host is not None and found.host.low > host:
        return f"vLLM's processes need at least {format_gib(found.host.low)} of the host's {format_gib(host)}"
    if budget is not None and overhead is not None and kv_cache is not None and kv_cache.high <= 0:
        rest = (found.weights or 0) + overhead.low
        return (
            f"weights and activations need at least {format_gib(rest)} of each GPU, and the"
            f" budget is {format_gib(budget)}"
        )
    if kv_cache is not None and kv_cache.high < found.count_sequence_bytes(length):
        needed, left = format_gib(found.count_sequence_bytes(length)), format_gib(kv_cache.high)
        return f"one sequence of {length:,} tokens needs {needed} of KV cache, of at most {left}"
    if budget is not None:
        leaves = f"the budget leaves {format_gib(card - budget)} of the"
        if question.unified_memory:
            return (
                f"{leaves} machine, and it needs {format_range(found.outside)} GiB: vLLM would start, and it would hang"
            )
        return f"{leaves} card, and {format_range(found.outside)} GiB lie outside of it"
    return f"weights, activations and the KV cache are more than the card's {format_gib(card)}"


def _explain_margin(found: MemoryEstimate) -> str:
    host = found.question.host_memory_bytes
    if host is not None and found.host.high > host:
        return f"vLLM's processes need {format_range(found.host)} GiB of the host's {format_gib(host)}"
    if found.kv_cache is None or found.budget is None:
        return "with the higher estimates it is more than the card has"
    needed = format_gib(found.count_sequence_bytes(found.question.max_model_len or 1))
    return f"{format_range(found.kv_cache)} GiB are left for the KV cache, and one sequence needs {needed}"


def _explain_concurrency(found: MemoryEstimate) -> str:
    length, sequences = found.question.max_model_len or 1, found.question.max_num_seqs
    if not found.layout.block_bytes:
        return "It keeps nothing of a sequence: there is no KV cache."
    at_once = int(found.count_sequences(length) or 0)
    if at_once >= sequences:
        return f"All {sequences:,} sequences of {length:,} tokens fit at once."
    return (
        f"But {sequences:,} sequences of {length:,} tokens do not fit at once, {at_once:,} do: further ones wait or are"
        " preempted."
    )


def list_notes(found: MemoryEstimate) -> list[str]:
    """Return where the figures are bounds, and what might surprise in them."""
    return [*_note_layers(found), *_note_copies(found), *_note_omissions(found)]


def _note_layers(found: MemoryEstimate) -> Iterator[str]:
    shape, ranks = found.question.shape, found.question.tensor_parallel_size
    if shape.windowed_layers:
        yield (
            f"{shape.windowed_layers} layers keep only the last {shape.window_tokens or 0:,} tokens: bytes per token"
            " are an upper bound; tokens and sequences are counted as vLLM's hybrid KV cache manager holds them."
        )
    if shape.stateful_layers and shape.state_bytes is not None:
        yield (
            f"{shape.stateful_layers} layers keep {shape.state_bytes // ranks:,} bytes of each sequence instead of its"
            f" tokens; a block has {found.layout.block_tokens} tokens to be as large as one of these."
        )
    if shape.stateful_layers and shape.state_bytes is None:
        yield (
            f"{shape.stateful_layers} layers keep a state of each sequence whose size is not known here: tokens and"
            " sequences are an upper bound."
        )


def _note_copies(found: MemoryEstimate) -> Iterator[str]:
    shape, ranks = found.question.shape, found.question.tensor_parallel_size
    if shape.latent_width is not None and ranks > 1:
        yield "Latent attention keeps its whole vector on every GPU: tensor parallelism does not divide the KV cache."
    elif ranks > (count := shape.heads.count):
        yield f"{ranks} GPUs share {count} KV heads: each is kept {ranks // count} times."


def _note_omissions(found: MemoryEstimate) -> Iterator[str]:
    question, card, budget = found.question, found.question.gpu_memory_bytes, found.budget
    if question.shape.unknown_type is not None:
        yield (
            f"Models of type {question.shape.unknown_type!r} have not been checked against vLLM: the figures assume the"
            " layers of a usual decoder."
        )
    if question.has_more_weights:
        yield "The weights are those of the language model: an image or audio encoder adds its own."
    if question.has_more_activations:
        yield "vLLM's profiling of the encoder adds to the activations."
    if question.draft is not None:
        yield "The draft model is counted whole; one that shares its embeddings takes less."
    if question.unified_memory:
        offloaded = "; weights that are offloaded lie in the same memory" if question.cpu_offload_bytes else ""
        yield (
            f"{format_gib(LEFT_TO_THE_MACHINE_BYTES)} of the machine's one memory are left to its"
            f" system and to vLLM's own"
            f" processes{offloaded}. Swap and zram count as no room."
        )
        yield (
            "While vLLM loads, the page cache of the weights' files takes this memory too, and an allocation can fail"
            " although the rest is available (vllm-project/vllm#54200): drop the page cache while it loads."
        )
    elif card is not None and budget is not None and found.outside.low <= card - budget < found.outside.high:
        yield (
            f"Beside its budget vLLM takes {format_range(found.outside)} GiB of the card, and"
            f" {format_gib(card - budget)} are left"
            " for that."
        )


SMALLEST_LENGTH: Final = 256
"""Tokens; a server for shorter sequences is of no use to anyone."""

MOST_RANKS: Final = 64
SIXTEEN_BITS: Final = 2.0
HIGHEST_UTILIZATION: Final = 0.95

Option = tuple[str, str, str, Question]
"""Option, value, price, and the question with it."""


class Saving(Struct, frozen=True, kw_only=True):
    """Settings of vLLM, pairs of option and value, and their price."""

    settings: tuple[tuple[str, str], ...]
    price: str


def find_changes(found: MemoryEstimate) -> tuple[Saving, ...]:
    """Return every setting that surely lets vLLM start, with the nearest value that does, the cheapest first.

    Where a shorter `max_model_len` alone is not enough, also each setting that does together with one.
    """
    good: dict[tuple[str, ...], Saving] = {}
    for change, question in (*_shorten(found.question), *_list_candidates(found.question)):
        kind = tuple(option for option, _ in change.settings)
        if kind not in good and _can_start(question):
            good[kind] = change
    return tuple(good.values())


def _can_start(question: Question) -> bool:
    found = None if find_problem(question) else estimate_memory(question)
    return found is not None and can_start(found) is True


def _list_candidates(question: Question) -> Iterator[tuple[Saving, Question]]:
    enough = any(_can_start(shorter) for _, shorter in _shorten(question))
    for option, value, price, changed in (
        *_reduce_sequences(question),
        *_change_share(question),
        *_round_values(question),
        *_keep_less_on_host(question),
        *_widen(question),
    ):
        yield Saving(settings=((option, value),), price=price), changed
        for change, shorter in () if enough or find_problem(changed) else _shorten(changed):
            yield (Saving(settings=((option, value), *change.settings), price=f"{price}; {change.price}"), shorter)


def _shorten(question: Question) -> Iterator[tuple[Saving, Question]]:
    found, asked = estimate_memory(question), question.max_model_len
    longest = (found.find_longest(1) if found else None) or 0
    if longest >= SMALLEST_LENGTH and (asked is None or longest < asked):
        settings = (("--max-model-len", str(longest)),)
        yield (Saving(settings=settings, price="longer requests are refused"), replace(question, max_model_len=longest))


def _reduce_sequences(question: Question) -> Iterator[Option]:
    """Yield ever fewer sequences at once: sampling needs room for the logits of each."""
    sequences = question.max_num_seqs // 2
    while sequences >= 1:
        yield "--max-num-seqs", str(sequences), "more requests wait", replace(question, max_num_seqs=sequences)
        sequences //= 2


def _change_share(question: Question) -> Iterator[Option]:
    """Yield a larger share of the card; of a machine's one memory all but what it needs, be that more or less."""
    card = question.gpu_memory_bytes
    if question.unified_memory and card is not None and question.kv_cache_memory_bytes is None:
        share = floor((card - estimate_outside(question).high) / card * 100) / 100
        if share > 0:
            price = "the system and vLLM's own processes keep what they need"
            yield "--gpu-memory-utilization", str(share), price, replace(question, gpu_memory_utilization=share)
    elif question.kv_cache_memory_bytes is None and question.gpu_memory_utilization < HIGHEST_UTILIZATION:
        changed = replace(question, gpu_memory_utilization=HIGHEST_UTILIZATION)
        price = "less is left for what lies beside the budget"
        yield "--gpu-memory-utilization", str(HIGHEST_UTILIZATION), price, changed


def _round_values(question: Question) -> Iterator[Option]:
    shape, dtype = question.shape, question.kv_cache_dtype
    if dtype in {"float16", "bfloat16"} or (dtype == "auto" and shape.kv_dtype_bytes >= SIXTEEN_BITS):
        yield "--kv-cache-dtype", "fp8", "keys and values are rounded", replace(question, kv_cache_dtype="fp8")
    if shape.quantisation is None:
        yield (
            "--quantization",
            "fp8",
            "weights are rounded",
            replace(question, shape=shape.apply_quantisation("fp8", 1.0)),
        )


def _keep_less_on_host(question: Question) -> Iterator[Option]:
    host = question.host_memory_bytes
    if host is None or not question.kv_offloading_bytes:
        return
    rest = estimate_host(replace(question, kv_offloading_bytes=0)).high
    spare = max(0, floor((host - rest) / OFFLOAD_HIGH / question.data_parallel_size / GIB))
    price = "fewer prefixes are kept" if spare else "no prefix is kept on the host"
    yield "--kv-offloading-size", str(spare), price, replace(question, kv_offloading_bytes=spare * GIB)


def _widen(question: Question) -> Iterator[Option]:
    for ranks in range(question.tensor_parallel_size + 1, MOST_RANKS + 1):
        wider = replace(question, tensor_parallel_size=ranks)
        yield "--tensor-parallel-size", str(ranks), f"{wider.gpus} GPUs instead of {question.gpus}", wider
