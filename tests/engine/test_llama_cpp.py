"""A real llama.cpp server with a tiny model, beside the real daemon. Run by `make engine-test`."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contract.recorded import OTHERS
from tests.engine.serving import FOLDER, HERE, is_answering
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.ports import free_port
from tests.process import Daemon, daemon, eventually
from vllm_headroom_tools.cli import execute
from vllm_headroom_tools.doctor.command import COMMAND

pytestmark = pytest.mark.engine

PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    python = FOLDER / "llama" / "bin" / "python"
    process = subprocess.Popen([python, HERE / "llama_cpp.py", str(port), tmp_path_factory.mktemp("llama")])
    try:
        eventually(lambda: is_answering(f"http://127.0.0.1:{port}/health"), "llama.cpp answers", PATIENCE_SECONDS)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)


@pytest.fixture(scope="module")
def sidecar(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    nvml = FakeNvml(tmp_path_factory.mktemp("nvml"), [FakeGpu(uuid="GPU-a", used_bytes=GIB)])
    with daemon(ENGINE_URL=url, GPUS="0", SAMPLE_INTERVAL_SECONDS="0.2", **nvml.environment()) as running:
        yield running


def complete(url: str, prompt: str, tokens: int) -> dict[str, int]:
    body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True}
    answer = httpx.post(f"{url}/completion", json=body, timeout=PATIENCE_SECONDS)
    answer.raise_for_status()
    timings: dict[str, int] = answer.json()["timings"]
    return timings


def test_the_page_has_the_names_that_were_recorded(url: str) -> None:
    def names(page: str) -> set[str]:
        return {line.split(" ")[0] for line in page.splitlines() if not line.startswith("#")}

    assert names(httpx.get(f"{url}/metrics").text) == names((OTHERS / "llama-cpp-idle.prom").read_text())


def test_the_daemon_counts_what_the_client_was_reported(url: str, sidecar: Daemon) -> None:
    timings = [complete(url, "the same prompt twice over", 20) for _ in range(2)]
    prompts = sum(timing["prompt_n"] + timing["cache_n"] for timing in timings)

    page = sidecar.sees(
        lambda page: page.value("engine_generation_tokens_total", model_name="llama_cpp", engine="0") == 40,
        "both answers are counted",
        PATIENCE_SECONDS,
    )

    labels = {"model_name": "llama_cpp", "engine": "0"}
    assert page.value("engine_info", profile="llama_cpp", **labels) == 1
    assert page.value("engine_prompt_tokens_total", **labels) == prompts
    assert page.value("engine_prefix_cache_queries_total", **labels) == prompts
    assert page.value("engine_prefix_cache_hits_total", **labels) == sum(timing["cache_n"] for timing in timings)
    assert not page.has("engine_requests_finished_total")
    assert not page.has("engine_kv_cache_used_ratio")


def test_more_requests_than_slots_wait(url: str, sidecar: Daemon) -> None:
    def ask() -> None:
        while not has_seen.is_set():
            complete(url, "a long answer", 500)

    has_seen = threading.Event()
    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        labels = {"model_name": "llama_cpp", "engine": "0"}
        sidecar.sees(
            lambda page: (
                page.value("engine_requests_running", **labels) == 2
                and page.value("engine_requests_waiting", **labels) >= 1
            ),
            "two run and others wait",
            PATIENCE_SECONDS,
        )
    finally:
        has_seen.set()
        for client in clients:
            client.join(PATIENCE_SECONDS)


def test_the_doctor_says_what_it_does_not_tell(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    execute(COMMAND, "doctor", ["--engine-url", url])

    assert "llama.cpp does not export requests_finished" in " ".join(capsys.readouterr().out.split())


def test_another_profile_finds_nothing_and_says_what_it_looked_for(url: str, tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, [FakeGpu(uuid="GPU-a", used_bytes=GIB)])
    with daemon(ENGINE_URL=url, ENGINE_PROFILE="sglang", GPUS="0", **nvml.environment()) as running:
        eventually(
            lambda: "Looked for SGLang (sglang:" in running.log(), "what was looked for is told", PATIENCE_SECONDS
        )
