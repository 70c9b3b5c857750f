"""What the engine was instructed to use is in the trace; what the operator gives wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.check.checking import run_check
from tests.unit.commands.check.engine_traces import HELD, TOTAL, engine, write_trace

LIMIT = ("--max-discrepancy", "3%")


def trace(folder: Path, **engine_fields: Any) -> str:
    samples = ({**process, "engines": [{**process["engines"][0], **engine_fields}]} for process in engine(0.5))
    return write_trace(folder / "t", samples)


def test_the_engines_own_budget_is_compared_with(tmp_path: Path) -> None:
    status, limits = run_check("--trace", trace(tmp_path, gpu_memory_utilization=0.8), *LIMIT)

    assert (status, limits["discrepancy"]["outcome"]) == (1, "failed")
    assert limits["discrepancy"]["value"] == pytest.approx(HELD / (0.8 * TOTAL) - 1)


@pytest.mark.parametrize(
    "traced_budget",
    [
        {"gpu_memory_utilization": 0.5},
        {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 2**30},
        {"memory_bytes": 2**30},
    ],
)
@pytest.mark.parametrize("options", [("--gpu-memory-utilization", "0.8"), ("--reported-bytes", str(8 * TOTAL // 10))])
def test_what_the_operator_gives_wins(
    tmp_path: Path, traced_budget: dict[str, float], options: tuple[str, str]
) -> None:
    _, limits = run_check("--trace", trace(tmp_path, **traced_budget), *LIMIT, *options)

    assert limits["discrepancy"]["value"] == pytest.approx(HELD / (0.8 * TOTAL) - 1)


def test_an_engine_that_sizes_its_cache_in_bytes_has_no_budget(tmp_path: Path) -> None:
    status, limits = run_check(
        "--trace", trace(tmp_path, gpu_memory_utilization=0.8, kv_cache_memory_bytes=2**30), *LIMIT
    )

    assert (status, limits["discrepancy"]["outcome"]) == (2, "cannot_tell")
    assert limits["discrepancy"]["why"].startswith("the trace does not contain the engine's budget")
