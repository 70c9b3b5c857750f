"""What a GPU is used for in two versions, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.unit.commands.check.checking import document
from tests.unit.commands.check.engine_traces import MIB, engine, write_trace

PART = "part over baseline"
PARTS = {"weights": 15_000 * MIB, "kv_cache": 50_000 * MIB, "cuda_graphs": 1_000 * MIB, "outside_torch": 1_000 * MIB}


def probed(**changed: int) -> Iterator[dict[str, Any]]:
    for record in engine(hours=0.5):
        yield {**record, "gpus": [{**gpu, "parts": PARTS | changed} for gpu in record["gpus"]]}


def judge_parts(
    folder: Path, new: Iterator[dict[str, Any]], share: str = "2%"
) -> tuple[int, dict[str, dict[str, Any]]]:
    traces = ("--trace", write_trace(folder / "new", new), "--baseline", write_trace(folder / "old", probed()))
    status, report = document(*traces, "--max-growth-over-baseline", share)
    return status, {limit["of"]: limit for limit in report["limits"] if limit["limit"] == PART}


def test_the_part_that_grew_is_named(tmp_path: Path) -> None:
    status, part_limits = judge_parts(tmp_path, probed(cuda_graphs=2_400 * MIB))

    assert status == 1
    assert {of: judgement["outcome"] for of, judgement in part_limits.items()} == {
        "GPU 0, weights": "passed",
        "GPU 0, cuda_graphs": "failed",
        "GPU 0, outside_torch": "passed",
    }
    graphs = part_limits["GPU 0, cuda_graphs"]
    assert (graphs["value"], graphs["baseline"]) == (2_400 * MIB, 1_000 * MIB)
    assert graphs["most"] == 1_000 * MIB + 0.02 * 67_000 * MIB


def test_twice_as_much_of_little_passes(tmp_path: Path) -> None:
    assert judge_parts(tmp_path, probed(cuda_graphs=2_000 * MIB))[0] == 0


def test_a_part_that_only_one_trace_knows_is_not_compared(tmp_path: Path) -> None:
    assert judge_parts(tmp_path, engine(hours=0.5)) == (0, {})
