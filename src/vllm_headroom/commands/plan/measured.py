"""What the probe measured in an engine that serves the model, beside what was planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_headroom.commands.plan.document import document
from vllm_headroom.commands.plan.text import shown, text
from vllm_headroom.model import EngineParts
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.sizing.estimate import Estimate
from vllm_headroom.sizing.overhead import Range
from vllm_headroom.trace.errors import BadInput

MOST_BYTES: Final = 16 * 1024
NO_PARTS: Final = "it is of a process without a GPU; take the file of a worker, whose role is worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
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
