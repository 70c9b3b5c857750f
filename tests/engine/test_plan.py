"""What a sequence takes of the KV cache, by `plan` and by the real vLLM's own functions. Run by `make engine-test`."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from msgspec import to_builtins

from tests.engine.serving import FOLDER, HERE
from tests.unit.sizing import encoders
from tests.unit.sizing.models import CHECKED, NAMES, model
from tests.unit.sizing.models import FOLDER as FOLDER_OF_CONFIGURATIONS
from vllm_headroom_tools.sizing.footprint import build_kv_layout

pytestmark = pytest.mark.engine

IN_FLIGHT_TOKENS = 16_384
LENGTHS = (1, 100, 4_096, 32_768, 131_072)
CONFIGURATIONS = sorted((*FOLDER_OF_CONFIGURATIONS.glob("*.json"), *CHECKED.glob("*.json")))
TRUTH = json.loads((CHECKED.parent / "truth.json").read_text(encoding="utf-8"))


def test_every_sequence_takes_what_vllm_reckons() -> None:
    cases, planned = [], []
    for name in NAMES:
        shape = model(name)
        for ranks in (1, 2):
            layout = build_kv_layout(
                shape, block_tokens=16, in_flight_tokens=IN_FLIGHT_TOKENS, tensor_parallel=ranks, kv_dtype="bfloat16"
            )
            for tokens in LENGTHS:
                layout_fields = {"ranks": ranks, "tokens": tokens, "in_flight_tokens": IN_FLIGHT_TOKENS}
                cases.append(
                    {"name": name, "block_tokens": layout.block_tokens, **layout_fields, "shape": to_builtins(shape)}
                )
                planned.append(layout.count_blocks(tokens) * layout.block_bytes)

    reckoned_cases = reckoned("reckon.py", cases)
    wrong = [case for case, ours, theirs in zip(cases, planned, reckoned_cases, strict=True) if ours != theirs]
    assert not wrong


def test_vllm_profiles_the_encoders_that_were_recorded_of_it() -> None:
    cases = [{"config": config, **call_fields} for config in encoders.CONFIGS.values() for call_fields in encoders.TOLD]

    recorded = json.loads(encoders.TRUTH.read_text())
    assert reckoned("encoders.py", cases) == [
        recorded_case for name in encoders.CONFIGS for recorded_case in recorded[name]
    ]


def reckoned(script: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Return what vLLM's own functions report about each case."""
    done = subprocess.run(
        [FOLDER / "venv" / "bin" / "python", HERE / script],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    outcomes: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def test_vllm_builds_what_was_recorded_of_it() -> None:
    built = subprocess.run(
        [FOLDER / "venv" / "bin" / "python", HERE / "truth.py", *CONFIGURATIONS],
        capture_output=True,
        text=True,
        check=True,
        timeout=3600,
    )

    built_models = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    assert len(built_models) == len(CONFIGURATIONS)
    for built_model in built_models:
        name, refused = built_model.pop("name"), "refused" in built_model
        built_model.pop("layers", None)
        assert refused if "refused" in TRUTH[name] else built_model == TRUTH[name]
