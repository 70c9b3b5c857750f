"""What vLLM's command line sets, read as vLLM's own parser reads it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_headroom.model import EngineOptions
from vllm_headroom.scrape.proc.options import read_options, star_secrets

GIB = 2**30


def read(*arguments: str, model: str = "/models/llama") -> EngineOptions:
    options = read_options(("/usr/bin/python3", "/usr/local/bin/vllm", "serve", model, *arguments))

    assert options is not None

    return options


@pytest.mark.parametrize(
    "spelt",
    [
        ("--max-num-seqs", "128"),
        ("--max_num_seqs", "128"),
        ("--max-num-seqs=128",),
        ("--max_num-seqs=128",),
        ("--max-num-seqs", "64", "--max-num-seqs", "128"),
    ],
)
def test_every_spelling_that_vllm_accepts_is_read(spelt: tuple[str, ...]) -> None:
    assert read(*spelt).max_num_seqs == 128


def test_all_that_is_used_is_read_by_vllms_names() -> None:
    options = read(
        *("-tp", "4", "-pp=2", "--data-parallel-size", "8", "-asc", "3", "--max-model-len", "32k"),
        *("--gpu-memory-utilization", "0.85", "--kv-cache-dtype", "fp8", "--kv-cache-memory-bytes", "20G"),
        *("--kv-offloading-size", "64", "--cpu-offload-gb", "10.5", "--mm-processor-cache-gb", "0"),
        *("--config", "/etc/vllm.yaml"),
    )

    assert (options.tensor_parallel_size, options.pipeline_parallel_size, options.data_parallel_size) == (4, 2, 8)
    assert (options.api_server_count, options.max_model_len, options.gpu_memory_utilization) == (3, 32_000, 0.85)
    assert (options.kv_cache_dtype, options.kv_cache_memory_bytes) == ("fp8", 20 * GIB)
    assert (options.kv_offloading_size, options.cpu_offload_gb, options.mm_processor_cache_gb) == (64.0, 10.5, 0.0)
    assert (options.model, options.config) == ("/models/llama", "/etc/vllm.yaml")
    assert options.option_names[:3] == ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


LMCACHE = '{"kv_connector":"LMCacheConnectorV1","kv_connector_extra_config":{"lmcache.max_local_cpu_size": 20.5}}'
OFFLOADING = '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 17179869184}}'
BOTH = f'{{"kv_connector": "MultiConnector", "kv_connector_extra_config": {{"connectors": [{LMCACHE}, {OFFLOADING}]}}}}'


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (OFFLOADING, (16.0 * GIB, None)),
        (LMCACHE, (None, 20.5)),
        (BOTH, (16.0 * GIB, 20.5)),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both"}', (None, None)),
        ('{"kv_connector_extra_config": {"cpu_bytes_to_use": ' + "9" * 400 + "}}", (None, None)),
        ('{"cpu_bytes_to_use": "many"', (None, None)),
        ("[" * 100_000, (None, None)),
    ],
)
def test_the_host_memory_of_a_connector_is_read_from_its_configuration(
    text: str, sizes: tuple[float | None, float | None]
) -> None:
    options = read("--kv-transfer-config", text, "--port", "1")

    assert (options.kv_connector_bytes, options.lmcache_gb) == sizes
    assert read(f"--kv_transfer_config={text}").lmcache_gb == sizes[1]


@pytest.mark.parametrize(
    ("text", "length"),
    [("32K", 32_768), ("25.6k", 25_600), ("1M", 2**20), ("auto", None), ("-1", None), ("2.5K", None)],
)
def test_suffixes_are_vllms(text: str, length: int | None) -> None:
    assert read("--max-model-len", text).max_model_len == length


def test_the_model_is_the_word_after_serve_or_its_option() -> None:
    module = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/name")
    unnamed = read_options(("vllm", "serve", "--port", "1"))

    assert (read().model, read("--model", "/other").model) == ("/models/llama", "/other")
    assert (options := read_options(module)) is not None
    assert options.model == "org/name"
    assert unnamed is not None
    assert unnamed.model is None


@pytest.mark.parametrize("command", [(), ("nginx",), ("python", "-m", "sglang.launch_server", "--max-num-seqs", "1")])
def test_another_program_has_none_of_its_options(command: tuple[str, ...]) -> None:
    assert read_options(command) is None


@pytest.mark.parametrize("text", ["", "--port", "nan", "inf", "9" * 5000, "9" * 400, "\ufffd\ufffd", "1e400"])
def test_what_is_no_value_counts_as_not_given(text: str) -> None:
    options = read("--max-num-seqs", text, "--gpu-memory-utilization", text, "--max-model-len", "8k")

    assert (options.max_num_seqs, options.gpu_memory_utilization, options.max_model_len) == (None, None, 8000)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-key", "SECRET"),
        ("--api-key", "one", "SECRET"),
        ("--api_key=SECRET",),
        ("--hf-token", "SECRET"),
        ("--otlp-traces-endpoint", "https://me:SECRET@host/x"),
        ("--otlp-traces-endpoint", "https://me:p@SECRET@host/x"),
        ("--x", "hf_SECRETSECRET"),
        ("--kv-transfer-config", '{"kv_connector": "X", "auth_token": "SECRET", "kv_role": "both"}'),
        ("--header", "Authorization: Bearer SECRET.SECRET"),
        ("--middleware", "AWS_SECRET_ACCESS_KEY=SECRET"),
        ("--ssl-keyfile-password", "SECRET"),
    ],
)
def test_no_secret_of_a_command_line_is_shown(arguments: tuple[str, ...]) -> None:
    shown = read(*arguments, "--max-num-batched-tokens", "8192", "--tokenizer", "org/name").command

    assert "SECRET" not in shown.replace("AWS_SECRET_ACCESS_KEY", "")
    assert "***" in shown
    assert shown.endswith("--max-num-batched-tokens 8192 --tokenizer org/name")


@given(st.lists(st.text(max_size=40) | st.sampled_from(["--max-num-seqs", "--model=", "-tp", "--api-key", "="])))
def test_no_command_line_raises(arguments: list[str]) -> None:
    options = read(*arguments)

    assert options.max_num_seqs is None or options.max_num_seqs >= 0


def test_what_no_vllm_can_have_is_not_believed() -> None:
    options = read("--gpu-memory-utilization", "7", "--max-num-seqs", "9" * 30, "--kv-cache-dtype", "x" * 10_000)

    assert (options.gpu_memory_utilization, options.max_num_seqs, options.kv_cache_dtype) == (None, None, None)


def test_two_megabytes_of_command_line_are_read_in_bounded_time_and_shown_cut() -> None:
    began = time.process_time()
    options = read(*("--lora-modules", *(f"name{number}=/adapters/{number}" for number in range(90_000))), "-tp", "2")
    cut = star_secrets(("vllm", "serve", f"https://me:{'SECRET' * 1000}@host"))
    hostile = star_secrets(("vllm", "serve", "a" * 2_000_000, "key" * 600_000, "://" * 600_000))

    assert options.tensor_parallel_size == 2
    assert len(options.command) < 4200
    assert len(hostile) < 4200
    assert cut == "vllm serve https://***@host"
    assert time.process_time() - began < 30  # seconds would be quadratic behaviour; it takes a tenth
