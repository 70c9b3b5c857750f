"""Starts of vLLM on real cards: what their logs say beside what `plan` says, and the table of docs/commands/plan.md.

starts.json has the public figures, and of each model the fields that its shape comes from. Those of vLLM 0.19
on an H100 are of llm-d-incubation/llm-d-planner (accuracy/results/v0.19.0, Apache-2.0), the others of users' reports.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.command import read_data
from vllm_headroom.units import GIB
from vllm_headroom_tools.cli import execute
from vllm_headroom_tools.plan.command import COMMAND

RECORD: Final = Path(__file__).with_name("starts.json")
HEAD: Final = (
    "| model | card, vLLM | options | weights, GiB | KV cache, GiB | tokens, at least |",
    "| --- | --- | --- | --- | --- | --- |",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A logged start and the plan of it."""

    logged: dict[str, Any]
    plan: dict[str, Any]
    headline: str

    @property
    def name(self) -> str:
        return f"{self.logged['model']} {self.logged['options']}"

    @property
    def is_spread(self) -> bool:
        """Whether tensor parallelism spreads the model."""
        return "-tp" in self.logged["options"]

    @property
    def cache_bounds_gib(self) -> tuple[float, float]:
        cache = self.plan["kv_cache_bytes"]
        return round(cache["low"] / GIB, 2), round(cache["high"] / GIB, 2)

    @property
    def error_percent(self) -> float:
        """By how many per cent "at least" is above what was logged: of the cache, else of its tokens."""
        if "cache_gib" in self.logged:
            return float(100 * (self.plan["kv_cache_bytes"]["low"] / GIB / self.logged["cache_gib"] - 1))
        return float(100 * (self.plan["kv_capacity_tokens"] / self.logged["tokens"] - 1))


@cache
def plan_starts() -> tuple[Start, ...]:
    """Return all starts with their plans."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return tuple(plan_start(logged, record["models"][logged["model"]]) for logged in record["starts"])


def plan_start(logged: dict[str, Any], config: dict[str, Any]) -> Start:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        card = ("--gpu", logged["gpu"], "--vllm-version", logged["release"])
        words = ("--json", "--model-config", folder, *card, *logged["options"].split())
        with contextlib.redirect_stdout(io.StringIO()) as out:
            execute(COMMAND, "plan", words)
    return Start(logged=logged, plan=read_data(out.getvalue()), headline=json.loads(out.getvalue())["headline"])


def render_table() -> str:
    """Return the table of docs/commands/plan.md."""
    rows = [_render(start) for start in plan_starts() if "refusal" not in start.logged]
    return "\n".join((*HEAD, *rows))


def _render(start: Start) -> str:
    logged = start.logged
    low_gib, high_gib = start.cache_bounds_gib
    cells = (
        logged["model"],
        f"{logged['gpu']}, {logged['release']}",
        f"`{logged['options']}`" if logged["options"] else " ",
        f"{start.plan['weights_bytes'] / GIB:.2f}; {_write(logged.get('weights_gib'))}",
        f"{low_gib:.2f} to {high_gib:.2f}; {_write(logged.get('cache_gib'))}",
        f"{start.plan['kv_capacity_tokens']:,}; {_write(logged.get('tokens'))} ({start.error_percent:+.1f} %)",
    )
    return f"| {' | '.join(cells)} |"


def _write(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.2f}"
