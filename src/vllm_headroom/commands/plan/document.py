"""The answer for scripts, and what the probe measured in an engine that serves the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.commands.plan.changes import changes
from vllm_headroom.commands.plan.text import shown, text
from vllm_headroom.commands.plan.verdict import notes, unknown, verdict
from vllm_headroom.model import EngineParts
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.sizing.estimate import Estimate, fits, longest, most
from vllm_headroom.sizing.overhead import LIBRARIES, Range
from vllm_headroom.trace.errors import BadInput

SETTINGS: Final = (
    "gpus",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "gpu_memory_bytes",
    "unified_memory",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "typical_len",
)


def document(found: Estimate) -> dict[str, Any]:
    """Return the answer: bytes are of each GPU unless their name says otherwise, and null is what is not known."""
    question, answer = found.question, fits(found)
    return {
        "fits": answer,
        "verdict": verdict(found),
        "unknown": unknown(found),
        "notes": notes(found),
        "changes": [
            {"settings": dict(each.settings), "price": each.price}
            for each in (() if answer is True else changes(found))
        ],
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
        "activation_bytes": _bounds(found.activations),
        "cuda_graph_bytes": _bounds(found.graphs),
        "library_bytes": _bounds(LIBRARIES),
        "outside_budget_bytes": _bounds(found.outside),
        **_kv_cache(found),
    }


def _kv_cache(found: Estimate) -> dict[str, Any]:
    question = found.question
    length, sequences = question.max_model_len, question.max_num_seqs
    return {
        "kv_cache_bytes": _bounds(found.kv_cache),
        "kv_capacity_tokens": found.capacity_tokens,
        "kv_capacity_blocks": found.blocks,
        "sequence_bytes": None if length is None else found.sequence_bytes(length),
        "sequences_at_max_model_len": None if length is None else found.sequences(length),
        "sequences_at_typical_len": found.sequences(question.typical_len),
        "all_at_once_bytes": None if length is None else sequences * found.sequence_bytes(length),
        "all_at_once_blocks": None if length is None else sequences * found.layout.blocks(length),
        "largest_max_model_len": [{"max_num_seqs": count, "max_model_len": size} for count, size in longest(found)],
        "largest_max_num_seqs": [{"max_model_len": size, "max_num_seqs": count} for size, count in most(found)],
    }


def _bounds(amount: Range | None) -> dict[str, int] | None:
    return None if amount is None else {"low": int(amount.low), "high": int(amount.high)}


MOST_BYTES: Final = 16 * 1024
NO_PARTS: Final = "it is of a process without a GPU; take the file of a worker, whose role is worker"


class Planned(Struct, frozen=True, kw_only=True):
    """A plan, and what a worker of the engine measured on its GPU; None where no file was given."""

    estimate: Estimate
    measured: EngineParts | None = None


def parts_of(file: Path) -> EngineParts:
    """Return what a file of the probe says of its worker; raises BadInput."""
    try:
        with file.open("rb") as stream:
            found = parse_probe(stream.read(MOST_BYTES))
    except OSError as error:
        raise BadInput(f"--probe {file}: cannot be read: {error.strerror}") from error
    if isinstance(found, str):
        raise BadInput(f"--probe {file}: {found}")
    if found[0].parts is None:
        raise BadInput(f"--probe {file}: {NO_PARTS}")
    return found[0].parts


def planned_text(found: Planned) -> Iterator[str]:
    """Yield the plan and, where something was measured, a table of both."""
    yield from text(found.estimate)
    if found.measured is None:
        return
    yield ""
    yield f"{'Of each GPU, in GiB':<24}{'planned':>17}{'measured':>12}"
    for name, planned, measured in _pairs(found.estimate, found.measured):
        yield f"  {name:<22}{shown(planned):>17}{shown(measured):>12}"


def planned_document(found: Planned) -> dict[str, Any]:
    """Return the plan, with `measured` in bytes where a file was given."""
    if found.measured is None:
        return document(found.estimate)
    pairs = _pairs(found.estimate, found.measured)
    return {
        **document(found.estimate),
        "measured": {f"{name.replace(' ', '_').lower()}_bytes": m for name, _, m in pairs},
    }


def _pairs(planned: Estimate, measured: EngineParts) -> tuple[tuple[str, float | Range | None, int | None], ...]:
    return (
        ("budget", planned.budget, measured.requested_bytes),
        ("weights", planned.weights, measured.weights_bytes),
        ("activations", planned.activations, measured.activation_peak_bytes),
        ("CUDA graphs", planned.graphs, measured.cuda_graphs_bytes),
        ("KV cache", planned.kv_cache, measured.kv_cache_bytes),
    )
