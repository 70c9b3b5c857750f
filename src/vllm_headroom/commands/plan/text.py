"""The answer for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import floor
from typing import Final

from vllm_headroom.commands.plan.changes import changes
from vllm_headroom.commands.plan.verdict import notes, spread, verdict
from vllm_headroom.commands.terminal import paragraphs, wrapped
from vllm_headroom.sizing.estimate import Estimate, fits, longest, most
from vllm_headroom.sizing.overhead import LIBRARIES, Range
from vllm_headroom.sizing.question import UTILIZATION
from vllm_headroom.sizing.shape import ModelShape
from vllm_headroom.units import GIB, gib

BILLION: Final = 10**9
UNKNOWN: Final = "not known"


def text(found: Estimate) -> Iterator[str]:
    """Yield the whole answer."""
    parts = (_heading(found), _memory(found), _cache(found), _tables(found), _answer(found))
    yield from paragraphs(parts)


def _heading(found: Estimate) -> Iterator[str]:
    question, shape = found.question, found.question.shape
    yield f"The model: {', '.join(_model(shape))}."
    spread = (
        ("tensor", question.tensor_parallel_size),
        ("pipeline", question.pipeline_parallel_size),
        ("data", question.data_parallel_size),
    )
    ways = ", ".join(f"{name} parallel {count}" for name, count in spread if count > 1)
    card = "size not given" if question.gpu_memory_bytes is None else gib(question.gpu_memory_bytes)
    yield f"On {question.gpus} GPU{'s' if question.gpus > 1 else ''}, {card}{f' each, {ways}' if ways else ''}."


def _model(shape: ModelShape) -> Iterator[str]:
    yield f"{shape.layers} layers"
    if shape.attention_heads is not None:
        yield f"{shape.attention_heads} attention heads"
    if shape.latent_width is not None:
        yield f"latent attention of {shape.latent_width} values"
    else:
        yield f"{shape.heads.count} KV heads of {shape.heads.key_size}"
    if shape.windowed_layers:
        yield f"{shape.windowed_layers} layers with a window of {shape.window_tokens or 0:,} tokens"
    if shape.stateful_layers:
        yield f"{shape.stateful_layers} layers with a state"
    yield shape.quantisation or f"{shape.dtype_bytes * 8:.0f} bits"


def _memory(found: Estimate) -> Iterator[str]:
    question = found.question
    yield f"{'Of each GPU':<44}GiB"
    if found.budget is not None:
        usual = "vLLM's default since 0.20" if question.gpu_memory_utilization == UTILIZATION else ""
        yield _line(f"budget, {question.gpu_memory_utilization:g} of the card", found.budget, usual)
    yield _line("weights", found.weights, _weights_source(found))
    if question.max_loras:
        yield _line(
            "  of them for LoRA", question.adapters_bytes, f"{question.max_loras} of rank {question.max_lora_rank}"
        )
    if question.cpu_offload_bytes:
        yield _line("  beside them on the host", question.cpu_offload_bytes)
    batch, logits = f"{question.max_num_batched_tokens:,} tokens", f"the logits of {question.max_num_seqs:,} sequences"
    items = f", {question.encoder_items} images" if question.largest else ""
    yield _line("activations", found.activations, f"{batch} in a batch{items}, or {logits}")
    yield _line("CUDA graphs", found.graphs)
    yield _line("CUDA libraries", LIBRARIES)
    left = (
        None if found.kv_cache is None else Range(low=max(0.0, found.kv_cache.low), high=max(0.0, found.kv_cache.high))
    )
    yield _line("KV cache", left, "as told" if question.kv_cache_memory_bytes else "what is left")
    besides = ("CUDA context", *(("NCCL",) if question.gpus > 1 else ()))
    besides += ("the system", "vLLM's own processes") if question.unified_memory else ()
    yield _line("beside the budget", found.outside, ", ".join(besides))


def _weights_source(found: Estimate) -> str:
    question = found.question
    if question.checkpoint_bytes is not None:
        return "from the checkpoint's size"
    if question.parameters is not None:
        return f"{question.parameters / BILLION:,.2f} billion parameters"
    return "parameters counted from the configuration" if found.weights is not None else ""


def _line(name: str, amount: float | Range | None, remark: str = "") -> str:
    return f"  {name:<28}{shown(amount):>17}  {remark}".rstrip()


def shown(amount: float | Range | None) -> str:
    """Return an amount of memory in GiB."""
    if isinstance(amount, Range):
        return spread(amount)
    return UNKNOWN if amount is None else f"{amount / GIB:,.2f}"


def _cache(found: Estimate) -> Iterator[str]:
    question, bound = found.question, "at most " if found.question.shape.windowed_layers else ""
    layout, length, sequences = found.layout, question.max_model_len, question.max_num_seqs
    part = "" if question.shape.keeps_every_token else f" in {layout.block_layers} layers"
    block = f"{layout.block_bytes:,} per block of {layout.block_tokens}{part}"
    yield "KV cache"
    if not layout.block_bytes:
        yield "  none: the model keeps nothing of a sequence"
        return
    yield f"  {bound}{found.bytes_per_token:,} bytes per token, {block}"
    if question.gpus > 1:
        yield f"  {bound}{found.engine_bytes_per_token:,} bytes per token on all GPUs together"
    if length is not None:
        size, blocks = gib(sequences * found.sequence_bytes(length)), sequences * layout.blocks(length)
        yield f"  {sequences:,} x {length:,} tokens (max_num_seqs x max_model_len) take {size}, {blocks:,} blocks"
    if not found.blocks:
        return
    if found.capacity_tokens is not None:
        least = "" if question.kv_cache_memory_bytes else "at least "
        yield f"  holds {least}{found.capacity_tokens:,} tokens, in {found.blocks:,} blocks"
    for tokens, name in ((length, "max_model_len"), (question.typical_len, "typical")):
        at_once = None if tokens is None else found.sequences(tokens)
        if at_once is not None:
            yield f"  {floor(at_once * 10) / 10:,.1f} sequences of {tokens:,} tokens ({name}) at once"


def _tables(found: Estimate) -> Iterator[str]:
    if not found.blocks:
        return
    by_sequences, by_length = longest(found), most(found)
    yield "The largest that fits at once"
    yield from _table(("max_num_seqs", "max_model_len"), by_sequences)
    yield ""
    yield from _table(("max_model_len", "max_num_seqs"), by_length)


def _table(head: tuple[str, str], rows: Iterable[tuple[int, int]]) -> Iterator[str]:
    cells = list(rows)
    widths = [max(len(f"{number:,}") for number in pair) for pair in cells]
    for place, name in enumerate(head):
        numbers = "  ".join(f"{pair[place]:>{width},}" for pair, width in zip(cells, widths, strict=True))
        yield f"  {name:<15}{numbers}"


def _answer(found: Estimate) -> Iterator[str]:
    for sentence in (*notes(found), verdict(found)):
        yield from wrapped("", sentence)
    if fits(found) is True or found.kv_cache is None:
        return
    tried = changes(found)
    yield "Any of these would make it fit:" if tried else "No change of one or two settings would make it fit."
    for change in tried:
        yield f"  {' '.join(f'{option} {value}' for option, value in change.settings):<56}  {change.price}"
