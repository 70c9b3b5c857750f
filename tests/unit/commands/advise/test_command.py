"""The command: what it reads, what it prints, how it ends."""

from __future__ import annotations

import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.command import read_data, run_command, run_process
from tests.fakes.engine_server import Answer, EngineServer, page
from tests.unit.commands.advise import pages, traces

VLLM = (
    'vllm:num_requests_running{model_name="m",engine="0"} 1\n'
    'vllm:cache_config_info{engine="0",gpu_memory_utilization="0.92",kv_cache_memory_bytes="None"} 1\n'
)


def advise(*words: str, trace: str = "") -> subprocess.CompletedProcess[str]:
    return run_command("advise", *words, stdin=trace)


@pytest.fixture(scope="module")
def overshoot() -> str:
    return traces.text(traces.configuration_overshoot())


TOLD = """\
960 samples over 7 h 59 min, 2025-10-09 08:53:20Z to 2025-10-09 16:52:50Z; vLLM 0.11.2.

1. vLLM takes more of GPU 0 than it can spare.
   seen  180 MiB were left on GPU 0 from 2025-10-09 08:53:20Z, for 7 h 59 min
   seen  the leak detector's state is stable
   seen  80 requests ran then
   seen  vLLM may take 0.92 of the GPU
   first --gpu-memory-utilization 0.90 (now 0.92): leaves 844 MiB more outside of what vLLM takes at its start
         costs the KV cache of each GPU shrinks by about as much; a restart
   mind  The share in use means little, since vLLM takes most of the GPU at its start; what is left counts.
"""


def test_advice_is_reported_with_figures_and_the_value_and_ends_with_status_1(overshoot: str) -> None:
    process = run_process(
        "advise", "-", "--gpu-memory-utilization", "0.92", "--vllm-version", "0.11.2", stdin=overshoot
    )

    assert (process.returncode, process.stdout, process.stderr) == (1, TOLD, "")


