"""One real vLLM for each module, since some of them kill it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.engine.serving import FOLDER, HERE, Engine, answers
from tests.process import eventually


@pytest.fixture(scope="module")
def starting() -> Iterator[Engine]:
    """A vLLM that was just started, and loads its model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (FOLDER / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [HERE / "serve.sh", FOLDER, str(port)], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Engine(url=f"http://127.0.0.1:{port}", process=process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture(scope="module")
def engine(starting: Engine) -> Engine:
    eventually(lambda: answers(f"{starting.url}/metrics"), "vLLM answers", deadline_seconds=300)
    return starting
