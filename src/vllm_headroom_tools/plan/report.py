"""The answer for scripts, and what the probe measured in an engine that serves the model."""

from collections.abc import Iterable, Iterator, Sequence
from math import floor
from pathlib import Path
from typing import Any, Final

from vllm_headroom.model import EngineParts
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.units import GIB, format_gib
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.plan.verdict import (
    SMALLEST_LENGTH,
    Saving,
    explain_verdict,
    find_changes,
    format_range,
    list_notes,
    list_unknown,
)
from vllm_headroom_tools.sizing.estimate import (
    MemoryEstimate,
    Range,
    can_start,
    list_longest,
    list_most,
)
from vllm_headroom_tools.sizing.question import UTILIZATION
from vllm_headroom_tools.terminal import join_paragraphs, wrap_text
from vllm_headroom_tools.trace import BadInput

UNKNOWN: Final = "not known"

Pair = tuple[str, float | Range | None, int | None]
"""A part of the memory, what is planned for it, and what was measured."""


def build_report(found: MemoryEstimate, measured: EngineParts | None) -> Report:
    """Return the plan, and what a worker of the engine measured on its GPU, None where no file was given.

    Bytes are of each GPU unless their name says otherwise, and null is what is not known.
    """
    fits = can_start(found)
    verdict = (
        Conclusion.CANNOT_TELL if fits is None else Conclusion.GOOD if fits else Conclusion.NOT_GOOD
    )
    headline = explain_verdict(found)
    changes = () if fits else find_changes(found)
    pairs: tuple[Pair, ...] = ()
    if measured is not None:
        pairs = (
            ("budget", found.budget, measured.requested_bytes),
            ("weights", found.weights, measured.weights_bytes),
            ("activations", found.activations, measured.activation_peak_bytes),
            ("CUDA graphs", found.graphs, measured.cuda_graphs_bytes),
            ("KV cache", found.kv_cache, measured.kv_cache_bytes),
        )
    fix = tuple(" ".join(map(" ".join, each.settings)) for each in changes)
    notes = (Finding("note", Conclusion.GOOD, each) for each in list_notes(found))
    measured_bytes = {f"{name.replace(' ', '_').lower()}_bytes": value for name, _, value in pairs}
    return Report(
        verdict=verdict,
        headline=headline,
        findings=(Finding("fits", verdict, headline, fix), *notes),
        data={"fits": fits}
        | _build_data(found, changes)
        | ({"measured": measured_bytes} if pairs else {}),
        lines=_render_text(found, changes, pairs),
    )


def _render_text(
    found: MemoryEstimate, changes: Sequence[Saving], pairs: Iterable[Pair]
) -> Iterator[str]:
    tables: list[str] = []
    if found.blocks:
        tables = [
            "The largest that fits at once",
            *_format_table(("max_num_seqs", "max_model_len"), list_longest(found)),
            "",
            *_format_table(("max_model_len", "max_num_seqs"), list_most(found)),
        ]
    measured = [
        f"  {name:<22}{format_amount(planned):>17}{format_amount(amount):>12}"
        for name, planned, amount in pairs
    ]
    head = [f"{'Of each GPU, in GiB':<24}{'planned':>17}{'measured':>12}"] if measured else []
    yield from join_paragraphs(
        (
            _format_heading(found),
            _format_memory(found),
            _format_cache(found),
            tables,
            _format_answer(found, changes),
            [*head, *measured],
        )
    )


def _format_heading(found: MemoryEstimate) -> Iterator[str]:
    question, shape = found.question, found.question.shape
    model = [f"{shape.layers} layers"]
    if shape.attention_heads is not None:
        model.append(f"{shape.attention_heads} attention heads")
    if shape.latent_width is not None:
        model.append(f"latent attention of {shape.latent_width} values")
    else:
        model.append(f"{shape.heads.count} KV heads of {shape.heads.key_size}")
    if shape.windowed_layers:
        model.append(
            f"{shape.windowed_layers} layers with a window of {shape.window_tokens or 0:,} tokens"
        )
    if shape.stateful_layers:
        model.append(f"{shape.stateful_layers} layers with a state")
    yield f"The model: {', '.join(model)}, {shape.quantisation or f'{shape.dtype_bytes * 8:.0f} bits'}."
    spread = (
        ("tensor", question.tensor_parallel_size),
        ("pipeline", question.pipeline_parallel_size),
        ("data", question.data_parallel_size),
    )
    ways = ", ".join(f"{name} parallel {count}" for name, count in spread if count > 1)
    card = (
        "size not given"
        if question.gpu_memory_bytes is None
        else format_gib(question.gpu_memory_bytes)
    )
    yield f"On {question.gpus} GPU{'s' if question.gpus > 1 else ''}, {card}{f' each, {ways}' if ways else ''}."


