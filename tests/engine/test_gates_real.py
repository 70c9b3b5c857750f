"""The gates' probes and hook on a real vLLM: what runs when it is told to end. Takes four minutes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.e2e.cluster.kubelet import Scripts, spec
from tests.engine.serving import Engine, serving, started, words
from tests.engine.test_life_real import core
from tests.fakes.ports import free_port
from tests.process import NO_TLS, eventually

pytestmark = pytest.mark.engine

NO_SIDECAR: Final = "http://127.0.0.1:9"
TOKENS: Final = 1500


class Request:
    """A completion that takes long, in a thread of its own; `became` says what of it."""

    def __init__(self, engine: Engine) -> None:
        self.became = "running"
        self._engine = engine
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        eventually(lambda: runs(engine), "the request runs", 300, 0.5)

    def over(self) -> str:
        self._thread.join(300)
        return self.became

    def _run(self) -> None:
        try:
            usage = self._engine.complete(words(0, 16), TOKENS)
        except (httpx.HTTPError, KeyError) as error:
            self.became = f"lost: {type(error).__name__}"
        else:
            self.became = f"answered with {usage['completion_tokens']} tokens"


def runs(engine: Engine) -> bool:
    page = httpx.get(f"{engine.url}/metrics", timeout=30, verify=NO_TLS).text
    return any(
        line.startswith("vllm:num_requests_running{") and not line.endswith(" 0.0") for line in page.splitlines()
    )


def test_its_hook_lets_what_runs_be_answered_before_the_end(tmp_path: Path) -> None:
    with serving(free_port(), tmp_path / "serve.log") as engine:
        started(engine)
        (vllm,) = spec()["containers"]
        scripts = Scripts(engine.url, NO_SIDECAR, speed=15.0)
        for probe in ("readinessProbe", "livenessProbe"):
            assert scripts.passes(vllm[probe]["exec"]["command"])
        request = Request(engine)
        for _ in range(15):  # at this speed the hook waits 9 s, and a machine with other work takes longer
            scripts.passes(vllm["lifecycle"]["preStop"]["exec"]["command"])
            if not runs(engine):
                break
        os.kill(engine.process.pid, signal.SIGTERM)

        assert request.over() == f"answered with {TOKENS} tokens"
        engine.process.wait(300)
        assert not scripts.passes(vllm["readinessProbe"]["exec"]["command"])


def test_without_it_vllm_kills_its_core_and_finishes_nothing(tmp_path: Path) -> None:
    """An answer is cut off where it stands, or never comes: its server may wait for connections that nobody answers."""
    with serving(free_port(), tmp_path / "serve.log") as engine:
        started(engine)
        command = Path("/proc", str(core(engine)), "cmdline")
        request = Request(engine)
        os.kill(engine.process.pid, signal.SIGTERM)
        eventually(lambda: not command.exists() or not command.read_bytes(), "its core is gone", 300, 0.5)

    assert request.over() != f"answered with {TOKENS} tokens"
