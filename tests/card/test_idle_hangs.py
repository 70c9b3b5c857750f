"""A real vLLM whose core is stopped while idle: serving with clients that ask nothing, stalled once one waits."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.card.bench import Bench, wait_until_served, watch
from tests.card.card import GIB, Cards
from tests.e2e.life import last_look, state
from tests.e2e.test_hangs import TWO_MINUTES_OF_TICKS, replay
from tests.process import NO_TLS, Page, eventually
from vllm_headroom.vocabulary import EngineState

pytestmark = pytest.mark.card

PATIENCE_SECONDS: Final = 600.0


def wait_for(bench: Bench, wanted: str) -> Page:
    return bench.daemon.sees(
        lambda page: state(page) == wanted, f"the engine is {wanted}", PATIENCE_SECONDS, every_seconds=0.5
    )


@pytest.mark.parametrize("with_probe", [False, True])
def test_an_idle_core_that_is_stopped(tmp_path: Path, *, with_probe: bool) -> None:
    cards, trace = Cards(folder=tmp_path / "cards", total_bytes=24 * GIB), tmp_path / "trace.jsonl"
    options = ("--enforce-eager", "--max-model-len", "2048", "--gpu-memory-utilization", "0.7")
    probe = tmp_path / ("probe" if with_probe else "nothing")
    with watch(tmp_path, *options, cards=cards, TRACE_FILE=str(trace), PROBE_DIR=str(probe)) as bench:
        wait_until_served(bench).complete()
        address = ("127.0.0.1", httpx.URL(bench.engine.url).port or 0)
        with httpx.Client(verify=NO_TLS) as scraper, socket.create_connection(address):
            began = last_look(wait_for(bench, "serving"))

            def scrape() -> bool:
                scraper.get(f"{bench.engine.url}/metrics", timeout=60)
                return last_look(bench.daemon.page()) > began + 150

            eventually(scrape, "minutes of scrapes on one connection", PATIENCE_SECONDS, 1)
        assert [
            engine_state for at, engine_state in replay(trace) if at > began and engine_state is not EngineState.SERVING
        ] == []

        core = {int(pid) for pid in cards.read_holders()}.pop()
        os.kill(core, signal.SIGSTOP)
        stopped = last_look(bench.daemon.page())
        answers = list[httpx.Response]()
        client = threading.Thread(target=lambda: answers.append(bench.complete()))
        client.start()
        stalled = wait_for(bench, "stalled")
        later_states = [engine_state for at, engine_state in replay(trace) if at > stopped]
        os.kill(core, signal.SIGCONT)
        client.join(PATIENCE_SECONDS)

        assert stalled.value("engine_requests_running") == 0
        assert EngineState.STALLED in later_states[:TWO_MINUTES_OF_TICKS]
        assert [answer.status_code for answer in answers] == [200]
        wait_for(bench, "serving")