def _format_memory(found: MemoryEstimate) -> Iterator[str]:
    question = found.question
    yield f"{'Of each GPU':<44}GiB"
    if found.budget is not None:
        usual = (
            "vLLM's default since 0.20" if question.gpu_memory_utilization == UTILIZATION else ""
        )
        yield from _format_line(
            f"budget, {question.gpu_memory_utilization:g} of the card", found.budget, usual
        )
    source = "from the checkpoint's size"
    if question.checkpoint_bytes is None and question.parameters is not None:
        source = f"{question.parameters / 10**9:,.2f} billion parameters"
    elif question.checkpoint_bytes is None:
        source = "parameters counted from the configuration" if found.weights is not None else ""
    yield from _format_line("weights", found.weights, source)
    if question.max_loras:
        yield from _format_line(
            "  of them for LoRA",
            question.adapters_bytes,
            f"{question.max_loras} of rank {question.max_lora_rank}",
        )
    if question.cpu_offload_bytes:
        yield from _format_line("  beside them on the host", question.cpu_offload_bytes)
    batch, logits = (
        f"{question.max_num_batched_tokens:,} tokens",
        f"the logits of {question.max_num_seqs:,} sequences",
    )
    items = f", {question.encoder_items} images" if question.largest else ""
    yield from _format_line(
        "activations", found.activations, f"{batch} in a batch{items}, or {logits}"
    )
    yield from _format_line("CUDA graphs", found.graphs)
    yield from _format_line(
        "CUDA libraries", found.rest, "the sampler, and what the driver reserves"
    )
    left = (
        None
        if found.kv_cache is None
        else Range(low=max(0.0, found.kv_cache.low), high=max(0.0, found.kv_cache.high))
    )
    yield from _format_line(
        "KV cache", left, "as set" if question.kv_cache_memory_bytes else "what is left"
    )
    besides = ("CUDA context", *(("NCCL",) if question.gpus > 1 else ()))
    besides += ("the system", "vLLM's own processes") if question.unified_memory else ()
    yield from _format_line("beside the budget", found.outside, ", ".join(besides))
    if question.host_memory_bytes or question.cpu_offload_bytes or question.kv_offloading_bytes:
        yield from _format_line(
            "host memory of all", found.host, "offloads take up to 1.92 times their size"
        )


def _format_line(name: str, amount: float | Range | None, remark: str = "") -> list[str]:
    head = f"  {name:<28}{format_amount(amount):>17}"
    return wrap_text(f"{head}  ", remark) if remark else [head]


def format_amount(amount: float | Range | None) -> str:
    """Return an amount of memory in GiB."""
    if isinstance(amount, Range):
        return format_range(amount)
    return UNKNOWN if amount is None else f"{amount / GIB:,.2f}"


def _format_cache(found: MemoryEstimate) -> Iterator[str]:
    question, bound = found.question, "at most " if found.question.shape.windowed_layers else ""
    layout, length, sequences = found.layout, question.max_model_len, question.max_num_seqs
    part = "" if question.shape.has_every_token else f" in {layout.block_layers} layers"
    block = f"{layout.block_bytes:,} per block of {layout.block_tokens}{part}"
    yield "KV cache"
    if not layout.block_bytes:
        yield "  none: the model keeps nothing of a sequence"
        return
    yield f"  {bound}{found.bytes_per_token:,} bytes per token, {block}"
    if question.gpus > 1:
        yield f"  {bound}{found.engine_bytes_per_token:,} bytes per token on all GPUs together"
    if length is not None:
        blocks = sequences * layout.count_blocks(length)
        size = format_gib(blocks * layout.block_bytes)
        yield f"  {sequences:,} x {length:,} tokens (max_num_seqs x max_model_len) take {size}, {blocks:,} blocks"
    if not found.blocks:
        return
    if found.capacity_tokens is not None:
        least = "" if question.kv_cache_memory_bytes else "at least "
        yield f"  holds {least}{found.capacity_tokens:,} tokens, in {found.blocks:,} blocks"
    for tokens, name in ((length, "max_model_len"), (question.typical_len, "typical")):
        at_once = None if tokens is None else found.count_sequences(tokens)
        if at_once is not None:
            yield f"  {floor(at_once * 10) / 10:,.1f} sequences of {tokens:,} tokens ({name}) at once"


