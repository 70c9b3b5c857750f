"""The real daemon beside an idle vLLM whose core is stopped, and then gets a request."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Final

from tests.e2e.life import Start, becomes, last_look, settings, state
from tests.fakes.engine_server import LOOPBACK
from tests.fakes.nvml.library import FakeNvml
from tests.process import daemon
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.vocabulary import EngineState
from vllm_headroom_tools.trace import read_trace

TWO_MINUTES_OF_TICKS: Final = 24
QUESTION: Final = b"POST /v1/completions HTTP/1.1\r\nHost: vllm\r\nContent-Length: 2\r\n\r\n{}"


def connect(port: int) -> socket.socket:
    return socket.create_connection((LOOPBACK, port), timeout=60)


def replay(trace: Path) -> list[tuple[float, EngineState]]:
    """Return the state after each tick, as a trace shows it."""
    run, states = EngineMemory(), list[tuple[float, EngineState]]()
    for snapshot in read_trace(str(trace)):
        run, _ = update_engine(run, snapshot)
        states.append((snapshot.time_seconds, run.state))
    return states


def test_an_idle_core_that_is_stopped_is_stalled_once_a_request_waits(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path
) -> None:
    vllm, trace = start(idle=True), tmp_path / "trace.jsonl"
    with (
        daemon(**settings(port, nvml, TRACE_FILE=str(trace))) as running,
        connect(port) as kept_alive,
        connect(port),  # by a client that never asks
        connect(port) as client,
    ):
        kept_alive.sendall(b"GET /health HTTP/1.1\r\nHost: vllm\r\n\r\n")
        assert kept_alive.recv(4096).startswith(b"HTTP/1.1 200")
        began = last_look(becomes(running, "serving"))
        running.sees(lambda page: last_look(page) > began + 180, "minutes with connections and without a request")
        assert {engine_state for _, engine_state in replay(trace)} <= {EngineState.STARTING, EngineState.SERVING}

        os.kill(vllm.core, signal.SIGSTOP)
        asked_seconds = last_look(becomes(running, "unknown"))
        client.sendall(QUESTION)
        stalled = becomes(running, "stalled")
        assert stalled.value("engine_requests_running") == 0
        assert "a request gets no answer" in running.get("/").text
        later_states = [engine_state for at, engine_state in replay(trace) if at > asked_seconds]
        assert EngineState.STALLED in later_states[:TWO_MINUTES_OF_TICKS]

        os.kill(vllm.core, signal.SIGCONT)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        again = becomes(running, "serving")
        assert again.value("engine_restarts_total") == 0
        assert state(running.page()) == "serving"
