"""What the probe records on request, and that it always ends."""

from __future__ import annotations

import json
import os
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.inside import torch
from tests.fakes.inside.torch import cuda
from tests.fakes.inside.vllm.engine import config
from tests.fakes.inside.vllm.worker import WorkerBase
from vllm_headroom_probe import record as recording
from vllm_headroom_probe.record import Recording

Document = dict[str, Any]


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    cuda.histories.clear()
    yield
    assert not tracemalloc.is_tracing()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cuda, "_initialized", True)
    return WorkerBase(config(0), 0)


def ask(folder: Path, seconds: float, **changes: Any) -> None:
    request = {"headroom_record": 1, "id": "r1", "until": time.time() + seconds, "host": True, "gpu": True} | changes
    (folder / "record.json").write_text(json.dumps(request))


def look(record: Recording, worker: object = None) -> None:
    record.tick("7-1", "worker", worker)


def end(record: Recording, worker: object = None) -> Document:
    """Let the time of the recording be over, and return the answer."""
    record._request["until"] = 1.0
    look(record, worker)
    answer: Document = json.loads(Path(record._folder, "7-1.record.json").read_text())
    return answer


def test_what_is_kept_is_found_and_what_is_freed_is_not(folder: Path) -> None:
    record = Recording(str(folder))
    ask(folder, 60)
    look(record)
    retained = [bytearray(100_000) for _ in range(20)]
    for _ in range(20):
        bytearray(1_000_000)
    answer = end(record)

    assert len(retained) == 20
    largest_holding = answer["host"][0]
    assert largest_holding["stack"][0].startswith(f"{__file__}:")
    assert 2_000_000 <= largest_holding["bytes"] < 2_100_000
    assert answer["note"] is None
    assert (answer["headroom_record"], answer["id"], answer["pid"], answer["role"]) == (1, "r1", os.getpid(), "worker")

    look(record)
    assert not tracemalloc.is_tracing(), "a request that was answered is not taken up again"


def test_of_gpu_memory_the_stacks_of_what_is_allocated_still(
    folder: Path, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [
        {"filename": "/site/leak.py", "line": 12, "name": "keep"},
        {"filename": "/site/x.py", "line": 3, "name": "f"},
    ]
    blocks = [
        {"size": 512, "state": "active_allocated", "frames": frames},
        {"size": 512, "state": "active_allocated", "frames": frames},
        {"size": 4096, "state": "active_allocated", "frames": frames[1:]},
        {"size": 9999, "state": "inactive", "frames": frames},
        {"size": 9999, "state": "active_allocated", "frames": []},
        {"size": 9999, "state": "active_allocated"},
    ]
    monkeypatch.setattr(
        cuda.memory, "_snapshot", lambda: {"segments": [{"blocks": blocks[:3]}, {"blocks": blocks[3:]}]}
    )
    record = Recording(str(folder))
    ask(folder, 60, host=False)
    look(record, worker)
    answer = end(record, worker)

    assert answer["gpu"] == [
        {"bytes": 4096, "count": 1, "stack": ["/site/x.py:3"]},
        {"bytes": 1024, "count": 2, "stack": ["/site/leak.py:12", "/site/x.py:3"]},
    ]
    assert cuda.histories == [("state", {"context": "state", "stacks": "python"}), (None, {})]


def test_where_vllm_may_sleep_torchs_history_is_never_touched(folder: Path, worker: Any) -> None:
    worker.vllm_config.model_config.enable_sleep_mode = True
    record = Recording(str(folder))
    ask(folder, 60)
    look(record, worker)
    answer = end(record, worker)

    assert cuda.histories == []
    assert answer["note"] == "GPU memory is not recorded where vLLM may sleep: it could stop the engine"


def test_a_recording_that_is_another_programs_is_left_alone(folder: Path) -> None:
    record = Recording(str(folder))
    tracemalloc.start()
    try:
        ask(folder, 60)
        look(record)
        answer = end(record)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
    assert (answer["host"], answer["note"]) == ([], "tracemalloc was on before and was left alone")


def test_it_ends_when_the_request_is_gone_or_nobody_waits(folder: Path) -> None:
    record = Recording(str(folder))
    ask(folder, 60)
    look(record)
    assert tracemalloc.is_tracing()
    long_ago = time.time() - 2 * recording.UNATTENDED_SECONDS
    os.utime(folder / "record.json", (long_ago, long_ago))
    look(record)
    assert not tracemalloc.is_tracing()

    ask(folder, 60, id="r2")
    look(record)
    assert tracemalloc.is_tracing()
    (folder / "record.json").unlink()
    look(record)
    assert not tracemalloc.is_tracing()
    assert not list(folder.glob("*.record.json"))


def test_it_ends_before_it_costs_too_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_TRACER_BYTES", 1 << 20)
    record = Recording(str(folder))
    ask(folder, 3600)
    look(record)
    retained = [bytearray(1) for _ in range(30_000)]
    look(record)

    assert len(retained) == 30_000
    answer = json.loads((folder / "7-1.record.json").read_text())
    assert answer["note"] == "ended early: the recording itself took 1 MiB"
    assert answer["host"]


def test_no_recording_is_longer_than_an_hour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recording(str(folder))
    ask(folder, 1e9)
    look(record)
    monkeypatch.setattr(recording, "MAX_RECORDING_SECONDS", 0)
    look(record)

    assert (folder / "7-1.record.json").exists()


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"headroom_record": 1}',
        b'{"headroom_record": 2, "id": "a", "until": 9e9}',
        b'{"headroom_record": 1, "id": 5, "until": 9e9}',
        b'{"headroom_record": 1, "id": "a", "until": "x"}',
    ],
)
def test_a_request_that_is_none_begins_nothing(folder: Path, request_: bytes) -> None:
    (folder / "record.json").write_bytes(request_)
    look(Recording(str(folder)))


def test_it_ends_with_its_probe(folder: Path) -> None:
    record = Recording(str(folder))
    ask(folder, 60)
    look(record)
    assert tracemalloc.is_tracing()
    record.discard()
    record.discard()