def test_json_has_the_same_for_scripts(overshoot: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(overshoot)

    process = advise("--trace", str(file), "--json")
    data = read_data(process.stdout)

    assert (process.returncode, process.stderr) == (1, "")
    assert list(data) == [
        "origin",
        "samples",
        "span_seconds",
        "vllm_version",
        "vllm_version_at_least",
        "leaks",
        "advice",
        "missing",
        "notes",
    ]
    assert (process.returncode, data["origin"], data["samples"]) == (1, "trace", 960)
    assert (data["vllm_version"], data["vllm_version_at_least"]) == (None, "0.11.1")
    assert data["leaks"][0] == {"series": "GPU 0", "state": "stable", "verdict": "no_leak"}
    (advice,) = data["advice"]
    assert advice["cause"] == "configuration_overshoot"
    assert advice["evidence"]["least_room_bytes"] == 180 * 2**20
    assert advice["changes"][0]["flag"] == "--gpu-memory-utilization"
    assert (advice["changes"][0]["value"], advice["changes"][0]["difference"]) == (None, -0.02)


def test_nothing_to_change_ends_with_status_0(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(traces.text(traces.healthy(2)))

    process = advise(str(file))

    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines()[1] == "Nothing to change."


def test_what_is_unknown_ends_with_status_2_and_says_what_is_missing() -> None:
    process = advise("-", trace=traces.text(traces.healthy(0.2)))

    assert (process.returncode, process.stderr) == (2, "")
    assert "Cannot tell whether anything should be changed. Missing:\n" in process.stdout
    assert "a longer history: it covers 11 min 30 s, and an hour is needed" in process.stdout

    shown = json.loads(advise("-", "--json", trace=traces.text(traces.healthy(0.2))).stdout)
    assert shown["headline"] == "Cannot tell whether anything should be changed."


def test_a_sidecars_page_is_read() -> None:
    with EngineServer(page(pages.text(pages.healthy(engine_mib=80_800)))) as server:
        process = advise("--headroom-url", server.url.removesuffix("/metrics"))

    assert (process.returncode, process.stderr) == (1, "")
    assert "first --gpu-memory-utilization 0.90 (now 0.92)" in process.stdout


def test_without_a_source_it_reads_the_sidecar_beside_it() -> None:
    with EngineServer(page(pages.text(pages.healthy(engine_mib=80_800)))) as server:
        process = run_command("advise", HEADROOM_LISTEN_PORT=str(httpx.URL(server.url).port))

    assert (process.returncode, process.stderr) == (1, "")
    assert "first --gpu-memory-utilization 0.90 (now 0.92)" in process.stdout


def test_in_a_pod_it_names_the_engines_log_as_kubectl_takes_it() -> None:
    crashes = traces.text(traces.crashes())
    process = run_command("advise", "-", "--json", stdin=crashes, POD_NAME="vllm-0", POD_NAMESPACE="llm")

    assert "(kubectl logs --previous -n llm vllm-0 -c vllm)" in process.stdout


class Vllm(BaseHTTPRequestHandler):
    """Answers as vLLM does: its metrics, and its version beside them."""

    def do_GET(self) -> None:
        body = {"/metrics": VLLM, "/version": '{"version": "0.11.2"}'}[self.path].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_the_engine_itself_tells_its_share_and_its_version(overshoot: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Vllm) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = advise("-", "--engine-url", f"http://127.0.0.1:{server.server_port}", trace=overshoot)
        server.shutdown()

    assert (process.returncode, process.stdout, process.stderr) == (1, TOLD, "")


def test_an_engine_that_sizes_its_cache_in_bytes_is_advised_bytes(overshoot: str) -> None:
    sized = VLLM.replace('kv_cache_memory_bytes="None"', f'kv_cache_memory_bytes="{2**36}"')
    with EngineServer(page(sized)) as server:
        process = advise("-", "--engine-url", server.url, trace=overshoot)

    assert f"first --kv-cache-memory-bytes {2**36 - 844 * 2**20} (now {2**36})" in process.stdout
    assert "--gpu-memory-utilization" not in process.stdout


BOTH = "takes a FILE or --headroom-url, and not both"
RATIO = "accepts a ratio above 0, at most 1"
URL = "accepts an http or https URL such as http://gpu-7:9839"
VERSIONS = "accepts a version of vLLM from 0.4 on, such as 0.11.2"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            (),
            (
                "no connection to http://127.0.0.1:1/metrics (Connection refused): name a FILE or --headroom-url, or"
                " run this beside vllm-headroom"
            ),
        ),
        (("-", "--headroom-url", "http://h"), BOTH),
        (("-", "--trace", "x"), BOTH),
        (("-", "--vllm-version", "0.1.dev1"), f"--vllm-version: got '0.1.dev1', {VERSIONS}"),
        (("-", "--gpu-memory-utilization", "92"), f"--gpu-memory-utilization: got '92' (did you mean 92%?), {RATIO}"),
        (("-", "--max-num-seqs", "0"), "--max-num-seqs: got '0', accepts a whole number from 1 on"),
        (
            ("--headroom-url", "gpu-7:9839"),
            f"--headroom-url: got 'gpu-7:9839' (did you mean http://gpu-7:9839?), {URL}",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: tuple[str, ...], why: str) -> None:
    process = run_command("advise", *words, HEADROOM_LISTEN_PORT="1")

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"vllm-headroom advise: {why}\n"


def test_a_trace_that_is_not_there_is_one_line() -> None:
    process = advise("missing.jsonl")

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "vllm-headroom advise: missing.jsonl: cannot be read: No such file or directory\n"


def test_a_trace_that_is_none_names_the_line() -> None:
    process = advise("-", trace='{"headroom_trace": 1}\n{"t": 1}\n{"t": "x"}\n')

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "vllm-headroom advise: line 3: t: got 'x', accepts seconds since the epoch\n"


def test_a_sidecar_that_does_not_answer_is_one_line() -> None:
    with EngineServer(page("")) as server:
        url = server.url
    process = advise("--headroom-url", url)

    assert (process.returncode, process.stdout) == (2, "")
    problem = f"no connection to {url} (Connection refused): check that vllm-headroom runs there, port 9839"
    assert process.stderr == f"vllm-headroom advise: {problem} unless it is set otherwise\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            page("<html>"),
            "--engine-url: The engine's page is not metrics, it starts with '<html>': check that vLLM serves there\n",
        ),
        (page("up 1\n"), "--engine-url: the page at {url} is not vLLM's\n"),
        (
            page("", status="503 Service Unavailable"),
            "--engine-url: {url} answers 503 Service Unavailable: check that vLLM serves there\n",
        ),
    ],
)
def test_an_engine_that_is_none_is_one_line(answer: Answer, why: str) -> None:
    with EngineServer(answer) as server:
        process = advise("-", "--engine-url", server.url)
        expected = f"vllm-headroom advise: {why.format(url=server.url)}"

    assert (process.returncode, process.stdout, process.stderr) == (2, "", expected)


def test_a_trace_without_samples_is_one_line() -> None:
    process = advise("-", trace='{"headroom_trace": 1}\n')

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "vllm-headroom advise: the trace has no samples\n"
