"""A log of the engine: which cause, by which line, and the option with its value."""
# ruff: noqa: E501 - lines of logs are long

from __future__ import annotations

import gzip
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.command import read_data, run_command
from tests.engine_logs import DEATH, OOM, VLLM_0_19, begin
from tests.unit.commands.advise import traces

LOADING = "(EngineCore pid=2) INFO 04-22 01:46:22 [x.py:1] Starting to load model org/m...\n"
PROFILING = "(EngineCore pid=2) INFO 04-22 01:46:30 [x.py:1] Model loading took 33.88 GiB memory and 20.0 seconds\n"
CACHE = "(EngineCore pid=2) INFO 04-22 01:46:42 [x.py:1] Available KV cache memory: 37.28 GiB\n"
NO_CACHE = "(EngineCore pid=2) INFO 04-22 01:46:42 [x.py:1] Available KV cache memory: -1.28 GiB\n"
TOKENS = "(EngineCore pid=2) INFO 04-22 01:46:42 [x.py:1] GPU KV cache size: 244,304 tokens\n"
GRAPHS = "(EngineCore pid=2) INFO 04-22 01:46:42 [x.py:1] Estimated CUDA graph memory: 4.20 GiB total\n"
SAMPLER = 'Traceback (most recent call last):\n  File "/x/vllm/v1/sample/sampler.py", line 88, in forward\n'
STATES = "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856).\n"
LONG = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (9.00 GiB KV cache is needed,"
    " which is larger than the available KV cache memory (4.11 GiB). Based on the available memory, the estimated"
    " maximum model length is 59800.\n"
)
LONG_BEFORE = (
    "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV"
    " cache (9008). Try increasing\n"
)
USED = (
    "ValueError: Free memory on device cuda:1 (60.87/79.19 GiB) on startup is less than desired GPU memory utilization"
    " (0.95, 75.23 GiB).\n"
)
PHI = (
    "  Value error, User-specified max_model_len (8192) is greater than the derived max_model_len"
    " (max_position_embeddings=2048.0 or model_max_length=None in model's config.json).\n"
)