def _format_table(head: tuple[str, str], rows: Iterable[tuple[int, int]]) -> Iterator[str]:
    columns = [[f"{number:,}" for number in pair] for pair in rows]
    for place, name in enumerate(head):
        numbers = "  ".join(f"{column[place]:>{max(map(len, column))}}" for column in columns)
        yield f"  {name:<15}{numbers}"


def _format_answer(found: MemoryEstimate, changes: Sequence[Saving]) -> Iterator[str]:
    for sentence in (*list_notes(found), explain_verdict(found)):
        yield from wrap_text("", sentence)
    if can_start(found) is True or found.kv_cache is None:
        return
    if changes:
        yield "Any of these would make it fit:"
    elif not list_unknown(found):
        yield f"No change of one or two settings would make it fit for {SMALLEST_LENGTH} tokens or more."
    written = [(" ".join(map(" ".join, change.settings)), change.price) for change in changes]
    width = max((len(settings) for settings, _ in written), default=0)
    for settings, price in written:
        yield from wrap_text(f"  {settings:<{width}}  ", price)


SETTINGS: Final = (
    "gpus",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "gpu_memory_bytes",
    "unified_memory",
    "host_memory_bytes",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "typical_len",
)


def _build_data(found: MemoryEstimate, changes: Iterable[Saving]) -> dict[str, Any]:
    question = found.question
    length, sequences = question.max_model_len, question.max_num_seqs
    return {
        "unknown": list_unknown(found),
        "notes": list_notes(found),
        "changes": [{"settings": dict(each.settings), "price": each.price} for each in changes],
        **{name: getattr(question, name) for name in SETTINGS},
        "block_size": found.layout.block_tokens,
        "bytes_per_token": found.bytes_per_token,
        "bytes_per_token_is_upper_bound": question.shape.windowed_layers > 0,
        "bytes_per_token_all_gpus": found.engine_bytes_per_token,
        "bytes_per_block": found.layout.block_bytes or None,
        "weights_bytes": found.weights,
        "lora_bytes": question.adapters_bytes,
        "unknown_architecture": question.shape.unknown_type,
        "budget_bytes": None if found.budget is None else int(found.budget),
        "encoder_items": question.encoder_items,
        "activation_bytes": _split_range(found.activations),
        "cuda_graph_bytes": _split_range(found.graphs),
        "library_bytes": _split_range(found.rest),
        "outside_budget_bytes": _split_range(found.outside),
        "host_bytes": _split_range(found.host),
        "kv_cache_bytes": _split_range(found.kv_cache),
        "kv_capacity_tokens": found.capacity_tokens,
        "kv_capacity_blocks": found.blocks,
        "sequence_bytes": None if length is None else found.count_sequence_bytes(length),
        "sequences_at_max_model_len": None if length is None else found.count_sequences(length),
        "sequences_at_typical_len": found.count_sequences(question.typical_len),
        "all_at_once_bytes": None
        if length is None
        else sequences * found.count_sequence_bytes(length),
        "all_at_once_blocks": None
        if length is None
        else sequences * found.layout.count_blocks(length),
        "largest_max_model_len": [
            {"max_num_seqs": count, "max_model_len": size} for count, size in list_longest(found)
        ],
        "largest_max_num_seqs": [
            {"max_model_len": size, "max_num_seqs": count} for size, count in list_most(found)
        ],
    }


def _split_range(amount: Range | None) -> dict[str, int] | None:
    return None if amount is None else {"low": int(amount.low), "high": int(amount.high)}


MOST_BYTES: Final = 16 * 1024


def read_parts(file: Path) -> EngineParts:
    """Read the parts of a worker's memory from a file of the probe; raises BadInput."""
    try:
        with file.open("rb") as stream:
            found = parse_probe(stream.read(MOST_BYTES))
    except OSError as error:
        raise BadInput(f"--probe {file}: cannot be read: {error.strerror}") from error
    if isinstance(found, str):
        raise BadInput(f"--probe {file}: {found}")
    if found[0].parts is None:
        raise BadInput(
            f"--probe {file}: it is of a process without a GPU; take the file of a worker, whose role is worker"
        )
    return found[0].parts
