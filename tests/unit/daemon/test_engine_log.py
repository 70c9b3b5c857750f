"""The engine's log is followed: its sizes become series, and the ends of its starts are remembered."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine_logs import DEATH, VLLM_0_19, append
from tests.process import eventually
from tests.samples import snapshot, values
from vllm_headroom import catalog
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon import engine_log
from vllm_headroom.daemon.engine_log import EngineLogFollower, build_log_source
from vllm_headroom.derive.startup import derive_startup
from vllm_headroom.model import Failure, LogReading, find_log_ending
from vllm_headroom.scrape.log.batch import LogBatch
from vllm_headroom.scrape.log.files import LogFiles
from vllm_headroom.scrape.log.journal import Journal
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import LogFailureKind, Reason

LOAD = (
    "(APIServer pid=1) INFO 04-22 02:01:00 [loggers.py:1] Engine 000: Avg prompt throughput: 9.0 tokens/s,"
    " Avg generation throughput: 100.0 tokens/s, Running: 6 reqs, Waiting: 0 reqs, GPU KV cache usage: 30.0%,"
    " Prefix cache hit rate: 0.0%\n"
)


def follow(file: Path) -> EngineLogFollower:
    return EngineLogFollower(LogFiles(str(file)), SystemClock())


def read(follower: EngineLogFollower) -> LogReading:
    reading = asyncio.run(follower.read(5.0))
    assert isinstance(reading, LogReading)
    return reading


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "vllm.log"
    file.write_text(VLLM_0_19)
    return file


def test_the_sizes_of_the_last_start_become_series_of_the_largest_rank(file: Path) -> None:
    samples = derive_startup(snapshot(log=read(follow(file))))

    assert values(samples, catalog.ENGINE_STARTUP) == {
        ("weights",): round(34.01 * GIB),
        ("activations",): round(1.96 * GIB),
        ("non_torch",): round(2.11 * GIB),
        ("cuda_graphs",): round(1.85 * GIB),
        ("kv_cache",): round(37.28 * GIB),
    }
    assert derive_startup(snapshot()) == ()


def test_a_death_is_remembered_with_its_time_over_a_rotation_in_the_middle_of_a_line(file: Path) -> None:
    follower = follow(file)
    assert read(follower).endings == ()
    append(file, DEATH[:900])
    read(follower)
    append(file, DEATH[900:])
    file.rename(file.with_suffix(".1"))
    file.write_text(VLLM_0_19)
    first_reading = read(follower)
    second = read(follower)

    for reading in (first_reading, second):
        (ending,) = reading.endings
        assert ending.failure is not None
        assert ending.failure.refusal is not None
        assert ending.failure.refusal.asked_bytes == round(3.74 * GIB)
        assert ending.seconds is not None
        assert find_log_ending(reading, ending.seconds + 5, ending.seconds + 5) == ending
    assert second.start is not None
    assert second.start.failures == ()


def test_a_failure_that_was_there_before_has_no_time_and_explains_no_exit(file: Path) -> None:
    append(file, DEATH)
    reading = read(follow(file))

    assert reading.endings[0].seconds is None
    assert find_log_ending(reading, SystemClock().time(), SystemClock().time()) is None


def test_a_failure_that_the_engine_survives_is_forgotten(file: Path) -> None:
    follower = follow(file)
    read(follower)
    append(file, DEATH)
    assert len(read(follower).endings) == 1
    append(file, LOAD * 2)
    assert read(follower).endings == ()


def test_a_log_that_goes_on_and_has_no_failure_says_so_after_the_exit(file: Path) -> None:
    follower = follow(file)
    read(follower)
    append(file, LOAD)
    reading = read(follower)
    now = SystemClock().time()

    assert find_log_ending(reading, now, now) is None
    ending = find_log_ending(reading, now, now + 60)
    assert ending is not None
    assert (ending.failure, ending.is_stopped) == (None, False)
    assert find_log_ending(reading, now + 600, now + 700) is None, "nothing was added in the last minute before"


def test_a_log_that_is_not_there_is_a_failure_until_it_is(tmp_path: Path) -> None:
    file = tmp_path / "later.log"
    follower = follow(file)
    failure = asyncio.run(follower.read(5.0))
    assert isinstance(failure, Failure)
    assert failure.reason is Reason.NOT_FOUND

    file.write_text(VLLM_0_19)
    assert read(follower).start is not None


def test_the_setting_names_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: dict[str, Any] = {place: build_log_source(place, "vllm") for place in ("/var/log/a*.log", "journal:v@1")}
    assert isinstance(sources["/var/log/a*.log"], LogFiles)
    assert isinstance(sources["journal:v@1"], Journal)

    monkeypatch.setattr(engine_log, "ACCOUNT", tmp_path)
    failure = asyncio.run(build_log_source("kubernetes", "vllm").fetch(1.0))
    assert isinstance(failure, Failure)
    assert "POD_NAME" in failure.message


def test_the_newest_failure_of_a_start_is_its_cause_and_not_what_follows(file: Path) -> None:
    follower = follow(file)
    read(follower)
    for line in DEATH.splitlines(keepends=True):
        append(file, line)
        reading = read(follower)

    (ending,) = reading.endings
    assert ending.failure is not None
    assert ending.failure.kind is LogFailureKind.GPU_OUT_OF_MEMORY


def test_what_is_read_slowly_is_not_lost(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = follow(file)
    read(follower)
    go_on = threading.Event()
    read_batch = follower._read_batch

    def wait_and_read(batch: LogBatch, now_seconds: float) -> LogReading:
        go_on.wait()
        return read_batch(batch, now_seconds)

    monkeypatch.setattr(follower, "_read_batch", wait_and_read)
    monkeypatch.setattr(engine_log, "READ_LOG_SECONDS", 0.01)
    append(file, DEATH)

    async def read_twice() -> list[LogReading | Failure]:
        return [await follower.read(5.0), await follower.read(5.0)]

    assert asyncio.run(read_twice()) == [engine_log.SLOW, engine_log.SLOW]
    go_on.set()
    monkeypatch.undo()
    eventually(lambda: not follower._worker.is_busy, "the batch is read")
    assert len(read(follower).endings) == 1
