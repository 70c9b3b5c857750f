"""A GPU, a port, what looks like a vLLM on both, and the files of a door."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.door import write
from tests.e2e.life import Start
from tests.e2e.vllm import Vllm
from tests.fakes.certificates import write_self_signed
from tests.fakes.nvml.library import FakeGpu, FakeNvml
from tests.fakes.ports import free_port


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have a test that is marked `alone` run beside no other of these: all see the processes of one machine."""
    with (Path(tempfile.gettempdir()) / f"vllm-headroom-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, [FakeGpu(uuid="GPU-a")])


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def another_port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path, nvml: FakeNvml, port: int) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(name: str = "first", *, port: int = port, **vllm_options: Any) -> Vllm:
            vllm = Vllm(tmp_path / name, nvml, port, **vllm_options)
            stack.callback(vllm.end)
            return vllm

        yield begin


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("server", "client"):
        write_self_signed(tmp_path, name)
    write(tmp_path)
    return tmp_path
