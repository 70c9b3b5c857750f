"""torch's memory history and its snapshots: what is written, what it is bounded by, and that vLLM never notices."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tests.fakes.inside import torch
from tests.fakes.inside.torch import cuda
from tests.fakes.inside.vllm.engine import config
from tests.fakes.inside.vllm.worker import WorkerBase
from vllm_headroom_probe import hooks, probe, snapshot
from vllm_headroom_probe.probe import Probe
from vllm_headroom_probe.snapshot import Snapshots, list_largest

Document = dict[str, Any]

HISTORY: Final = ("all", {"context": "alloc", "stacks": "python", "max_entries": 10_000})


def frame(path: str, line: int) -> Document:
    return {"filename": path, "line": line, "name": "f"}


def block(address: int, size: int, *frames: Document, state: str = "active_allocated") -> Document:
    return {"address": address, "size": size, "state": state, "frames": list(frames)}


LINEAR: Final = frame("/v/lib/python3.12/site-packages/torch/nn/modules/linear.py", 134)
MODEL: Final = frame("/v/lib/python3.12/site-packages/vllm/model.py", 12)
CACHE: Final = frame("/v/lib/python3.12/site-packages/vllm/cache.py", 7)
CONTENT: Final[Document] = {
    "segments": [
        {
            "blocks": [
                block(0, 512, LINEAR, MODEL),
                block(512, 512, MODEL),
                block(1024, 4096, CACHE),
                block(5120, 9999, CACHE, state="inactive"),
            ]
        },
        {"blocks": [block(20_000, 64), block(20_064, 8, LINEAR)]},
    ],
    "device_traces": [
        [
            {"action": "alloc", "addr": 1024, "size": 4096, "time_us": 5_000_000},
            {"action": "free_completed", "addr": 1024, "size": 4096, "time_us": 6_000_000},
            {"action": "alloc", "addr": 1024, "size": 4096, "time_us": 7_000_000},
            {"action": "alloc", "addr": 512, "size": 512, "time_us": 8_000_000},
        ]
    ],
}
LARGEST: Final = [
    {"file": CACHE["filename"], "line": 7, "bytes": 4096, "count": 1, "since": 7.0},
    {"file": MODEL["filename"], "line": 12, "bytes": 1024, "count": 2, "since": None},
    {"file": None, "line": None, "bytes": 64, "count": 1, "since": None},
    {"file": LINEAR["filename"], "line": 134, "bytes": 8, "count": 1, "since": None},
]


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    (tmp_path / "snapshots").mkdir()
    return tmp_path / "snapshots"


@pytest.fixture(autouse=True)
def _asked(snapshots: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HEADROOM_PROBE_SNAPSHOT", str(snapshots))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cuda, "_initialized", True)
    monkeypatch.setattr(cuda.memory, "_snapshot", lambda: CONTENT)
    cuda.histories.clear()
    yield
    cuda.histories.clear()
    torch.observers.clear()


@pytest.fixture
def worker() -> Any:
    new_worker: Any = WorkerBase(config(0), 1)
    new_worker.device = SimpleNamespace(index=1)
    return new_worker


@pytest.fixture
def start(folder: Path, worker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Probe]]:
    """Start a probe that looks when it is woken, and has found the worker."""
    monkeypatch.setattr(probe, "INTERVAL_SECONDS", 3600.0)
    monkeypatch.setattr(probe, "MAX_OOM_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(probe, "MAX_SNAPSHOT_WAIT_SECONDS", 60.0)
    started: list[Probe] = []

    def begin() -> Probe:
        new_probe = Probe(str(folder))
        new_probe.engine._remember(worker)
        new_probe.start()
        started.append(new_probe)
        monkeypatch.setattr(hooks, "_probe", new_probe)
        hooks._attach_observer()
        return new_probe

    yield begin
    for started_probe in started:
        started_probe.pause()


def read_document(folder: Path) -> Document:
    (path,) = folder.glob("*-*[0-9].json")
    document: Document = json.loads(path.read_text())
    return document


def request(folder: Path, **changes: Any) -> None:
    content = {"headroom_snapshot": 1, "id": "r1", "until": time.time() + 60} | changes
    (folder / "snapshot.json").write_text(json.dumps(content))


def look(running: Probe) -> None:
    """Let the thread read once, and wait until it has done everything."""
    done = threading.Event()
    tick = running._tick

    def watched() -> None:
        tick()
        done.set()

    running._tick = watched  # type: ignore[method-assign]
    running._wake.set()
    assert done.wait(60)
    running._tick = tick  # type: ignore[method-assign]


def test_the_first_out_of_memory_error_leaves_one_snapshot_before_it_is_raised(
    start: Callable[[], Probe], folder: Path, snapshots: Path
) -> None:
    start()
    assert cuda.histories == [HISTORY]
    hooks._on_oom(1, 2 << 30, 80 << 30, 1 << 20)
    (file,) = snapshots.iterdir()
    written = file.stat()
    hooks._on_oom(1, 2 << 30, 80 << 30, 1 << 20)

    assert file.stat() == written, "once per run"
    assert pickle.loads(file.read_bytes()) == CONTENT  # noqa: S301 - our own
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.name.startswith(f"oom-rank1-{os.getpid()}-")
    document = read_document(folder)
    assert document["oom"]["seen"] == 2
    snapshot_report = document["snapshot"]["oom"]
    assert abs(snapshot_report["t"] - time.time()) < 60
    assert (snapshot_report["file"], snapshot_report["bytes"]) == (str(file), file.stat().st_size)
    assert (snapshot_report["problem"], snapshot_report["request"], snapshot_report["largest"]) == (None, None, LARGEST)


def test_a_request_leaves_one_and_each_newer_request_replaces_it(
    start: Callable[[], Probe], folder: Path, snapshots: Path
) -> None:
    running = start()
    request(folder)
    look(running)
    (file,) = snapshots.iterdir()
    first_inode = file.stat().st_ino
    look(running)
    assert file.stat().st_ino == first_inode, "a request is answered once"

    request(folder, id="r2")
    look(running)
    assert list(snapshots.iterdir()) == [file]
    assert file.name.startswith(f"requested-rank1-{os.getpid()}-")
    snapshot_report = read_document(folder)["snapshot"]
    assert (snapshot_report["requested"]["request"], snapshot_report["oom"]) == ("r2", None)


@pytest.mark.parametrize("changes", [{"headroom_snapshot": 2}, {"id": 5}, {"until": 1.0}])
def test_a_request_that_is_none_is_not_answered(
    start: Callable[[], Probe], folder: Path, snapshots: Path, changes: Document
) -> None:
    running = start()
    request(folder, **changes)
    look(running)

    assert list(snapshots.iterdir()) == []


def test_the_largest_lines_are_those_that_called_torch() -> None:
    assert list_largest(CONTENT) == LARGEST


def test_long_paths_take_a_bounded_part_of_the_probes_file(
    start: Callable[[], Probe], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [block(number, 512, frame("/\u4e2d" * 300, number)) for number in range(20)]
    content = {"segments": [{"blocks": blocks}], "device_traces": []}
    monkeypatch.setattr(cuda.memory, "_snapshot", lambda: content)
    running = start()
    request(folder)
    look(running)
    hooks._on_oom(1, 2, 3, 4)

    facts = read_document(folder)["snapshot"]
    assert len(json.dumps(facts)) < 16 * 1024 * 3 / 8
    assert 0 < len(facts["oom"]["largest"]) == len(facts["requested"]["largest"]) < 10
    assert running._stop_reason is None


def test_unasked_nothing_is_imported_called_or_written(
    start: Callable[[], Probe], folder: Path, snapshots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADROOM_PROBE_SNAPSHOT")
    monkeypatch.delitem(sys.modules, "vllm_headroom_probe.snapshot")
    monkeypatch.setattr(cuda, "memory", None)
    running = start()
    request(folder)
    look(running)
    hooks._on_oom(1, 2, 3, 4)

    assert "vllm_headroom_probe.snapshot" not in sys.modules
    assert "snapshot" not in read_document(folder)
    assert list(snapshots.iterdir()) == []


def test_where_vllm_may_sleep_torchs_history_is_never_touched(
    start: Callable[[], Probe], folder: Path, worker: Any
) -> None:
    worker.vllm_config.model_config.enable_sleep_mode = True
    look(start())
    hooks._on_oom(1, 2, 3, 4)

    assert cuda.histories == []
    assert "snapshot" not in read_document(folder)


def test_a_history_that_is_another_programs_is_left_alone_and_serves(
    start: Callable[[], Probe], snapshots: Path
) -> None:
    cuda.histories.append(("all", {}))
    start()
    hooks._on_oom(1, 2, 3, 4)

    assert cuda.histories == [("all", {})]
    assert len(list(snapshots.iterdir())) == 1


def test_a_torch_that_knows_no_history_serves_on(
    start: Callable[[], Probe], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "memory", SimpleNamespace())
    running = start()
    look(running)
    hooks._on_oom(1, 2, 3, 4)

    (record,) = caplog.records
    assert record.getMessage().startswith("headroom probe: no history is kept: AttributeError: ")
    assert "snapshot" not in read_document(folder)
    assert running._stop_reason is None


def test_a_folder_that_cannot_be_written_costs_no_history(
    start: Callable[[], Probe], snapshots: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots.rmdir()
    look(start())

    assert cuda.histories == []
    assert [record.getMessage() for record in caplog.records] == [
        f"headroom probe: no history is kept: {snapshots} is no folder that vLLM can write"
    ]


@pytest.mark.parametrize(
    ("bound", "problem"),
    [
        ({"MAX_SNAPSHOT_BYTES": 100}, "ValueError: it has more than 0 MiB"),
        ({"MAX_WRITE_SECONDS": -1.0}, "TimeoutError: it takes more than -1 s"),
    ],
)
def test_a_snapshot_that_is_too_large_or_slow_is_none(
    start: Callable[[], Probe], folder: Path, bound: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bound.items():
        monkeypatch.setattr(snapshot, name, value)
    running = start()
    hooks._on_oom(1, 2, 3, 4)

    snapshot_report = read_document(folder)["snapshot"]["oom"]
    assert (snapshot_report["bytes"], snapshot_report["problem"], snapshot_report["largest"]) == (
        None,
        problem,
        LARGEST,
    )
    assert list(Path(snapshot_report["file"]).parent.iterdir()) == [], "nothing unfinished is left"
    assert running._stop_reason is None


def test_a_folder_that_vanishes_ends_nothing(start: Callable[[], Probe], folder: Path, snapshots: Path) -> None:
    running = start()
    snapshots.rmdir()
    hooks._on_oom(1, 2, 3, 4)

    problem = read_document(folder)["snapshot"]["oom"]["problem"]
    assert problem == f"FileNotFoundError: [Errno 2] No such file or directory: '{snapshots}'"
    assert running._stop_reason is None


def test_no_error_waits_for_a_snapshot_that_nobody_writes(
    start: Callable[[], Probe], monkeypatch: pytest.MonkeyPatch, snapshots: Path
) -> None:
    running = start()
    look(running)
    running._stop("a test")
    monkeypatch.setattr(probe, "MAX_SNAPSHOT_WAIT_SECONDS", 3600.0)
    hooks._on_oom(1, 2, 3, 4)

    assert list(snapshots.iterdir()) == []
    assert cuda.histories[-1] == (None, {}), "a probe that has stopped keeps no history"


def test_the_newest_are_kept_and_other_files_are_left_alone(snapshots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_KEPT_SNAPSHOTS", 2)
    for number in range(4):
        path = snapshots / f"oom-rank0-{number}-1.pickle"
        path.touch()
        os.utime(path, (number, number))
    (snapshots / "weights.pickle").touch()
    new_worker: Any = WorkerBase(config(0), 0)
    kept_snapshots = Snapshots(str(snapshots))
    kept_snapshots.begin(new_worker)
    assert kept_snapshots.take_oom(new_worker) is not None
    kept_snapshots.tick(str(snapshots), "9-1", None, new_worker)

    assert {path.name for path in snapshots.iterdir()} == {
        "weights.pickle",
        "oom-rank0-3-1.pickle",
        "oom-9-1.pickle",
    }


def test_the_history_begins_while_torch_initialises_cuda(
    start: Callable[[], Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_initialized", False)
    monkeypatch.setattr(cuda, "_queued", [])
    start()
    assert cuda.histories == []

    hooks._watch_for_ooms()
    cuda.begin()
    assert cuda.histories == [HISTORY]
