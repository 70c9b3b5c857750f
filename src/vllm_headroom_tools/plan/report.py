"""The report of `plan`, with the probe's measurements if a probe file is given."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import floor
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from vllm_headroom.model import WorkerMeasurements
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.units import GIB, format_gib
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.plan.engine_log import build_measured_data, describe_log
from vllm_headroom_tools.plan.verdict import (
    SMALLEST_LENGTH,
    Saving,
    explain_verdict,
    find_changes,
    list_estimate_notes,
    list_unknown,
)
from vllm_headroom_tools.sizing.assumptions import Assumption, Origin, Range, StartAssumptions
from vllm_headroom_tools.sizing.checks import can_start, check_start, format_range
from vllm_headroom_tools.sizing.estimate import (
    MemoryEstimate,
    list_longest,
    list_most_sequences,
)
from vllm_headroom_tools.sizing.measured import WEIGHT_SETTINGS
from vllm_headroom_tools.sizing.question import Question
from vllm_headroom_tools.terminal import join_paragraphs, wrap_text

UNKNOWN_AMOUNT: Final = "not known"


class PlannedPart(Struct, frozen=True, kw_only=True):
    """One part of a GPU's memory, as planned and as measured; unknown figures are None."""

    # The name in the text.
    name: str
    # The name in the JSON.
    key: str
    planned: float | Range | None
    measured_bytes: int | None


def build_report(estimate: MemoryEstimate, measured: WorkerMeasurements | None) -> Report:
    """Return the report on the plan, compared with the measurements of an engine worker.

    `measured` is None if no probe file was given. In the data, bytes are per GPU unless the name
    says otherwise. Unknown figures are None.
    """
    fits = can_start(estimate)
    verdict = _conclude(fits)
    headline = explain_verdict(estimate)
    changes: tuple[Saving, ...] = ()
    # If the model fits, there is nothing to change.
    if not fits:
        changes = find_changes(estimate)
    parts = _compare_parts(estimate, measured)
    fix = tuple(_join_settings(change) for change in changes)
    notes = (Finding("note", Conclusion.GOOD, note) for note in list_estimate_notes(estimate))
    data = {
        "fits": fits,
        **build_data(estimate, changes),
        "log": build_measured_data(estimate),
        "traffic": None,
    }
    if parts:
        data["measured"] = {part.key: part.measured_bytes for part in parts}
    return Report(
        verdict=verdict,
        headline=headline,
        findings=(Finding("fits", verdict, headline, fix), *notes),
        data=data,
        lines=chain(describe_log(estimate), _render_text(estimate, changes, parts)),
    )


def _conclude(fits: bool | None) -> Conclusion:  # noqa: FBT001 - an answer, not a switch
    if fits is None:
        return Conclusion.CANNOT_TELL
    return Conclusion.GOOD if fits else Conclusion.NOT_GOOD


def _compare_parts(
    estimate: MemoryEstimate, measured: WorkerMeasurements | None
) -> tuple[PlannedPart, ...]:
    """Return the planned and measured bytes of each part, or nothing if nothing was measured."""
    if measured is None:
        return ()
    return (
        PlannedPart(
            name="budget",
            key="budget_bytes",
            planned=estimate.budget_bytes,
            measured_bytes=measured.requested_bytes,
        ),
        PlannedPart(
            name="weights",
            key="weights_bytes",
            planned=estimate.weights_bytes,
            measured_bytes=measured.weights_bytes,
        ),
        PlannedPart(
            name="activations",
            key="activations_bytes",
            planned=estimate.activations,
            measured_bytes=measured.activation_peak_bytes,
        ),
        PlannedPart(
            name="CUDA graphs",
            key="cuda_graphs_bytes",
            planned=estimate.graphs,
            measured_bytes=measured.cuda_graphs_bytes,
        ),
        PlannedPart(
            name="KV cache",
            key="kv_cache_bytes",
            planned=estimate.kv_cache,
            measured_bytes=measured.kv_cache_bytes,
        ),
    )


