"""The probe's own thread: what it writes of an OutOfMemoryError, when it stops, and what it costs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.inside import torch
from tests.fakes.inside.torch import cuda
from tests.fakes.inside.vllm.engine import EngineCore, config
from tests.fakes.inside.vllm.worker import WorkerBase
from tests.process import eventually
from vllm_headroom_probe import gpu, hooks, probe
from vllm_headroom_probe.folder import prune
from vllm_headroom_probe.peaks import Peaks
from vllm_headroom_probe.probe import Probe

Document = dict[str, Any]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker on GPU 1, under a torch that has initialised CUDA."""
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cuda, "_initialized", True)
    new_worker: Any = WorkerBase(config(0), 1)
    new_worker.device = SimpleNamespace(index=1)
    return new_worker


@pytest.fixture
def running(folder: Path, worker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    """A probe that looks when it is woken, and has found the worker and a core."""
    monkeypatch.setattr(probe, "INTERVAL_SECONDS", 3600.0)
    new_probe = Probe(str(folder))
    core = EngineCore(config(0), 0, "spawn")
    new_probe.engine._remember(worker)
    new_probe.engine._remember(core)
    new_probe.start()
    yield new_probe
    new_probe.pause()
    assert core is not None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch's figures take, in which no other process has a part."""
    fake_clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: fake_clock.now))
    return fake_clock


def read_report(folder: Path) -> Document | None:
    documents = [json.loads(path.read_text()) for path in folder.glob("*-*[0-9].json")]
    return documents[0] if documents else None


def look(running: Probe) -> None:
    running._is_written.clear()
    running._wake.set()
    assert running._is_written.wait(60)


