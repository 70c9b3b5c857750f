"""A plan beside what a probe measured in the engine that serves the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.plan.asked import of, plan
from vllm_headroom.units import GIB

Capsys = pytest.CaptureFixture[str]
WORDS = (*of("llama-3.1-8b"), "--gpu-memory", "80GiB", "--max-model-len", "4096")


def write_measured(folder: Path, **parts: Any) -> str:
    file = folder / "7-1000.json"
    document = {"headroom_probe": 1, "t": 2000.0, "pid": 7, "started_at": 1000.0, "role": "worker", "parts": parts}
    file.write_text(json.dumps(document | ({} if parts else {"parts": None})))
    return str(file)


def test_what_was_measured_stands_beside_what_was_planned(tmp_path: Path, capsys: Capsys) -> None:
    file = write_measured(tmp_path, weights=15 * GIB, kv_cache=50 * GIB, activation_peak=GIB)

    without, with_probe = plan(capsys, *WORDS), plan(capsys, *WORDS, "--probe", file)

    assert with_probe.status == without.status
    assert with_probe.out.startswith(without.out)
    rows = [line.split() for line in with_probe.out[len(without.out) :].splitlines() if line]
    assert [row[-1] for row in rows] == ["measured", "known", "15.00", "1.00", "known", "50.00"]
    assert rows[2][0] == "weights"
    assert 14.0 < float(rows[2][1]) < 16.0


def test_json_has_it_in_bytes(tmp_path: Path, capsys: Capsys) -> None:
    file = write_measured(tmp_path, weights=15 * GIB)

    assert plan(capsys, *WORDS, "--json", "--probe", file).document["measured"] == {
        "budget_bytes": None,
        "weights_bytes": 15 * GIB,
        "activations_bytes": None,
        "cuda_graphs_bytes": None,
        "kv_cache_bytes": None,
    }
    assert "measured" not in plan(capsys, *WORDS, "--json").document


def test_a_file_that_cannot_be_used_is_bad_input(tmp_path: Path, capsys: Capsys) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")

    for file, problem in (
        (str(tmp_path / "none.json"), "cannot be read: No such file or directory"),
        (str(damaged), "not JSON: "),
        (write_measured(tmp_path), "it is of a process without a GPU"),
    ):
        answer = plan(capsys, *WORDS, "--probe", file)
        assert answer.status == 2
        assert problem in answer.err
