"""Files and pipes that never answer cost what they are for, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import LOOPBACK, EngineServer, page
from tests.fakes.ports import free_port
from tests.process import daemon, eventually

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Give both ends of a pipe that holds all it can."""
    taking, giving = os.pipe()
    fcntl.fcntl(giving, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(giving, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(giving, b"x" * 4096)
    os.set_blocking(giving, True)
    try:
        yield taking, giving
    finally:
        os.close(taking)
        os.close(giving)


def is_answering(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def test_stderr_that_nobody_reads_holds_up_neither_the_samples_nor_the_end() -> None:
    port = free_port()
    url = f"http://{LOOPBACK}:{port}"
    with EngineServer(page(RECORDED)) as engine, full_pipe() as (_, stderr):
        settings = {"HEADROOM_ENGINE_URL": engine.url, "HEADROOM_LISTEN_PORT": str(port)}
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_headroom", "--sample-interval-seconds", "0.5"],
            env={**os.environ, **settings},
            stderr=stderr,
        )
        try:
            eventually(lambda: is_answering(f"{url}/readyz"), "the first sample is published")
            old_count = len(engine.requests)
            eventually(lambda: len(engine.requests) > old_count + 2, "the engine is read on and on")
            process.send_signal(signal.SIGTERM)

            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait(30)


def test_what_was_dropped_is_counted_once_there_is_room_again() -> None:
    script = (
        "import sys\n"
        "from vllm_headroom.daemon import logs\n"
        "from vllm_headroom.log import Log\n"
        "logs.configure('logfmt', 'info')\n"
        "for number in range(logs.MOST_WAITING_LINES + 100):\n"
        "    Log('vllm_headroom').info('line', number=number)\n"
        "print('all said', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with full_pipe() as (taking, stderr):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
        )
        with process, os.fdopen(os.dup(taking), errors="replace") as lines:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"all said\n"
            text = ""
            while "dropped=" not in text:
                text = lines.readline()
            process.stdin.close()
            process.kill()

    dropped = int(text.rpartition("dropped=")[2].rstrip('"\n'))
    assert 98 <= dropped <= 100  # one or two were in the writer's hands


def test_a_token_file_that_is_a_pipe_costs_the_engines_half_only(tmp_path: Path) -> None:
    token = tmp_path / "token"
    os.mkfifo(token)
    with (
        EngineServer(page(RECORDED)) as engine,
        daemon(
            ENGINE_URL=engine.url,
            ENGINE_BEARER_TOKEN_FILE=str(token),
            SAMPLE_INTERVAL_SECONDS="3",
            GPU_SAMPLE_INTERVAL_SECONDS="1",
        ) as running,
    ):
        failed_page = running.sees(
            lambda page: page.value("source_up", source="engine") == 0, "the engine's half has failed"
        )

        assert failed_page.value("source_failures_total", source="engine", reason="credentials") >= 1
        assert f"the token file {token} cannot be read" in running.log()

        token.unlink()  # no writer ever lets the reader go
        token.write_text("secret")
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the token is read again")
        assert running.stop()[0] == 0
