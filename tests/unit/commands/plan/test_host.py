"""Plans for what vLLM keeps on the host: processes, tiers of the KV cache, offloaded weights, images."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.commands.plan.asked import estimated, of, plan
from vllm_headroom.units import GIB
from vllm_headroom_tools.plan.verdict import Saving, find_changes
from vllm_headroom_tools.sizing.checks import can_start
from vllm_headroom_tools.sizing.estimate import MemoryEstimate

ASKED: dict[str, Any] = {"card_gib": 80, "max_model_len": 8192}


def test_by_hand() -> None:
    """A server and a core of 0.6 GiB; 64 GiB of a tier and 10 GiB of weights, which take up to 1.92 times that."""
    host_memory = estimated(**ASKED, kv_offloading_bytes=64 * GIB, cpu_offload_bytes=10 * GIB).host

    assert (round(host_memory.low / GIB, 2), round(host_memory.high / GIB, 2)) == (75.2, 143.28)


def test_four_gpus_of_one_engine_have_a_worker_each_and_two_engines_a_tier_each() -> None:
    four = estimated(**ASKED, tensor_parallel_size=4, kv_offloading_bytes=64 * GIB).host

    assert round(four.low / GIB, 2) == 64 + 6 * 0.6


@pytest.mark.parametrize(("host_gib", "expected"), [(200, True), (100, None), (64, False)])
def test_a_host_that_is_too_small_keeps_vllm_from_starting(host_gib: int, expected: bool | None) -> None:  # noqa: FBT001 - a case
    estimate = estimated(**ASKED, kv_offloading_bytes=64 * GIB, host_memory_bytes=host_gib * GIB)

    assert can_start(estimate) is expected


def test_the_verdict_names_the_host_and_a_tier_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu-memory", "80GiB", "--max-model-len", "8192", "--kv-offloading-size", "64", "--host-memory", "64GiB")

    answer = plan(capsys, *of("llama-3.1-8b"), *words)

    assert answer.status == 1
    printed = " ".join(answer.out.split())
    assert "vLLM's processes need at least 65.20 GiB of the host's 64.00 GiB" in printed
    assert "--kv-offloading-size 32 fewer prefixes are kept" in printed


def find_offload(estimate: MemoryEstimate) -> Saving | None:
    """Return the proposal of `--cpu-offload-gb` alone; None where there is none."""
    for change in find_changes(estimate):
        if [option for option, _ in change.settings] == ["--cpu-offload-gb"]:
            return change
    return None


@pytest.mark.parametrize(
    ("question_fields", "host_gib"),
    [
        ({"name": "llama-3.1-70b", "card_gib": 80, "max_model_len": 8192}, 512),
        ({"name": "llama-3.1-8b", "card_gib": 16, "max_model_len": 8192}, 64),
        ({"name": "llama-3.1-8b", "card_gib": 24}, 128),
        ({"name": "llama-3.1-70b", "card_gib": 80, "max_model_len": 8192, "cpu_offload_bytes": 20 * GIB}, 512),
        ({"name": "llama-3.1-70b", "card_gib": 24, "max_model_len": 8192, "tensor_parallel_size": 4}, 512),
    ],
)
def test_the_least_offload_that_lets_it_start_is_proposed(question_fields: dict[str, Any], host_gib: int) -> None:
    settings = {**question_fields, "host_memory_bytes": host_gib * GIB}
    change = find_offload(estimated(**settings))
    assert change is not None
    offload_gib = int(change.settings[0][1])

    assert can_start(estimated(**{**settings, "cpu_offload_bytes": offload_gib * GIB})) is True
    assert can_start(estimated(**{**settings, "cpu_offload_bytes": (offload_gib - 1) * GIB})) is not True
    assert change.price.startswith("slow: every step copies them over PCIe, about ")


@pytest.mark.parametrize("host_gib", [None, 64])
def test_no_offload_is_proposed_that_the_host_does_not_hold(host_gib: int | None) -> None:
    host_bytes = None if host_gib is None else host_gib * GIB
    estimate = estimated("llama-3.1-70b", max_model_len=8192, host_memory_bytes=host_bytes)

    assert find_offload(estimate) is None


def test_no_offload_is_proposed_for_a_host_whose_own_memory_is_short() -> None:
    assert find_offload(estimated(**ASKED, kv_offloading_bytes=64 * GIB, host_memory_bytes=64 * GIB)) is None


def test_no_offload_is_proposed_for_unified_memory() -> None:
    estimate = estimated("llama-3.1-70b", max_model_len=8192, unified_memory=True, host_memory_bytes=512 * GIB)

    assert find_offload(estimate) is None


def test_the_answer_shows_the_offload_with_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu-memory", "80GiB", "--max-model-len", "8192", "--host-memory", "512GiB")

    answer = plan(capsys, *of("llama-3.1-70b"), *words)

    shown = " ".join(answer.out.split())
    assert "--cpu-offload-gb 66 slow: every step copies them over PCIe, about 2.8 s at 25 GB/s" in shown
