"""The answer in sentences: whether it fits, why, and what to know about the figures."""

from collections.abc import Iterator
from math import floor
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
from vllm_headroom_tools.sizing.question import Question, find_problem


def list_unknown(found: MemoryEstimate) -> list[str]:
    """Return what is not known and needed to judge whether it fits, each with the options that set it."""
    question = found.question
    kind = question.shape.unknown_type
    needs = (
        (
            None if kind else "",
            f"what models of type {kind!r} keep (--layers, --kv-heads and --head-size say it)",
        ),
        (question.gpu_memory_bytes, "the card (--gpu-memory)"),
        (found.weights, "the weights (--parameters)"),
        (
            None if question.has_more_weights else "",
            "the image or audio encoder's weights (--parameters)",
        ),
        (
            None if question.has_more_activations else "",
            "its largest image or sound (else --language-model-only)",
        ),
        (found.activations, "the activations (--hidden-size and --vocabulary)"),
        (question.max_model_len, "the length (--max-model-len)"),
    )
    return [name for value, name in needs if value is None]


def explain_verdict(found: MemoryEstimate) -> str:
    """Return whether vLLM starts, and why."""
    answer, missing, host = can_start(found), list_unknown(found), found.question.host_memory_bytes
    if answer:
        return f"It fits: vLLM starts. {_explain_concurrency(found)}"
    if answer is False:
        return f"It does not fit: {_explain_obstacle(found)}."
    if missing:
        return f"Cannot tell whether it fits: not known {'is' if len(missing) == 1 else 'are'} {', '.join(missing)}."
    if host is not None and found.host.high > host:
        margin = (
            f"vLLM's processes need {format_range(found.host)} GiB of the host's {format_gib(host)}"
        )
    elif found.kv_cache is None or found.budget is None:
        margin = "with the higher estimates it is more than the card has"
    else:
        needed = format_gib(found.count_sequence_bytes(found.question.max_model_len or 1))
        margin = f"{format_range(found.kv_cache)} GiB are left for the KV cache, and one sequence needs {needed}"
    return f"Too close to call: {margin}."


def format_range(amount: Range) -> str:
    """Return a range as a number of GiB, or two."""
    low = f"{amount.low / GIB:,.2f}"
    return low if amount.low == amount.high else f"{low} to {amount.high / GIB:,.2f}"


def _explain_obstacle(found: MemoryEstimate) -> str:
    question, kv_cache, overhead = found.question, found.kv_cache, found.overhead
    card, budget, length = question.gpu_memory_bytes or 0, found.budget, question.max_model_len or 1
    host, needed = question.host_memory_bytes, found.count_sequence_bytes(length)
    if host is not None and found.host.low > host:
        return f"vLLM's processes need at least {format_gib(found.host.low)} of the host's {format_gib(host)}"
    if budget is not None and overhead is not None and kv_cache is not None and kv_cache.high <= 0:
        rest = format_gib((found.weights or 0) + overhead.low)
        return f"weights and activations need at least {rest} of each GPU, and the budget is {format_gib(budget)}"
    if kv_cache is not None and kv_cache.high < needed:
        left = format_gib(kv_cache.high)
        return f"one sequence of {length:,} tokens needs {format_gib(needed)} of KV cache, of at most {left}"
    if budget is None:
        return f"weights, activations and the KV cache are more than the card's {format_gib(card)}"
    leaves = f"the budget leaves {format_gib(card - budget)} of the"
    outside = f"{format_range(found.outside)} GiB"
    if question.unified_memory:
        return f"{leaves} machine, and it needs {outside}: vLLM would start, and it would hang"
    return f"{leaves} card, and {outside} lie outside of it"


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
    return [*_note_shape(found), *_note_omissions(found)]


def _note_shape(found: MemoryEstimate) -> Iterator[str]:
    shape, ranks = found.question.shape, found.question.tensor_parallel_size
    windowed, stateful, heads = shape.windowed_layers, shape.stateful_layers, shape.heads.count
    if windowed:
        yield (
            f"{windowed} layers keep only the last {shape.window_tokens or 0:,} tokens: bytes per token are an upper"
            " bound; tokens and sequences are counted as vLLM's hybrid KV cache manager holds them."
        )
    if stateful and shape.state_bytes is not None:
        yield (
            f"{stateful} layers keep {shape.state_bytes // ranks:,} bytes of each sequence instead of its tokens; a"
            f" block has {found.layout.block_tokens} tokens to be as large as one of these."
        )
    elif stateful:
        what = f"{stateful} layers keep a state of each sequence whose size is not known here"
        yield f"{what}: tokens and sequences are an upper bound."
    if shape.latent_width is not None and ranks > 1:
        yield "Latent attention keeps its whole vector on every GPU: tensor parallelism does not divide the KV cache."
    elif ranks > heads:
        yield f"{ranks} GPUs share {heads} KV heads: each is kept {ranks // heads} times."


