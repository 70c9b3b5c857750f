"""A start's log: plan takes its options and figures, and plans other options from them."""
# ruff: noqa: E501 - lines of logs are long

from __future__ import annotations

from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.command import read_data, run_command
from tests.engine_logs import DEATH, begin

PARTS = (
    "(EngineCore pid=2) DEBUG 04-22 00:04:40 [gpu_worker.py:435] Memory profiling takes 30.0 seconds. Total non KV cache memory: 17.13GiB;"
    " torch peak memory increase: 1.89GiB; non-torch forward increase memory: 0.25GiB; weights memory: 14.99GiB.\n"
    "(EngineCore pid=2) INFO 04-22 00:04:40 [gpu_worker.py:436] Available KV cache memory: 58.1 GiB\n"
    "(EngineCore pid=2) INFO 04-22 00:04:40 [kv_cache_utils.py:1319] GPU KV cache size: 476,016 tokens\n"
)
OPTIONS = ", 'max_model_len': 8192, 'gpu_memory_utilization': 0.95"


def log(version: str = "0.19.0", options: str = OPTIONS) -> str:
    return begin(version, options).replace("org/m", "meta-llama/Llama-3.1-8B-Instruct") + PARTS


def plan(text: str, *words: str) -> CompletedProcess[str]:
    return run_command("plan", "--log", "-", *words, stdin=text)


def data(text: str, *words: str) -> dict[str, Any]:
    return read_data(plan(text, *words, "--json").stdout)


def test_the_figures_of_the_log_replace_the_ranges() -> None:
    planned = data(log())

    assert planned["fits"] is True
    assert planned["kv_capacity_tokens"] == pytest.approx(476016, rel=0.001)
    assert planned["weights_bytes"] == round(14.99 * 2**30)
    assert planned["assumptions"]["non_torch"]["origin"] == "from the log of this start"
    assert planned["log"]["kv_cache_tokens"] == 476016
    assert planned["log"]["changes"] == []


def test_options_that_are_typed_are_planned_from_the_log() -> None:
    process = plan(log(), "--max-model-len", "65536", "--gpu-memory-utilization", "0.9")

    assert process.returncode == 0
    first_line, second, *_ = process.stdout.splitlines()
    assert first_line == "You have: 58.10 GiB of KV cache, 476,016 tokens (the log, vLLM 0.19.0)."
    assert second.startswith("With --gpu-memory-utilization 0.9 --max-model-len 65536: at least 443,")


def test_a_smaller_batch_takes_no_more_activations_and_a_larger_no_less() -> None:
    logged_bytes = 1.89 * 2**30
    batch = f"{OPTIONS}, 'max_num_seqs': 512, 'max_num_batched_tokens': 4096"
    same = data(log(options=batch), "--max-num-seqs", "512")["activation_bytes"]
    fewer = data(log(options=batch), "--max-num-seqs", "256")["activation_bytes"]
    activation_range = data(log(options=batch), "--max-num-batched-tokens", "8192")["activation_bytes"]

    assert same["low"] == same["high"] == pytest.approx(logged_bytes)
    assert fewer["high"] <= logged_bytes + 1
    assert activation_range["low"] >= logged_bytes - 1


def test_other_gpus_are_planned_without_the_figures_that_depend_on_them() -> None:
    planned = data(log(), "-tp", "2")

    assert planned["assumptions"]["non_torch"]["origin"] != "from the log of this start"
    assert planned["weights_bytes"] < 9 * 2**30


def test_another_card_is_planned_as_such() -> None:
    planned = data(log(), "--gpu", "H200")

    assert planned["kv_capacity_tokens"] > 800_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (log("0.6.3"), "--log: the start is of vLLM 0.6.3; plan computes releases from 0.19 to 0.33"),
        (begin("0.19.0"), "--log: no start of vLLM in it got as far as its KV cache"),
        ("hello hf_secretsecret\n", "is not a log of an engine: no line of 1 is an engine's"),
        (begin("0.19.0") + PARTS + DEATH, "--model org/m: not a model that is known here"),
    ],
)
def test_a_log_that_cannot_be_planned_from_is_one_line(text: str, why: str) -> None:
    process = plan(text)

    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert why in process.stderr
    assert "hf_" not in process.stderr
