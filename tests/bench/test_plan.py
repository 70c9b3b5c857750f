"""The KV cache by `plan` beside that of three other calculators, on logged starts of vLLM."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any, Final

import pytest

from tests.bench.exporters import environment
from tests.bench.results import Results
from tests.unit.sizing.starts import RECORD, Start, plan_starts
from vllm_headroom.units import GIB

pytestmark = pytest.mark.bench

OTHERS: Final = {
    "kvfit": "kvfit==0.3.0",
    "modelinfo-cli": "modelinfo-cli==1.4.4",
    "llm-d-planner": "llm-d-planner==0.3.3",
}
SCRIPT: Final = Path(__file__).with_name("other_calculators.py")

CARD_GIB: Final = 79.19
"""The memory that CUDA sees of an H100 in these logs."""

TOLERANCE_GIB: Final = 0.005
"""vLLM rounds to 0.01 GiB."""


def test_the_cache_beside_other_calculators(results: Results) -> None:
    starts = [start for start in plan_starts() if start.logged["gpu"] == "H100" and start.logged["release"] == "0.19"]
    starts = [start for start in starts if "cache_gib" in start.logged]
    logged = [start.logged["cache_gib"] for start in starts]
    own = [start.plan["kv_cache_bytes"]["low"] / GIB for start in starts]
    errors = {"ours, at least": measure_error(own, logged)}
    note(results, "ours, at least", own, logged)
    for name, package in OTHERS.items():
        python = environment(f"calculator-{name}", package)
        if python is None:
            pytest.skip("the package index does not offer what is compared")
        answers = ask(python, name, starts)
        errors[name] = measure_error(answers, logged)
        note(results, name, answers, logged)

    results.at_most(4, "mean error of the KV cache by plan", errors["ours, at least"], " %")


def measure_error(answers: list[float], logged: list[float]) -> float:
    """Return the mean of the errors without their sign, in per cent."""
    return mean(abs(100 * (answer / cache - 1)) for answer, cache in zip(answers, logged, strict=True))


def note(results: Results, name: str, answers: list[float], logged: list[float]) -> None:
    broken = sum(answer > cache + TOLERANCE_GIB for answer, cache in zip(answers, logged, strict=True))
    error = measure_error(answers, logged)
    results.note(
        f"KV cache of {len(logged)} starts by {name}", f"mean error {error:.1f} %, more than vLLM had in {broken}"
    )


def ask(python: Path, name: str, starts: list[Start]) -> list[float]:
    command = [str(python / "python"), str(SCRIPT), name]
    questions = json.dumps([build_question(start) for start in starts])
    done = subprocess.run(command, input=questions, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def build_question(start: Start) -> dict[str, Any]:
    words = start.logged["options"].split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    tp = int(options.get("-tp", 1))
    pp = int(options.get("-pp", 1))
    models = json.loads(RECORD.read_text(encoding="utf-8"))["models"]
    return {
        "model": start.logged["model"],
        "config": models[start.logged["model"]],
        "weights_gib": start.logged["weights_gib"],
        "card_gib": CARD_GIB,
        "utilization": float(options["--gpu-memory-utilization"]),
        "max_model_len": int(options["--max-model-len"]),
        "tp": tp,
        "pp": pp,
        "gpus": tp * pp,
    }