def _note_omissions(found: MemoryEstimate) -> Iterator[str]:
    question, card, budget = found.question, found.question.gpu_memory_bytes, found.budget
    if (kind := question.shape.unknown_type) is not None:
        unchecked = f"Models of type {kind!r} have not been checked against vLLM"
        yield f"{unchecked}: the figures assume the layers of a usual decoder."
    if question.has_more_weights:
        yield "The weights are those of the language model: an image or audio encoder adds its own."
    if question.has_more_activations:
        yield "vLLM's profiling of the encoder adds to the activations."
    if question.draft is not None:
        yield "The draft model is counted whole; one that shares its embeddings takes less."
    if question.unified_memory:
        offloaded = (
            "; weights that are offloaded lie in the same memory"
            if question.cpu_offload_bytes
            else ""
        )
        yield (
            f"{format_gib(LEFT_TO_THE_MACHINE_BYTES)} of the machine's one memory are left to its system and to vLLM's"
            f" own processes{offloaded}. Swap and zram count as no room."
        )
        yield (
            "While vLLM loads, the page cache of the weights' files takes this memory too, and an allocation can fail"
            " although the rest is available (vllm-project/vllm#54200): drop the page cache while it loads."
        )
    elif (
        card is not None
        and budget is not None
        and found.outside.low <= card - budget < found.outside.high
    ):
        takes = f"Beside its budget vLLM takes {format_range(found.outside)} GiB of the card"
        yield f"{takes}, and {format_gib(card - budget)} are left for that."


SMALLEST_LENGTH: Final = 256
"""Tokens; a server for shorter sequences is of no use to anyone."""

SIXTEEN_BITS: Final = 2.0
HIGHEST_UTILIZATION: Final = 0.95

Settings = tuple[tuple[str, str], ...]
"""Pairs of option and value."""


class Saving(Struct, frozen=True):
    """Settings of vLLM and their price."""

    settings: Settings
    price: str


def find_changes(found: MemoryEstimate) -> tuple[Saving, ...]:
    """Return every setting that surely lets vLLM start, with the nearest value that does, the cheapest first.

    Where a shorter `max_model_len` alone is not enough, also each setting that does together with one.
    """
    tried = list(_shorten(found.question))
    is_enough = any(_can_start(shorter) for *_, shorter in tried)
    for settings, price, changed in _list_options(found.question):
        tried.append((settings, price, changed))
        for added, cost, both in () if is_enough or find_problem(changed) else _shorten(changed):
            tried.append(((*settings, *added), f"{price}; {cost}", both))
    good: dict[tuple[str, ...], Saving] = {}
    for settings, price, changed in tried:
        kind = tuple(option for option, _ in settings)
        if kind not in good and _can_start(changed):
            good[kind] = Saving(settings, price)
    return tuple(good.values())


def _can_start(question: Question) -> bool:
    return not find_problem(question) and can_start(estimate_memory(question)) is True


def _shorten(question: Question) -> Iterator[tuple[Settings, str, Question]]:
    longest, asked = estimate_memory(question).find_longest(1) or 0, question.max_model_len
    if longest >= SMALLEST_LENGTH and (asked is None or longest < asked):
        shorter = replace(question, max_model_len=longest)
        yield (("--max-model-len", str(longest)),), "longer requests are refused", shorter


def _list_options(question: Question) -> Iterator[tuple[Settings, str, Question]]:
    shape, dtype, host = question.shape, question.kv_cache_dtype, question.host_memory_bytes
    for halvings in range(
        1, question.max_num_seqs.bit_length()
    ):  # sampling needs room for the logits of each
        sequences = question.max_num_seqs >> halvings
        yield (
            (("--max-num-seqs", str(sequences)),),
            "more requests wait",
            replace(question, max_num_seqs=sequences),
        )
    if question.kv_cache_memory_bytes is None:
        yield from _change_share(question)
    if dtype in {"float16", "bfloat16"} or (
        dtype == "auto" and shape.kv_dtype_bytes >= SIXTEEN_BITS
    ):
        yield (
            (("--kv-cache-dtype", "fp8"),),
            "keys and values are rounded",
            replace(question, kv_cache_dtype="fp8"),
        )
    if shape.quantisation is None:
        rounded = replace(question, shape=shape.apply_quantisation("fp8", 1.0))
        yield (("--quantization", "fp8"),), "weights are rounded", rounded
    if host is not None and question.kv_offloading_bytes:
        rest = estimate_host(replace(question, kv_offloading_bytes=0)).high
        spare = max(0, floor((host - rest) / OFFLOAD_FACTOR / question.data_parallel_size / GIB))
        price = "fewer prefixes are kept" if spare else "no prefix is kept on the host"
        yield (
            (("--kv-offloading-size", str(spare)),),
            price,
            replace(question, kv_offloading_bytes=spare * GIB),
        )
    for ranks in range(question.tensor_parallel_size + 1, 64 + 1):
        wider = replace(question, tensor_parallel_size=ranks)
        yield (
            (("--tensor-parallel-size", str(ranks)),),
            f"{wider.gpus} GPUs instead of {question.gpus}",
            wider,
        )


def _change_share(question: Question) -> Iterator[tuple[Settings, str, Question]]:
    """Yield a larger share of the card; of a machine's one memory all but what it needs, be that more or less."""
    card, share = question.gpu_memory_bytes, HIGHEST_UTILIZATION
    price = "less is left for what lies beside the budget"
    if is_unified := question.unified_memory and card is not None:
        share = floor((card - estimate_outside(question).high) / card * 100) / 100
        price = "the system and vLLM's own processes keep what they need"
    if share > (0 if is_unified else question.gpu_memory_utilization):
        yield (
            (("--gpu-memory-utilization", str(share)),),
            price,
            replace(question, gpu_memory_utilization=share),
        )
