"""Plans for a machine of one memory: what vLLM leaves is all that its own processes and the system have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.commands.plan.asked import estimated, of, plan
from vllm_headroom.units import GIB
from vllm_headroom_tools.sizing.checks import can_start

MACHINE_GIB = 119


@pytest.mark.parametrize(("ratio", "expected"), [(0.92, True), (0.93, True), (0.94, False)])
def test_8_gib_stay_with_the_machine_beside_what_lies_outside_the_budget(ratio: float, expected: bool) -> None:  # noqa: FBT001 - a case
    question_fields: dict[str, Any] = {"card_gib": MACHINE_GIB, "gpu_memory_utilization": ratio, "max_model_len": 8192}

    assert can_start(estimated(**question_fields, unified_memory=True)) is expected
    assert can_start(estimated(**question_fields)) is True, "a card of its own leaves the machine alone"


def test_what_is_offloaded_lies_in_the_same_memory() -> None:
    question_fields: dict[str, Any] = {"card_gib": MACHINE_GIB, "gpu_memory_utilization": 0.9, "max_model_len": 8192}

    assert can_start(estimated(**question_fields, unified_memory=True)) is True
    assert can_start(estimated(**question_fields, unified_memory=True, cpu_offload_bytes=10 * GIB)) is False


def test_the_verdict_says_what_would_happen_and_the_share_that_leaves_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--gpu-memory", f"{MACHINE_GIB}GiB", "--unified-memory", "--gpu-memory-utilization", "0.95")

    answer = plan(capsys, *of("llama-3.1-8b"), *words, "--max-model-len", "8192")

    assert answer.status == 1
    printed = " ".join(answer.out.split())
    assert (
        "the budget leaves 5.95 GiB of the machine, and it needs 8.10 to 8.60 GiB: vLLM would start, and it" in printed
    )
    assert "--gpu-memory-utilization 0.92 the system and vLLM's own processes keep what they need" in printed
    assert "8.10 to 8.60 CUDA context, the system, vLLM's own processes" in printed
    assert "Swap and zram count as no room." in printed


def test_a_machine_too_small_for_all_that_names_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan(capsys, *of("llama-3.1-8b"), "--gpu-memory", "8GiB", "--unified-memory", "--max-model-len", "8192")

    assert answer.status == 1
    assert "--gpu-memory-utilization" not in answer.out