CASES: dict[str, tuple[str, str, list[tuple[str, float]]]] = {
    "at work": (VLLM_0_19 + DEATH, "gpu_out_of_memory", [("--gpu-memory-utilization", 0.93)]),
    "loading": (
        begin("0.19.0", ", 'tensor_parallel_size': 4") + LOADING + OOM,
        "gpu_out_of_memory",
        [("--tensor-parallel-size", 8)],
    ),
    "profiling": (
        begin("0.19.0", ", 'max_num_batched_tokens': 16384, 'max_num_seqs': 256") + PROFILING + OOM,
        "gpu_out_of_memory",
        [("--max-num-batched-tokens", 8192), ("--max-num-seqs", 128), ("--tensor-parallel-size", 2)],
    ),
    "sampling": (
        begin("0.19.0", ", 'max_num_seqs': 1024") + CACHE + SAMPLER + OOM,
        "gpu_out_of_memory",
        [("--gpu-memory-utilization", 0.88), ("--max-num-seqs", 512)],
    ),
    "a cache in bytes": (
        begin("0.19.0", ", 'kv_cache_memory_bytes': 40000000000") + CACHE + OOM,
        "gpu_out_of_memory",
        [("--kv-cache-memory-bytes", 38861275136)],
    ),
    "a cache that gets too small": (
        begin("0.19.0", ", 'max_model_len': 242000") + CACHE + TOKENS + OOM,
        "gpu_out_of_memory",
        [("--gpu-memory-utilization", 0.88), ("--max-model-len", 232160)],
    ),
    "no cache": (
        begin("0.21.0", ", 'gpu_memory_utilization': 0.9")
        + NO_CACHE
        + GRAPHS
        + "ValueError: No available memory for the cache blocks. Try\n",
        "no_kv_cache_memory",
        [("--gpu-memory-utilization", 0.93), ("--enforce-eager", 0), ("--tensor-parallel-size", 2)],
    ),
    # Real lines of vLLM 0.32 at its usual level, which does not log the size of the GPU before.
    "no cache in a small share": (
        begin("0.32.0", ", 'gpu_memory_utilization': 0.05").split("(EngineCore", 1)[0]
        + "(EngineCore pid=2) INFO 11-29 14:51:28 [gpu_worker.py:700] Available KV cache memory: -0.13 GiB\n"
        + "ValueError: No available memory for the cache blocks. Try\n",
        "no_kv_cache_memory",
        [("--gpu-memory-utilization", 0.92), ("--tensor-parallel-size", 2)],
    ),
    "no cache on a full card": (
        begin("0.21.0", ", 'gpu_memory_utilization': 0.95")
        + NO_CACHE
        + "ValueError: No available memory for the cache blocks. Try\n",
        "no_kv_cache_memory",
        [("--tensor-parallel-size", 2)],
    ),
    "too long": (
        begin("0.11.0", ", 'gpu_memory_utilization': 0.85, 'max_model_len': 131072") + LONG,
        "context_too_long",
        [("--gpu-memory-utilization", 0.92), ("--max-model-len", 59800), ("--tensor-parallel-size", 2)],
    ),
    "too long, in words of before": (
        begin("0.6.4") + LONG_BEFORE,
        "context_too_long",
        [("--max-model-len", 9008), ("--tensor-parallel-size", 2)],
    ),
    "states": (begin("0.26.0") + STATES, "too_few_state_blocks", [("--max-num-seqs", 856)]),
    "a used GPU": (
        begin("0.19.0", ", 'gpu_memory_utilization': 0.95") + USED,
        "little_free_memory",
        [("--gpu-memory-utilization", 0.76)],
    ),
    "a block": (
        begin("0.19.0") + "AssertionError: block_size (2096) must be <= max_num_batched_tokens (2048)\n",
        "block_beyond_batch",
        [("--max-num-batched-tokens", 2096)],
    ),
    "beyond the model": (
        begin("0.19.0", ", 'max_model_len': 8192") + PHI,
        "context_beyond_model",
        [("--max-model-len", 2048)],
    ),
    "a rank without a GPU": (
        begin("0.19.0", ", 'data_parallel_size': 2") + "AssertionError: DP adjusted local rank 1 is out of bounds. \n",
        "too_few_gpus",
        [("--data-parallel-size", 1)],
    ),
    "no access": (
        begin("0.19.0") + "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://h/x\n",
        "model_unavailable",
        [],
    ),
    "killed": (
        begin("0.19.0")
        + "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': -9}\n",
        "killed",
        [],
    ),
}


def advise(log: str, *words: str) -> CompletedProcess[str]:
    return run_command("advise", "-", *words, stdin=log)


@pytest.mark.parametrize("case", CASES)
def test_a_log_has_its_cause_and_the_option_with_its_value(case: str) -> None:
    log, cause, options = CASES[case]
    process = advise(log, "--json")

    (advice,) = read_data(process.stdout)["advice"]
    assert (process.returncode, process.stderr) == (1, "")
    assert advice["cause"] == cause
    flagged = [change for change in advice["changes"] if change["flag"] is not None]
    assert [(change["flag"], change["value"] or 0) for change in flagged] == options
    assert advice["changes"]


def test_the_text_has_the_line_its_time_the_code_and_the_refused_bytes() -> None:
    process = advise(VLLM_0_19 + DEATH)

    assert process.returncode == 1
    assert (
        "1. GPU memory ran out while it served: 3.74 GiB were refused on GPU 0, 3.68 GiB were free, 1.9 GiB were unused\n"
        in process.stdout
    )
    assert (
        "seen  line 17, 04-22 02:00:00, EngineCore, vllm/v1/sample/sampler.py:88 (forward), OutOfMemoryError"
        in process.stdout
    )
    assert "expandable_segments:True" in process.stdout


def test_a_start_that_serves_shows_its_parts_and_what_would_fit() -> None:
    process = advise(VLLM_0_19.replace("'gpu_memory_utilization': 0.95", "'gpu_memory_utilization': 0.85"))

    assert process.returncode == 0
    assert "   KV cache        37.3 GiB, 244,304 tokens  line 9\n" in process.stdout
    assert "with --gpu-memory-utilization 0.95 the KV cache would hold" in " ".join(process.stdout.split())


