"""What the engine was instructed to use is in the trace; what the operator gives wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.check.checking import run_check
from tests.unit.commands.check.engine_traces import HELD, TOTAL, engine, write_trace

LIMIT = ("--max-discrepancy", "3%")


def trace(folder: Path, **said: Any) -> str:
    samples = ({**process, "engines": [{**process["engines"][0], **said}]} for process in engine(0.5))
    return write_trace(folder / "t", samples)


def test_the_engines_own_budget_is_compared_with(tmp_path: Path) -> None:
    status, found = run_check("--trace", trace(tmp_path, gpu_memory_utilization=0.8), *LIMIT)

    assert (status, found["discrepancy"]["outcome"]) == (1, "failed")
    assert found["discrepancy"]["value"] == pytest.approx(HELD / (0.8 * TOTAL) - 1)


@pytest.mark.parametrize(
    "said",
    [
        {"gpu_memory_utilization": 0.5},
        {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 2**30},
        {"memory_bytes": 2**30},
    ],
)
@pytest.mark.parametrize("given", [("--gpu-memory-utilization", "0.8"), ("--reported-bytes", str(8 * TOTAL // 10))])
def test_what_the_operator_gives_wins(tmp_path: Path, said: dict[str, float], given: tuple[str, str]) -> None:
    _, found = run_check("--trace", trace(tmp_path, **said), *LIMIT, *given)

    assert found["discrepancy"]["value"] == pytest.approx(HELD / (0.8 * TOTAL) - 1)


def test_an_engine_that_sizes_its_cache_in_bytes_has_no_budget(tmp_path: Path) -> None:
    status, found = run_check(
        "--trace", trace(tmp_path, gpu_memory_utilization=0.8, kv_cache_memory_bytes=2**30), *LIMIT
    )

    assert (status, found["discrepancy"]["outcome"]) == (2, "cannot_tell")
    assert found["discrepancy"]["why"].startswith("the trace does not contain the engine's budget")
