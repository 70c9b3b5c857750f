"""The figures of `plan` for the measured models beside those of vLLM, and the table of docs/commands/plan.md."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.card.card import GIB
from tests.card.shapes.table import SHAPES, Shape
from tests.command import read_data, run_command

RECORD: Final = Path(__file__).parent / "measured.json"
RELEASES: Final = Path(__file__).parent / "releases.json"
ANSWERS: Final = {True: "yes", False: "no", None: "cannot tell"}
HEAD: Final = (
    "| model | options | weights, GiB | activations, GiB | KV cache, GiB | tokens, at least | starts |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model, the document of `plan`, or why it has none, and what vLLM's workers said."""

    shape: Shape
    plan: dict[str, Any]
    refusal: str
    said: dict[str, Any]

    @property
    def started(self) -> bool:
        return "refused" not in self.said

    def error(self, planned: float | None, measured: float | None) -> float | None:
        """Return by how many per cent the plan is above what was measured."""
        return 100 * (planned / measured - 1) if planned is not None and measured else None

    @property
    def weights_error(self) -> float | None:
        planned = self.plan.get("weights_bytes")
        return self.error(planned and planned / GIB, self.said.get("weights_gib"))

    @property
    def tokens_error(self) -> float | None:
        return self.error(self.plan.get("kv_capacity_tokens"), self.said.get("kv_tokens"))

    def holds(self, name: str, measured: str) -> bool | None:
        """Return whether what vLLM said lies in a range of the plan, which is rounded as vLLM rounds; None for none."""
        planned, measured_value = self.plan.get(name), self.said.get(measured)
        if planned is None or measured_value is None:
            return None
        return bool(round(planned["low"] / GIB, 2) <= measured_value <= round(planned["high"] / GIB, 2))


@cache
def compare_all() -> tuple[Comparison, ...]:
    """Return all shapes that were measured."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return tuple(compare(shape, record[shape.name]) for shape in SHAPES if shape.name in record)


@cache
def compare_releases() -> tuple[Comparison, ...]:
    """Return the shapes that other releases measured, by shape and release."""
    record = json.loads(RELEASES.read_text(encoding="utf-8"))
    comparisons = []
    for shape in SHAPES:
        for release, figures in record.items():
            if shape.name in figures:
                comparisons.append(compare(replace(shape, release=release), figures[shape.name]))
    return tuple(comparisons)


def compare(shape: Shape, data: dict[str, Any]) -> Comparison:
    """Plan one model as it was measured: its configuration, its card, its options, no CUDA graphs."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
        card = ("--gpu-memory", f"{shape.card_gib}GiB", "--enforce-eager")
        release = ("--vllm-version", shape.release)
        arguments = ("--json", "--model-config", folder, *card, *release, *shape.options, *shape.only_plan)
        done = run_command("plan", *arguments)
    document = read_data(done.stdout) if done.stdout else {}
    return Comparison(shape=shape, plan=document, refusal=done.stderr.rpartition(": ")[2].strip(), said=data)


def render_table() -> str:
    """Return the table of docs/commands/plan.md."""
    return "\n".join((*HEAD, *(_render(comparison) for comparison in compare_all())))


def render_releases() -> str:
    """Return the table of docs/commands/plan.md with the other releases."""
    rows = [_render(comparison, release=comparison.shape.release) for comparison in compare_releases()]
    return "\n".join((HEAD[0].replace("| model |", "| model | vLLM |"), f"| --- {HEAD[1]}", *rows))


def _render(comparison: Comparison, release: str | None = None) -> str:
    shape, plan, logged = comparison.shape, comparison.plan, comparison.said
    options = " ".join((*shape.options, *shape.only_plan)) or " "
    weights, tokens = plan.get("weights_bytes"), plan.get("kv_capacity_tokens")
    cells = (
        f"{shape.name} ({shape.kind})",
        *((release,) if release else ()),
        options if options == " " else f"`{options}`",
        _pair(_gib(weights), logged.get("weights_gib"), comparison.weights_error),
        _pair(_range(plan.get("activation_bytes")), logged.get("activations_gib"), None),
        _pair(_range(plan.get("kv_cache_bytes")), logged.get("available_gib"), None),
        _pair(None if tokens is None else f"{tokens:,}", logged.get("kv_tokens"), comparison.tokens_error),
        f"{ANSWERS[plan['fits']] if plan else 'refused'}; {'yes' if comparison.started else 'no'}",
    )
    return f"| {' | '.join(cells)} |"


def _pair(planned: str | None, measured: float | None, error: float | None) -> str:
    measured_text = "-" if measured is None else f"{measured:,.2f}" if isinstance(measured, float) else f"{measured:,}"
    return f"{planned or '-'}; {measured_text}{'' if error is None else f' ({error:+.1f} %)'}"


def _gib(amount: float | None) -> str | None:
    return None if amount is None else f"{amount / GIB:.2f}"


def _range(amount: dict[str, int] | None) -> str | None:
    return None if amount is None else f"{amount['low'] / GIB:.2f} to {amount['high'] / GIB:.2f}"