@pytest.mark.parametrize(
    ("log", "status", "headline"),
    [
        (begin("0.19.0") + PROFILING, 2, "The log ends in the profile run, without an error."),
        (VLLM_0_19 + "(APIServer pid=1) INFO:     Shutting down\n", 0, "The engine shut down on request."),
    ],
)
def test_a_log_without_an_error_is_no_failure(log: str, status: int, headline: str) -> None:
    process = advise(log)

    assert process.returncode == status
    assert headline in process.stdout


def test_of_several_starts_the_one_that_failed_is_judged() -> None:
    notes = read_data(advise((VLLM_0_19 + DEATH) * 3 + VLLM_0_19, "--json").stdout)["notes"]

    assert "The same in 3 of the log's 4 starts." in notes
    assert any(note.startswith("A later start") and note.endswith("serves.") for note in notes)


def test_options_of_the_operator_beat_those_of_the_log() -> None:
    data = read_data(advise(VLLM_0_19 + DEATH, "--gpu-memory-utilization", "0.9", "--json").stdout)

    assert [change["value"] for change in data["advice"][0]["changes"] if change["flag"]] == [0.88]


def test_a_packed_file_is_read_and_a_trace_is_still_a_trace(tmp_path: Path) -> None:
    log = tmp_path / "engine.log.gz"
    log.write_bytes(gzip.compress((VLLM_0_19 + DEATH).encode()))
    trace = tmp_path / "trace.jsonl"
    trace.write_text(traces.text(traces.configuration_overshoot()))

    assert read_data(run_command("advise", str(log), "--json").stdout)["origin"] == "log"
    assert read_data(run_command("advise", str(trace), "--json").stdout)["origin"] == "trace"


@pytest.mark.parametrize("content", [b"", b"my token is hf_secretsecret\n", b"\x00" * 100, b"\xfd7zXZ\x00"])
def test_a_file_that_is_neither_is_refused_without_a_word_of_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    process = run_command("advise", str(file))

    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert "is not a trace of this version or a log of an engine" in process.stderr
    assert "hf_" not in process.stderr


def test_no_secret_of_a_log_is_printed() -> None:
    log = VLLM_0_19 + DEATH + "(APIServer pid=1) INFO 04-22 02:00:00 [x.py:1] Received request r: prompt: 'hunter2'\n"
    for words in ((), ("--json",)):
        output: Any = advise(log, *words).stdout
        for secret in ("sk-very", "hf_secret", "hunter2"):
            assert secret not in output


def test_another_engine_gets_no_option_of_vllm() -> None:
    log = (
        "[2025-10-09 09:20:00] server_args=ServerArgs(model_path='a/b', tp_size=2)\n"
        "[2025-10-09 09:20:11 TP0] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.74 GiB.\n"
    )
    process = advise(log)

    assert "--mem-fraction-static" in process.stdout
    assert "--gpu-memory-utilization" not in process.stdout


def known(log: str) -> str:
    """Return the log as that of a model that plan knows."""
    return log.replace("org/m", "Qwen/Qwen3-32B")


def test_a_share_with_which_plan_says_that_it_starts_is_advised() -> None:
    process = advise(known(begin("0.19.0", ", 'gpu_memory_utilization': 0.95, 'max_model_len': 8192") + USED), "--json")
    changes = read_data(process.stdout)["advice"][0]["changes"]

    assert [change["value"] for change in changes if change["flag"] == "--gpu-memory-utilization"] == []
    assert [change["value"] for change in changes if change["flag"] == "--tensor-parallel-size"] == [2]
    assert "by plan it starts on 2" in process.stdout


def test_a_share_beside_others_that_is_enough_is_said_to_be() -> None:
    small = begin("0.19.0", ", 'gpu_memory_utilization': 0.95, 'max_model_len': 8192") + USED
    process = advise(small.replace("org/m", "Qwen/Qwen3-8B"))

    assert "--gpu-memory-utilization 0.76 (now 0.95)" in process.stdout
    assert "by plan it starts with that" in " ".join(process.stdout.split())


def test_what_is_missing_is_set_apart_from_its_heading(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(begin("0.32.0") + LOADING + PROFILING)

    assert "   missing the end: the engine still starts" in run_command("advise", str(tmp_path / "engine.log")).stdout
