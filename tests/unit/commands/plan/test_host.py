"""Plans for what vLLM keeps on the host: processes, tiers of the KV cache, offloaded weights, images."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.commands.plan.asked import estimated, of, plan
from vllm_headroom.units import GIB
from vllm_headroom_tools.sizing.estimate import can_start

ASKED: dict[str, Any] = {"card_gib": 80, "max_model_len": 8192}


def test_by_hand() -> None:
    """A server and a core of 0.6 GiB; 64 GiB of a tier and 10 GiB of weights, which take up to 1.92 times that."""
    found = estimated(**ASKED, kv_offloading_bytes=64 * GIB, cpu_offload_bytes=10 * GIB).host

    assert (round(found.low / GIB, 2), round(found.high / GIB, 2)) == (75.2, 143.28)


def test_four_gpus_of_one_engine_have_a_worker_each_and_two_engines_a_tier_each() -> None:
    four = estimated(**ASKED, tensor_parallel_size=4, kv_offloading_bytes=64 * GIB).host

    assert round(four.low / GIB, 2) == 64 + 6 * 0.6


@pytest.mark.parametrize(("host_gib", "expected"), [(200, True), (100, None), (64, False)])
def test_a_host_that_is_too_small_keeps_vllm_from_starting(host_gib: int, expected: bool | None) -> None:  # noqa: FBT001 - a case
    found = estimated(**ASKED, kv_offloading_bytes=64 * GIB, host_memory_bytes=host_gib * GIB)

    assert can_start(found) is expected


def test_the_verdict_names_the_host_and_a_tier_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu-memory", "80GiB", "--max-model-len", "8192", "--kv-offloading-size", "64", "--host-memory", "64GiB")

    answer = plan(capsys, *of("llama-3.1-8b"), *words)

    assert answer.status == 1
    told = " ".join(answer.out.split())
    assert "vLLM's processes need at least 65.20 GiB of the host's 64.00 GiB" in told
    assert "--kv-offloading-size 32 fewer prefixes are kept" in told