def _join_settings(change: Saving) -> str:
    """Return the options and their values as they would be typed."""
    return " ".join(f"{option} {value}".strip() for option, value in change.settings)


def _render_text(
    estimate: MemoryEstimate, changes: Sequence[Saving], parts: Sequence[PlannedPart]
) -> Iterator[str]:
    """Yield the report's lines: model, memory, KV cache, tables, answer and measured parts."""
    yield from join_paragraphs(
        (
            _format_heading(estimate),
            _format_memory(estimate),
            _format_cache(estimate),
            _format_tables(estimate),
            _format_answer(estimate, changes),
            _format_parts(parts),
        )
    )


def _format_heading(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield the lines about the model, the card and the engine's options."""
    question = estimate.question
    shape = question.shape
    model = [f"{shape.layers} layers"]
    if shape.attention_heads is not None:
        model.append(f"{shape.attention_heads} attention heads")
    if shape.latent_width is not None:
        model.append(f"latent attention of {shape.latent_width} values")
    else:
        model.append(f"{shape.heads.count} KV heads of {shape.heads.key_size}")
    # Sliding-window layers drop old tokens, so they store only a part of a long sequence.
    if shape.windowed_layers:
        model.append(
            f"{shape.windowed_layers} layers with a window of {shape.window_tokens or 0:,} tokens"
        )
    if shape.stateful_layers:
        model.append(f"{shape.stateful_layers} layers with a state")
    model.append(shape.quantisation or f"{shape.dtype_bytes * 8:.0f} bits")
    yield f"The model: {', '.join(model)}."

    gpus = "1 GPU" if question.gpus == 1 else f"{question.gpus} GPUs"
    card = "size not given"
    if question.gpu_memory_bytes is not None:
        card = format_gib(question.gpu_memory_bytes)
    spread = _format_spread(question)
    version = f"vLLM {question.release.version}"
    yield (
        f"On {gpus}, {card} each, {spread}, {version}."
        if spread
        else f"On {gpus}, {card}, {version}."
    )


def _format_spread(question: Question) -> str:
    """Return how the model is split, such as "tensor parallel 4".

    Returns "" for one GPU.
    """
    sizes = (
        ("tensor", question.tensor_parallel_size),
        ("pipeline", question.pipeline_parallel_size),
        ("data", question.data_parallel_size),
    )
    return ", ".join(f"{name} parallel {size}" for name, size in sizes if size > 1)


def _format_memory(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield the table of memory per GPU. Each part has a line and a remark."""
    question = estimate.question
    yield f"{'Of each GPU':<44}GiB"
    if estimate.budget_bytes is not None:
        utilization = question.gpu_memory_utilization
        is_default = utilization == question.release.utilization
        remark = f"the default of vLLM {question.release.version}" if is_default else ""
        yield from _format_line(
            f"budget, {utilization:g} of the card", estimate.budget_bytes, remark
        )
    yield from _format_line("weights", estimate.weights_bytes, _name_weights_source(estimate))
    if question.max_loras:
        ranks = f"{question.max_loras} of rank {question.max_lora_rank}"
        yield from _format_line("  of them for LoRA", question.adapters_bytes, ranks)
    if question.cpu_offload_bytes:
        yield from _format_line("  beside them on the host", question.cpu_offload_bytes)
    yield from _format_line("activations", estimate.activations, _name_peaks(question))
    assumptions = estimate.assumptions
    if question.release.has_graphs_in_budget:
        yield from _format_line("CUDA graphs", estimate.graphs, _name_origin(assumptions.graphs))
    yield from _format_line(
        "libraries and communication", estimate.other_overhead, _name_origin(assumptions.non_torch)
    )
    cache_source = "as set" if question.kv_cache_memory_bytes else "what is left"
    # Show a negative amount as 0; the verdict explains what is missing.
    yield from _format_line("KV cache", _clip_at_zero(estimate.kv_cache), cache_source)
    yield from _format_line("beside the budget", estimate.outside, _name_outside(question))
    if question.host_memory_bytes or question.cpu_offload_bytes or question.kv_offloading_bytes:
        yield from _format_line(
            "host memory of all", estimate.host, "offloads take up to 1.92 times their size"
        )


def _name_origin(assumption: Assumption) -> str:
    """Return a few words on the source of a figure."""
    return str(assumption.origin)


def _name_weights_source(estimate: MemoryEstimate) -> str:
    """Return where the size of the weights comes from, or "" if it is unknown."""
    question = estimate.question
    measured = question.measured
    if measured is not None and measured.weights_bytes is not None:
        is_logged = measured.has_same(question, WEIGHT_SETTINGS)
        if is_logged:
            return str(Origin.LOG)
    if question.checkpoint_bytes is not None:
        return "from the checkpoint's size"
    if question.parameters is not None:
        return f"{question.parameters / 10**9:,.2f} billion parameters"
    return "" if estimate.weights_bytes is None else "parameters counted from the configuration"


def _name_peaks(question: Question) -> str:
    """Return the possible causes of the activation peak: a batch, images or logits."""
    items = ""
    if question.largest_input is not None:
        items = f", {question.encoder_items} images"
    batch = f"{question.max_num_batched_tokens:,} tokens in a batch{items}"
    return f"{batch}, or the logits of {question.max_num_seqs:,} sequences"


def _clip_at_zero(amount: Range | None) -> Range | None:
    """Return the range with negative bounds replaced by 0, or None if it is unknown."""
    if amount is None:
        return None
    return Range(low=max(0.0, amount.low), high=max(0.0, amount.high))


def _name_outside(question: Question) -> str:
    """Return the names of the memory parts that lie outside the budget."""
    names = ["CUDA context"]
    if question.gpus > 1:
        names.append("NCCL")
    if not question.release.has_graphs_in_budget and not question.enforce_eager:
        names.append("CUDA graphs")
    if question.unified_memory:
        names += ["the system", "vLLM's own processes"]
    return ", ".join(names)


def _format_line(name: str, amount: float | Range | None, remark: str = "") -> list[str]:
    head = f"  {name:<28}{format_estimate(amount):>17}"
    return wrap_text(f"{head}  ", remark) if remark else [head]


def format_estimate(amount: float | Range | None) -> str:
    """Format a number of bytes in GiB, or return "not known" for None."""
    if isinstance(amount, Range):
        return format_range(amount)
    return UNKNOWN_AMOUNT if amount is None else f"{amount / GIB:,.2f}"


def _format_cache(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield lines about the KV cache: bytes per token, bytes per block, and capacity."""
    question = estimate.question
    layout = estimate.layout
    yield "KV cache"
    if not layout.block_bytes:
        yield "  none: the model keeps nothing of a sequence"
        return
    # Sliding-window layers drop old tokens, so a long sequence takes less memory per token.
    bound = "at most " if question.shape.windowed_layers else ""
    block = f"{layout.block_bytes:,} per block of {layout.block_tokens}"
    if not question.shape.has_every_token:
        block += f" in {layout.block_layers} layers"
    yield f"  {bound}{estimate.bytes_per_token:,} bytes per token, {block}"
    if question.gpus > 1:
        yield f"  {bound}{estimate.engine_bytes_per_token:,} bytes per token on all GPUs together"
    length = question.max_model_len
    if length is not None:
        sequences = question.max_num_seqs
        blocks = sequences * layout.count_blocks(length)
        size = format_gib(blocks * layout.block_bytes)
        yield (
            f"  {sequences:,} x {length:,} tokens (max_num_seqs x max_model_len) take {size},"
            f" {blocks:,} blocks"
        )
    if estimate.blocks:
        yield from _format_capacity(estimate, estimate.blocks)


def _format_capacity(estimate: MemoryEstimate, blocks: int) -> Iterator[str]:
    """Yield the lines about the tokens and sequences that fit, without unknown figures."""
    question = estimate.question
    if estimate.capacity_tokens is not None:
        bound = "" if question.kv_cache_memory_bytes else "at least "
        yield f"  holds {bound}{estimate.capacity_tokens:,} tokens, in {blocks:,} blocks"
    lengths = ((question.max_model_len, "max_model_len"), (question.typical_len, "typical"))
    for tokens, name in lengths:
        if tokens is None:
            continue
        at_once = estimate.count_sequences(tokens)
        if at_once is not None:
            # The number is rounded down, so the table shows only sequences that fit.
            shown = floor(at_once * 10) / 10
            yield f"  {shown:,.1f} sequences of {tokens:,} tokens ({name}) at once"


def _format_tables(estimate: MemoryEstimate) -> list[str]:
    """Return two tables: the length of N sequences, and the sequences of length N.

    Returns an empty list if no blocks are known to fit.
    """
    if not estimate.blocks:
        return []
    return [
        "The largest that fits at once",
        *_format_table(("max_num_seqs", "max_model_len"), list_longest(estimate)),
        "",
        *_format_table(("max_model_len", "max_num_seqs"), list_most_sequences(estimate)),
    ]


def _format_table(heads: tuple[str, str], pairs: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield a table of two lines: the first and the second numbers of the pairs."""
    columns = [[f"{number:,}" for number in pair] for pair in pairs]
    for place, head in enumerate(heads):
        cells = [f"{column[place]:>{max(map(len, column))}}" for column in columns]
        yield f"  {head:<15}{'  '.join(cells)}"


def _format_answer(estimate: MemoryEstimate, changes: Sequence[Saving]) -> Iterator[str]:
    """Yield the notes, the verdict and the changes that help.

    If vLLM is certain to start, no changes are included.
    """
    for sentence in (*list_estimate_notes(estimate), explain_verdict(estimate)):
        yield from wrap_text("", sentence)
    # If the cache's size is unknown, it is also unknown whether a change helps.
    if can_start(estimate) is True or estimate.kv_cache is None:
        return
    if changes:
        yield "Any of these would make it fit:"
    elif not list_unknown(estimate):
        yield (
            "No change of one or two settings would make it fit"
            f" for {SMALLEST_LENGTH} tokens or more."
        )
    settings_width = max((len(_join_settings(change)) for change in changes), default=0)
    for change in changes:
        yield from wrap_text(f"  {_join_settings(change):<{settings_width}}  ", change.price)


def _format_parts(parts: Sequence[PlannedPart]) -> list[str]:
    """Return the table of planned and measured bytes, or nothing if nothing was measured."""
    if not parts:
        return []
    lines = [f"{'Of each GPU, in GiB':<24}{'planned':>17}{'measured':>12}"]
    for part in parts:
        planned = format_estimate(part.planned)
        measured = format_estimate(part.measured_bytes)
        lines.append(f"  {part.name:<22}{planned:>17}{measured:>12}")
    return lines


REPORTED_SETTINGS: Final = (
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
"""Fields of the question that keep their names in the JSON."""


def build_data(estimate: MemoryEstimate, changes: Iterable[Saving]) -> dict[str, Any]:
    """Return the data for --json; unknown figures are None."""
    question = estimate.question
    layout = estimate.layout
    return {
        "unknown": list_unknown(estimate),
        "notes": list_estimate_notes(estimate),
        "changes": [
            {"settings": dict(change.settings), "price": change.price} for change in changes
        ],
        **{name: getattr(question, name) for name in REPORTED_SETTINGS},
        "vllm_version": question.release.version,
        "block_size": layout.block_tokens,
        "bytes_per_token": estimate.bytes_per_token,
        "bytes_per_token_is_upper_bound": question.shape.windowed_layers > 0,
        "bytes_per_token_all_gpus": estimate.engine_bytes_per_token,
        "bytes_per_block": layout.block_bytes or None,
        "weights_bytes": estimate.weights_bytes,
        "lora_bytes": question.adapters_bytes,
        "unknown_architecture": question.shape.unknown_type,
        "budget_bytes": None if estimate.budget_bytes is None else int(estimate.budget_bytes),
        "encoder_items": question.encoder_items,
        "activation_bytes": _split_range(estimate.activations),
        "cuda_graph_bytes": _split_range(estimate.graphs),
        "library_bytes": _split_range(estimate.other_overhead),
        "outside_budget_bytes": _split_range(estimate.outside),
        "host_bytes": _split_range(estimate.host),
        "checks": [
            {"name": check.name, "passes": check.passes, "refusal": check.refusal}
            for check in check_start(estimate)
        ],
        "assumptions": _build_assumptions(estimate.assumptions),
        "kv_cache_bytes": _split_range(estimate.kv_cache),
        "kv_capacity_tokens": estimate.capacity_tokens,
        "kv_capacity_blocks": estimate.blocks,
        **_build_sequence_data(estimate),
        "largest_max_model_len": [
            {"max_num_seqs": count, "max_model_len": length}
            for count, length in list_longest(estimate)
        ],
        "largest_max_num_seqs": [
            {"max_model_len": length, "max_num_seqs": count}
            for length, count in list_most_sequences(estimate)
        ],
    }


def _build_sequence_data(estimate: MemoryEstimate) -> dict[str, float | None]:
    """Return the figures about sequences; those for `max_model_len` are None if it is unknown."""
    length = estimate.question.max_model_len
    sequences = estimate.question.max_num_seqs
    sequence_bytes = None
    sequences_at_length = None
    all_bytes = None
    all_blocks = None
    if length is not None:
        sequence_bytes = estimate.count_sequence_bytes(length)
        sequences_at_length = estimate.count_sequences(length)
        all_bytes = sequences * sequence_bytes
        all_blocks = sequences * estimate.layout.count_blocks(length)
    return {
        "sequence_bytes": sequence_bytes,
        "sequences_at_max_model_len": sequences_at_length,
        "sequences_at_typical_len": estimate.count_sequences(estimate.question.typical_len),
        "all_at_once_bytes": all_bytes,
        "all_at_once_blocks": all_blocks,
    }


def _build_assumptions(assumptions: StartAssumptions) -> dict[str, dict[str, Any]]:
    """Return each assumed figure together with its origin and evidence."""
    return {
        name: {
            "low": assumption.range.low,
            "high": assumption.range.high,
            "origin": assumption.origin,
            "evidence": assumption.evidence,
        }
        for name, assumption in asdict(assumptions).items()
    }


def _split_range(amount: Range | None) -> dict[str, int] | None:
    return None if amount is None else {"low": int(amount.low), "high": int(amount.high)}


PROBE_FILE_LIMIT_BYTES: Final = 16 * 1024
"""Our choice: the maximum number of bytes to read from a probe file. Real files are smaller."""


def read_worker_parts(file: Path) -> WorkerMeasurements:
    """Return the parts of a worker's memory from a probe file.

    Raises BadInput if the file cannot be read. Also raises BadInput if the process had no GPU.
    """
    try:
        with file.open("rb") as stream:
            content = parse_probe(stream.read(PROBE_FILE_LIMIT_BYTES))
    except OSError as error:
        raise BadInput(f"--probe {file}: cannot be read: {error.strerror}") from error
    if isinstance(content, str):
        raise BadInput(f"--probe {file}: {content}")
    process, _ = content
    if process.parts is None:
        raise BadInput(
            f"--probe {file}: it is of a process without a GPU;"
            " take the file of a worker, whose role is worker"
        )
    return process.parts
