"""The configuration of the model that a server in /proc serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.proc_tree import ProcTree
from tests.samples import failure
from vllm_headroom.model import EngineOptions, EngineProcess, ProcessReadings, TokenBytes
from vllm_headroom.scrape.proc.served_model import ServedModel
from vllm_headroom.vocabulary import Role, Source

pytestmark = pytest.mark.anyio

TOKEN: TokenBytes = lambda _dtype, _gpus: 7  # noqa: E731 - represents a model's
SERVER = EngineProcess(pid=20, role=Role.API_SERVER, rss_bytes=1, started_at_seconds=5.0)


def readings(**option_fields: Any) -> ProcessReadings:
    options = EngineOptions(**option_fields)
    return ProcessReadings(engine=(SERVER,), visible_pids=frozenset(), sees_host_pids=True, options=options)


class Container:
    """A server in /proc, with a separate file system."""

    def __init__(self, path: Path) -> None:
        self.proc, self.root, self.read = path / "proc", path / "root", list[Path]()
        self.now_seconds = 0.0
        self.proc.mkdir()
        ProcTree(self.proc).add(20, 1, "vllm", "serve", "/models/m")
        (self.root / "work").mkdir(parents=True)
        (self.proc / "20" / "root").symlink_to(self.root)
        (self.proc / "20" / "cwd").symlink_to(self.root / "work")
        (self.proc / "20" / "environ").write_bytes(b"PATH=/bin\0HF_HOME=/cache\0X=\xff\0")
        self.model = ServedModel(self._parse, self.proc, monotonic=lambda: self.now_seconds)

    def add(self, path: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")

    def _parse(self, path: Path) -> TokenBytes | None:
        self.read.append(path.resolve())
        return TOKEN

    async def find(self, process_readings: ProcessReadings) -> TokenBytes | None:
        """Return what is found once a reading has ended."""
        return await self.model.wait(process_readings, 30)


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


@pytest.mark.parametrize(
    ("model", "place"),
    [
        ("/models/m", "models/m/config.json"),
        ("local", "work/local/config.json"),
        ("org/name", "cache/hub/models--org--name/snapshots/abc/config.json"),
    ],
)
async def test_it_is_found_where_the_server_loads_it(container: Container, model: str, place: str) -> None:
    container.add(place)
    (container.root / "cache/hub/models--org--name/refs").mkdir(parents=True)
    (container.root / "cache/hub/models--org--name/refs/main").write_text("abc\n")

    assert await container.find(readings(model=model)) is TOKEN
    assert container.read == [container.root / place]
    assert await container.find(readings(model=model)) is TOKEN
    assert container.model.find(failure(Source.PROCESS)) is TOKEN, "a failed reading of /proc changes no model"
    assert len(container.read) == 1


async def test_a_model_that_appears_later_is_found_then(container: Container) -> None:
    assert await container.find(readings(model="/models/m")) is None

    container.add("models/m/config.json")
    assert await container.find(readings(model="/models/m")) is None, "a search at each tick costs too much"
    container.now_seconds = 15.0
    await container.find(readings(model="/models/m"))

    assert await container.find(readings(model="/models/m")) is TOKEN
    assert await container.find(readings(model="/models/other")) is None


@pytest.mark.parametrize(
    "option_fields", [{}, {"model": "/models/m", "option_names": ("hf_overrides",)}, {"model": "../../x"}]
)
async def test_a_cache_that_may_differ_from_the_model_is_unknown(
    container: Container, option_fields: dict[str, Any]
) -> None:
    container.add("models/m/config.json")

    assert await container.find(readings(**option_fields)) is None
    assert not container.read


async def test_a_folder_that_hangs_holds_nobody_up(container: Container) -> None:
    file = container.root / "models/m/refs/main"
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    (container.root / "cache/hub").mkdir(parents=True)
    (container.root / "cache/hub/models--org--name").symlink_to(container.root / "models/m")

    assert container.model.find(readings(model="org/name")) is None
    assert container.model.find(readings(model="org/name")) is None

    with file.open("w"):  # ends the thread's call
        pass