def test_an_out_of_memory_error_is_written_before_it_is_raised(
    running: Probe, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_probe", running)
    monkeypatch.setattr(probe, "MAX_OOM_WAIT_SECONDS", 60.0)
    hooks._on_oom(1, 2 << 30, 80 << 30, 1 << 20)

    document = read_report(folder)
    assert document is not None
    when = document["oom"].pop("t")
    assert abs(when - time.time()) < 60
    assert document["oom"] == {
        "uuid": f"GPU-{cuda.UUID}",
        "asked": 2 << 30,
        "free": 1 << 20,
        "total": 80 << 30,
        "allocated": 60 << 30,
        "reserved": 64 << 30,
        "running": 3,
        "waiting": 2,
        "seen": 1,
    }

    hooks._on_oom(0, 1, 2, 3)
    again = read_report(folder)
    assert again is not None
    assert (again["oom"]["seen"], again["oom"]["uuid"]) == (2, None), "of another device nothing more is known"


@pytest.mark.parametrize("name", ["attach", "describe", "describe_current", "detach"])
def test_peaks_that_raise_in_the_thread_cost_no_other_fact(
    running: Probe, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def spoil(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(hooks, "_probe", running)
    monkeypatch.setattr(probe, "MAX_OOM_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(Peaks, name, spoil)
    running.peaks = Peaks()
    hooks._on_oom(1, 2, 3, 4)
    document = read_report(folder)
    running._stop("a test")
    last_document = read_report(folder)

    assert document is not None
    assert (document["peaks"], document["oom"]["step"], document["stopped"]) == (None, None, None)
    assert document["devices"]
    assert last_document is not None
    assert last_document["stopped"] == "a test"


def test_nothing_waits_for_a_probe_that_has_stopped(running: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_OOM_WAIT_SECONDS", 3600.0)
    running._stop("a test")

    running.report_oom(1, 2, 3, 4)


def test_the_observer_is_attached_when_vllm_initialises_cuda_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cuda, "_initialized", False)
    hooks._watch_for_ooms()
    assert torch.observers == []

    cuda.begin()
    assert torch.observers == [hooks._on_oom]


def test_an_allocator_that_keeps_the_gil_is_asked_three_times(
    running: Probe,
    folder: Path,
    clock: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def slow(_: int) -> Document:
        clock.now += 2 * probe.SLOW_READING_SECONDS
        return cuda.STATS

    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", slow)
    for number in range(3):
        assert running._stop_reason is None, number
        look(running)

    stop_reason = eventually(lambda: (read_report(folder) or {})["stopped"], "it says why it stopped")
    assert stop_reason.startswith("three looks took more than 50 ms, one 0.1")
    assert running._thread is not None
    running._thread.join(60)
    assert [record.getMessage() for record in caplog.records] == [f"headroom probe: stopped for good: {stop_reason}"]
    document = read_report(folder)
    assert document is not None
    assert document["devices"][0]["allocated"] == 60 << 30, "the last figures stay"


def test_now_and_then_a_slow_look_is_forgiven(
    running: Probe, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "FORGIVEN_PER_READING", 1.0)
    stats, lasts = cuda.memory_stats_as_nested_dict, iter([0.1, 0.0] * 4)

    def uneven(index: int) -> Document:
        clock.now += next(lasts)
        return stats(index)

    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", uneven)
    for _ in range(8):
        look(running)
    assert running._stop_reason is None


def test_what_raises_is_absent_and_the_rest_is_there(running: Probe, folder: Path, worker: Any) -> None:
    del worker.model_runner.kv_caches
    worker.model_runner.model = None
    worker.device = "of another kind"
    running.engine.core.scheduler.running = 3
    look(running)

    document = read_report(folder)
    assert document is not None
    assert (document["devices"], document["scheduler"]) == ([], None)
    assert document["parts"]["kv_cache"] is None
    assert document["host"]["shm"]["limit"] > 0
    assert document["role"] == "engine_core"


def test_it_says_what_it_costs(running: Probe, folder: Path) -> None:
    for _ in range(3):
        look(running)

    document = read_report(folder)
    assert document is not None
    cost = document["cost"]
    assert 0 < cost["last_seconds"] <= cost["longest_seconds"]
    assert cost["cpu_seconds"] > 0
    assert document["sequence"] == 3


def test_a_report_that_would_be_too_long_ends_it(running: Probe, folder: Path) -> None:
    running._oom = {"asked": "9" * 20_000}
    running._wake.set()

    eventually(lambda: running._stop_reason, "it stops")
    assert running._stop_reason is not None
    assert "bytes for a file of at most 16384" in running._stop_reason
    assert read_report(folder) is None


def test_files_of_many_runs_do_not_fill_the_folder(folder: Path) -> None:
    for number in range(9):
        (folder / f"{number}-1.json").write_text("{}")
    (folder / "notes").mkdir()
    prune(str(folder), max_files=4)

    assert len(list(folder.glob("*.json"))) == 4


def test_its_thread_is_gone_while_vllm_forks(running: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_probe", running)
    thread = running._thread
    assert thread is not None
    hooks._before_fork()
    assert not thread.is_alive()

    hooks._after_in_parent()
    assert running._thread is not None
    assert running._thread.is_alive()
    look(running)


def test_a_write_that_hangs_holds_no_fork_back_and_is_the_last(
    running: Probe, monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    has_begun, ends = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        has_begun.set()
        ends.wait(60)

    monkeypatch.setattr(probe, "write_document", hang)
    monkeypatch.setattr(probe, "MAX_FORK_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(hooks, "_probe", running)
    running._wake.set()
    assert has_begun.wait(60)
    hooks._before_fork()
    hooks._after_in_parent()
    ends.set()

    assert running._stop_reason == "a write hung while vLLM forked"
    assert [record.getMessage() for record in caplog.records] == [
        f"headroom probe: stopped for good: {running._stop_reason}"
    ]
    assert running._thread is not None
    running._thread.join(60)
    assert not running._thread.is_alive()
    assert read_report(folder) is None


def test_the_sidecars_user_may_read_it_whatever_vllms_umask_is(running: Probe, folder: Path) -> None:
    previous_umask = os.umask(0o077)
    try:
        look(running)
    finally:
        os.umask(previous_umask)

    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
