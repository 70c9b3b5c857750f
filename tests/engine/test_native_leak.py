"""A library in C leaks in a real vLLM's core: the kind of its mappings and its function are named."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest
from msgspec.structs import replace

from tests.command import OWN, read_data
from tests.engine.probed import Probed, probed
from tests.fakes.leaks import build_leaks
from tests.process import eventually
from tests.unit.derive.life.watch import process, serving
from vllm_headroom import catalog
from vllm_headroom.daemon.mappings import REREAD_SECONDS, Mappings
from vllm_headroom.derive.series import make_states
from vllm_headroom.model import Values
from vllm_headroom.scrape.proc.smaps import read_mappings
from vllm_headroom.vocabulary import LeakState, Role

pytestmark = pytest.mark.engine

PLUGIN: Final = Path(__file__).parent / "native_leak"
MIB: Final = 2**20
REQUESTS: Final = 16
LEAKED_BYTES: Final = REQUESTS * 16 * MIB
WAYS: Final = {"malloc": "heap", "mmap": "anonymous mmap", "memfd": "memfd", "shm": "shm"}
GROWING: Final = Values(make_states(catalog.HOST_LEAK_STATE, (str(Role.ENGINE_CORE),), LeakState.GROWING))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    place = tmp_path_factory.mktemp("native")
    library = build_leaks(place, "-g", "-shared", "-fPIC")
    (place / "way").write_text("none")
    shared = Path("/dev/shm", f"headroom-test-{uuid4().hex}")  # noqa: S108 - the real one
    way = str(place / "way")
    try:
        with probed(
            place, path=(PLUGIN,), NATIVE_LEAK=str(library), NATIVE_LEAK_WAY=way, NATIVE_LEAK_SHM=str(shared)
        ) as running:
            eventually(lambda: len(running.reports()) >= 3, "three processes report")
            yield running
    finally:
        shared.unlink(missing_ok=True)


def leak(engine: Probed, way: str) -> None:
    (engine.log.parent / "way").write_text(way)
    for _ in range(REQUESTS):
        engine.complete("w300 w301", 1)
    (engine.log.parent / "way").write_text("none")


async def grow(engine: Probed, way: str) -> list[dict[str, Any]]:
    """Return what the daemon's incident has on the core in an alarm, of which the detector alone is not real."""
    subject, pid = Mappings(lambda pid: read_mappings(Path("/proc"), pid)), engine.reports()["EngineCore"]["pid"]
    served_snapshot = serving().seen
    assert served_snapshot is not None
    for step in range(4):
        now = served_snapshot.monotonic_seconds + step * REREAD_SECONDS
        subject.step(
            replace(served_snapshot, monotonic_seconds=now, processes=(process(pid, Role.ENGINE_CORE),)), GROWING
        )
        if subject._running is not None:
            await asyncio.wait([subject._running[1]])
        if step == 1:
            await asyncio.to_thread(leak, engine, way)
    return subject.describe()


@pytest.mark.parametrize("way", WAYS)
def test_an_alarm_names_the_kind(engine: Probed, way: str) -> None:
    leak(engine, "none")
    (grown,) = asyncio.run(grow(engine, way))
    sys.stdout.write(f"{way}: {grown['kinds']}\n")

    kind, size = next(iter(grown["kinds"].items()))
    assert kind == WAYS[way]
    assert LEAKED_BYTES <= size <= 1.1 * LEAKED_BYTES
    assert sum(list(grown["kinds"].values())[1:]) <= 0.1 * LEAKED_BYTES


@pytest.mark.parametrize("way", WAYS)
def test_a_recording_names_the_kind_and_the_function(engine: Probed, way: str) -> None:
    recording_process = subprocess.Popen(
        [sys.executable, "-m", "vllm_headroom", "probe", "record", "--for", "30s", "--only", "host", "--json"],
        env=OWN | {"HEADROOM_PROBE_DIR": str(engine.folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    sequence_before = engine.reports()["EngineCore"]["sequence"]
    engine.after("EngineCore", sequence_before + 1)  # which has seen the request by then
    leak(engine, way)
    out, _ = recording_process.communicate(timeout=600)

    data = read_data(out)
    core = next(engine_process for engine_process in data["processes"] if engine_process["role"] == "engine_core")
    kind, size = next(iter(core["mappings"].items()))
    sys.stdout.write(f"{way}: {size} in {kind}; {json.dumps((core['native'] or [])[:2])} {data['no_native']}\n")
    assert kind == WAYS[way]
    assert size >= LEAKED_BYTES
    if shutil.which("perf") is None:
        assert data["no_native"] == "perf is not installed here"
    else:
        assert any("leak (libleaks.so)" in frame for frame in core["native"][0]["stack"][:6])
