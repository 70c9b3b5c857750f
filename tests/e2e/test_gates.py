"""The real daemon's gates, asked as a kubelet asks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

import httpx
import pytest
import yaml

from tests.process import daemon, eventually

COMPONENT: Final = Path(__file__).parents[2] / "deploy/kubernetes/components/gates/patch.yaml"
PROBES: Final = ("readiness", "liveness")
NOBODY: Final = "http://127.0.0.1:9"


def script(probe: str, engine: str, sidecar: str) -> str:
    """Return what the component lets a kubelet run, with the addresses that are here."""
    (vllm,) = yaml.safe_load(COMPONENT.read_text())["spec"]["template"]["spec"]["containers"]
    *_, text = vllm[f"{probe}Probe"]["exec"]["command"]
    return str(text).replace("http://127.0.0.1:8000", engine).replace("http://127.0.0.1:9839", sidecar)


def asked(probe: str, engine: str, sidecar: str) -> int:
    return subprocess.run([sys.executable, "-c", script(probe, engine, sidecar)], check=False, timeout=60).returncode


def test_gates_that_are_not_configured_are_open() -> None:
    with daemon() as running:
        for gate in ("ready", "live"):
            answer = httpx.get(f"{running.url}/gate/{gate}", timeout=30)

            assert (answer.status_code, answer.text) == (200, "open\n")
        assert "headroom_gate_open{" not in httpx.get(f"{running.url}/metrics", timeout=30).text


def test_a_leak_closes_the_ready_gate_which_opens_again_by_itself() -> None:
    settings = {"GATE_READY_SECONDS": "86400", "GATE_READY_MOST_SECONDS": "6000", "GATE_NAME": "vllm-1"}
    with daemon("demo", "--scenario", "leak", "--speed", "600", **settings) as running:

        def gate() -> httpx.Response:
            return httpx.get(f"{running.url}/gate/ready", timeout=30)

        assert gate().status_code == 200
        closed = eventually(lambda: (answer := gate()).status_code == 503 and answer, "the gate closes")
        assert isinstance(closed, httpx.Response)
        assert re.fullmatch(r"GPU 0 may be out of memory in .+\n", closed.text)
        running.sees(lambda page: page.value("gate_open", gate="ready") == 0, "the page says so")
        eventually(lambda: gate().status_code == 200, "the gate is never closed for long")


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Answer every path with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("probe", PROBES)
def test_a_sidecar_that_does_not_answer_is_an_open_gate(probe: str) -> None:
    with answering(200) as engine:
        assert asked(probe, engine, NOBODY) == 0


@pytest.mark.parametrize("probe", PROBES)
def test_a_closed_gate_fails_the_probe_and_an_open_one_does_not(probe: str) -> None:
    with answering(200) as engine:
        for status, expected in ((503, 1), (200, 0), (404, 0)):
            with answering(status) as sidecar:
                assert asked(probe, engine, sidecar) == expected


def test_a_dead_engine_fails_both_and_one_that_loads_only_is_not_ready() -> None:
    with answering(200) as sidecar:
        with answering(503) as engine:
            assert [asked(probe, engine, sidecar) for probe in PROBES] == [1, 1]
        assert [asked(probe, NOBODY, sidecar) for probe in PROBES] == [1, 0]
