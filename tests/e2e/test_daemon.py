"""The real process: its whole run, over real sockets and a C library as NVML."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import Answer, EngineServer, cut, hang, page, with_head
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.process import Page, daemon, eventually
from vllm_headroom_tools.demo.fleet import FLEET_SCENARIOS

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
FAST = {"SAMPLE_INTERVAL_SECONDS": "1", "GPU_SAMPLE_INTERVAL_SECONDS": "0.2"}
"""A source has a second to answer: less would fail now and then on a machine that is busy."""
PATIENT = {"SAMPLE_INTERVAL_SECONDS": "3", "GPU_SAMPLE_INTERVAL_SECONDS": "1"}
"""For what must be answered within an interval on a machine that may be busy."""

OF_ITS_LIFE = {
    f"headroom_engine_{name}" for name in ("state", "start_timestamp_seconds", "restarts_total", "exits_total")
}
"""What is known of an engine whose page fails."""


def engine_is(*, up: bool) -> Callable[[Page], bool]:
    return lambda page: page.value("source_up", source="engine") == up


def both_are_up(page: Page) -> bool:
    return all(page.value("source_up", source=source) == 1 for source in ("engine", "nvml"))


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, [FakeGpu(uuid=f"GPU-{index}", used_bytes=index * GIB) for index in range(1, 4)])


def test_both_sides_are_on_one_page(nvml: FakeNvml) -> None:
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **FAST, **nvml.environment()) as running:
        seen_page = running.sees(both_are_up, "both sides answer")

        assert seen_page.value("engine_requests_running", model_name="tiny", engine="0") == 8
        assert seen_page.value("engine_requests_waiting") == 16
        assert seen_page.value("gpu_memory_used_bytes", uuid="GPU-3") == 3 * GIB
        assert seen_page.value("sample_skew_seconds") < 1
        assert seen_page.value("sample_age_seconds") < 60
        assert not seen_page.has("memory_reported_bytes"), "none of three GPUs may be taken for the engine's by a guess"
        assert "cannot tell which GPUs the engine uses" in running.log()


def test_gpus_named_by_the_operator_are_compared(nvml: FakeNvml) -> None:
    budget_page = RECORDED.replace('kv_cache_memory_bytes="1073741824"', 'kv_cache_memory_bytes="None"')
    settings = {"GPUS": "GPU-2,0", **FAST, **nvml.environment()}
    with EngineServer(page(budget_page)) as engine, daemon(ENGINE_URL=engine.url, **settings) as running:
        seen_page = running.sees(lambda page: page.has("memory_reported_bytes"), "the budget is known")

        assert seen_page.value("memory_reported_bytes", uuid="GPU-2", basis="budget") == 0.92 * 80 * GIB
        assert seen_page.value("memory_discrepancy_bytes", uuid="GPU-1") == GIB - 0.92 * 80 * GIB
        assert not seen_page.has("memory_reported_bytes", uuid="GPU-3")


def test_an_engine_that_appears_late_is_found() -> None:
    with EngineServer(page(RECORDED)) as first_server:
        port = first_server.port
    with daemon(ENGINE_URL=f"http://127.0.0.1:{port}", **PATIENT) as running:
        running.sees(engine_is(up=False), "nothing listens yet")
        with EngineServer(page(RECORDED), port=port):
            running.sees(engine_is(up=True), "the engine answers")
        assert running.log().count("reason=unreachable") == 1


def huge(connection: socket.socket, closing: threading.Event) -> None:
    page("x" * 50_000_000)(connection, closing)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hang, "timeout"),
        (cut(with_head(RECORDED.encode()[:20_000], length=50_000)), "incomplete"),
        (huge, "too_large"),
        (page("<html>log in</html>"), "not_metrics"),
        (page("gone", status="404 Not Found"), "not_found"),
        (page("", status="302 Found", headers=("Location: http://elsewhere/",)), "redirect"),
        (page("", status="302 Found", headers=("Location: javascript:alert(1)",)), "redirect"),
    ],
    ids=["hangs", "half-a-page", "50-MB", "HTML", "404", "redirect", "redirect-to-nowhere"],
)
def test_a_broken_page_costs_the_engines_half_only(answer: Answer, reason: str, nvml: FakeNvml) -> None:
    with EngineServer(page(RECORDED)) as engine:
        settings = {"ENGINE_URL": engine.url, "ENGINE_TIMEOUT_SECONDS": "4", **PATIENT, **nvml.environment()}
        with daemon(**settings) as running:
            running.sees(engine_is(up=True), "the engine answers")

            engine.answer = answer
            seen_page = running.sees(engine_is(up=False), "the engine fails")

            assert not seen_page.names("headroom_engine_") - OF_ITS_LIFE, "stale is gone"
            assert not seen_page.has("input_available")
            assert seen_page.value("source_failures_total", source="engine", reason=reason) >= 1
            assert seen_page.has("source_last_success_timestamp_seconds", source="engine")
            assert seen_page.value("gpu_memory_used_bytes", uuid="GPU-1") == GIB
            assert running.get("/healthz").status_code == 200

            engine.answer = page(RECORDED)
            running.sees(engine_is(up=True), "the engine answers again")
            eventually(lambda: running.log().count('event="source answers" source=engine') == 2, "it is told")
            assert running.log().count('event="source failed" source=engine') == 1


def test_an_engine_that_restarts_counts_from_zero() -> None:
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **FAST) as running:
        running.sees(lambda page: page.value("engine_prompt_tokens_total") == 512, "the first life")

        engine.answer = page((FOLDER / "vllm-0.32.0" / "first-scrape-ever.prom").read_text())
        seen_page = running.sees(lambda page: page.value("engine_prompt_tokens_total") == 0, "the second life")

        assert not seen_page.has("engine_prefix_cache_hit_ratio")


def test_scrapes_are_served_at_once_while_the_engine_hangs(nvml: FakeNvml) -> None:
    with EngineServer(hang) as engine, daemon(ENGINE_URL=engine.url, **PATIENT, **nvml.environment()) as running:
        running.sees(lambda page: page.has("source_up"), "the first sample")
        with ThreadPoolExecutor(8) as clients:
            texts = list(clients.map(lambda _: running.get("/metrics").text, range(80)))

        assert all(Page(text).value("source_up", source="engine") == 0 for text in texts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0_while_everything_hangs(number: int, nvml: FakeNvml) -> None:
    nvml.hangs["nvmlDeviceGetMemoryInfo_v2"] = 3600
    nvml.write()
    with EngineServer(hang) as engine, daemon(ENGINE_URL=engine.url, **nvml.environment()) as running:
        eventually(lambda: engine.requests and "nvmlDeviceGetMemoryInfo_v2 GPU-1" in nvml.calls(), "both sides hang")

        status, _ = running.stop(number)

        assert status == 0
        assert "Traceback" not in running.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_after_the_start_ends_it_with_status_0(number: int) -> None:
    with daemon() as running:
        assert running.stop(number)[0] == 0
        assert "Traceback" not in running.log()


def test_a_signal_ends_it_with_status_0_while_a_client_does_not_read() -> None:
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **FAST) as running:
        port = int(running.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")

            assert running.stop()[0] == 0


def test_a_signal_ends_it_with_status_0_while_the_resolver_hangs(tmp_path: Path) -> None:
    source, library, asked_file = tmp_path / "resolver.c", tmp_path / "resolver.so", tmp_path / "asked"
    source.write_text(
        "#include <stdio.h>\n#include <unistd.h>\n"
        "int getaddrinfo(const char *node, const char *service, const void *hints, void *result) {"
        f' fclose(fopen("{asked_file}", "w")); sleep(20); return -3; }}\n'
    )
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler named cc: the resolver that hangs cannot be built")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    with daemon(ENGINE_URL="http://engine.example:8000", LD_PRELOAD=str(library), **FAST) as running:
        eventually(asked_file.exists, "the resolver is asked")

        status, seconds = running.stop()

        assert status == 0
        assert seconds < 15, "the resolver's 20 s were waited for"


def test_a_gpu_that_is_lost_costs_only_itself(nvml: FakeNvml) -> None:
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **FAST, **nvml.environment()) as running:
        running.sees(lambda page: page.value("gpu_up", uuid="GPU-2") == 1, "the GPU answers")

        nvml.gpus[1].errors["all"] = 15
        nvml.write()
        seen_page = running.sees(lambda page: page.value("gpu_up", uuid="GPU-2") == 0, "the GPU is lost")

        assert not seen_page.has("gpu_memory_used_bytes", uuid="GPU-2")
        assert seen_page.value("gpu_memory_used_bytes", uuid="GPU-3") == 3 * GIB
        assert seen_page.value("source_up", source="nvml") == 1


def test_without_the_library_the_engines_half_works() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has an NVIDIA driver")
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **FAST) as running:
        seen_page = running.sees(
            lambda page: (
                page.value("source_failures_total", source="nvml", reason="library_missing") >= 1
                and page.value("source_up", source="engine") == 1
            ),
            "NVML has failed and the engine answers",
        )

        assert seen_page.value("source_up", source="nvml") == 0
        assert not seen_page.names("headroom_gpu_")


@pytest.mark.parametrize("code", [18, 999])
def test_what_only_a_new_container_mends_ends_with_status_3(code: int, nvml: FakeNvml) -> None:
    nvml.errors["nvmlInitWithFlags"] = code
    nvml.write()
    with daemon(GPU_FATAL_GRACE_SECONDS="0.3", **FAST, **nvml.environment()) as running:
        assert running.process.wait(60) == 3
        assert "level=critical" in running.log()


def test_the_engines_processes_are_found_and_their_gpu_is_taken(nvml: FakeNvml, tmp_path: Path) -> None:
    server = tmp_path / "vllm"
    server.write_text("import subprocess, sys; subprocess.run(['bash', '-c', sys.argv[-1]])")
    core = "echo $$; exec -a VLLM::EngineCore sleep 600"
    with EngineServer(page(RECORDED)) as engine:
        command = [sys.executable, str(server), "serve", "m", "--port", str(engine.port), core]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout is not None
            nvml.gpus[1].processes = {int(process.stdout.readline()): GIB}
            nvml.write()
            try:
                with daemon(ENGINE_URL=engine.url, **FAST, **nvml.environment()) as running:
                    seen_page = running.sees(
                        lambda page: page.has("gpu_info", attribution="process"), "the GPU is taken"
                    )
                    assert seen_page.value("gpu_info", uuid="GPU-2", attribution="process") == 1
                    assert seen_page.value("gpu_memory_held_bytes", uuid="GPU-2", holder="engine") == GIB
                    assert seen_page.value("gpu_memory_held_bytes", uuid="GPU-2", holder="unattributed") == GIB
                    assert seen_page.value("host_memory_bytes", process="engine_core") > 0
            finally:
                os.killpg(process.pid, signal.SIGKILL)


def test_an_address_in_use_ends_it_with_status_2(nvml: FakeNvml) -> None:
    with daemon(**nvml.environment()) as running:
        port = running.url.rpartition(":")[2]
        result = subprocess.run(
            [sys.executable, "-m", "vllm_headroom", "--listen-host", "127.0.0.1", "--listen-port", port],
            capture_output=True,
            text=True,
            check=False,
        )

    assert result.returncode == 2
    assert "cannot listen" in result.stderr
    assert result.stderr.rstrip().endswith('problem="Address already in use"')
    assert "Traceback" not in result.stderr


def test_the_demo_says_that_it_is_one() -> None:
    with daemon("demo", "--scenario", "healthy", "--speed", "60") as running:
        seen_page = running.sees(lambda page: page.has("engine_prefix_cache_hit_ratio"), "the demo samples")

        assert 'model_name="simulated' in seen_page.text
        assert "simulated" in running.get("/").text
        assert "simulated" in running.log()
        assert running.stop()[0] == 0


def test_the_demos_fleet_has_the_series_of_every_engine_on_one_page() -> None:
    with daemon("demo", "--scenario", "fleet", "--speed", "60") as running:
        readable = {f"vllm-{name}-{place}" for place, name in enumerate(FLEET_SCENARIOS) if name != "blind"}
        seen_page = running.sees(
            lambda page: readable <= set(re.findall(r'headroom_engine_awake\{.*?pod="(.*?)"', page.text)),
            "all are sampled but the one whose page fails",
        )
        families = list(text_string_to_metric_families(seen_page.text))
        listed = running.get("/").text
        assert f"{len(FLEET_SCENARIOS)} engines on the simulated fleet" in listed
        (way,) = re.findall(r'<a href="(/\?engine=[^"]*vllm-leak-0)"', listed)
        assert "scenario leak at" in running.get(way).text

    names = [family.name for family in families]
    samples = [sample for family in families for sample in family.samples]
    series = {(sample.name, *sorted(sample.labels.items())) for sample in samples}
    pods = {sample.labels["pod"]: sample.labels["namespace"] for sample in samples if sample.name == "up"}
    uuids = {sample.labels["uuid"] for sample in samples if sample.name == "headroom_gpu_memory_used_bytes"}
    assert len(names) == len(set(names))
    assert len(samples) == len(series)
    assert all(sample.labels["instance"] == f"{sample.labels['pod']}:9839" for sample in samples)
    assert pods["vllm-leak-0"] == pods["vllm-restart-3"] == "team-0"
    assert len(pods) == len(FLEET_SCENARIOS)
    assert len(uuids) == len(FLEET_SCENARIOS) + 1, "one has two MIG instances"


def test_the_demos_leak_reaches_the_alarm_with_its_rate() -> None:
    demo = ("demo", "--scenario", "leak", "--speed", "500", "--sample-interval-seconds", "60")
    with daemon(*demo) as running:
        seen_page = running.sees(
            lambda page: page.value("leak_state", state="leaking") == 1, "the leak is found", deadline_seconds=180
        )

        assert 6_000 < seen_page.value("leak_bytes_per_request") < 26_000  # 12,800; a first alarm is rough
        assert seen_page.value("leak_bytes_per_second_lower") < seen_page.value("leak_bytes_per_second")
        assert seen_page.has("time_to_oom_seconds")
