"""The trace file, on real files and real full disks."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.logs import capture_logs
from tests.process import eventually
from tests.samples import engine, failure, gpu, page, snapshot
from vllm_headroom.model import EngineProcess, Failure, GpuMemory, Snapshot
from vllm_headroom.trace.recorder import Recorder
from vllm_headroom.vocabulary import Attribution, Role, Source
from vllm_headroom.worker import Worker
from vllm_headroom_tools.trace import parse_trace

MANY = 2**20


def recorder(file: Path, max_bytes: int = MANY) -> Recorder:
    return Recorder(file=file, max_bytes=max_bytes)


def record(subject: Recorder, *snapshots: Snapshot) -> list[dict[str, str]]:
    """Record snapshots; return what was logged."""

    async def run() -> None:
        for tick_snapshot in snapshots:
            await subject.record(tick_snapshot)

    with capture_logs() as lines:
        asyncio.run(run())
    return [{str(name): str(value) for name, value in line.items()} for line in lines]


def read(file: Path) -> list[Snapshot]:
    return list(parse_trace(file.read_bytes().splitlines(keepends=True)))


def times(file: Path) -> list[float]:
    return [read_snapshot.time_seconds - 1_760_000_000.0 for read_snapshot in read(file)]


def test_what_is_recorded_reads_back_as_it_was(tmp_path: Path) -> None:
    sample = snapshot(
        engines=page(
            engine("1", running=3.0, waiting=0.0, finished_total=7.0, awake=True, started_at_seconds=1_759_990_000.25)
        ),
        gpus=(
            gpu(engine=800, other=50, used_peak_bytes=950),
            gpu(index=1, uuid="GPU-b", other=100, held=800, attribution=Attribution.SINGLE),
        ),
        processes=(EngineProcess(pid=9, role=Role.WORKER, rss_bytes=5, started_at_seconds=1.25),),
    )

    record(recorder(tmp_path / "trace"), sample)
    (back,) = read(tmp_path / "trace")

    assert back.engines == sample.engines
    assert not isinstance(back.gpus, Failure)
    assert not isinstance(sample.gpus, Failure)
    facts = [
        [(gpu.reading.uuid, gpu.reading.memory, gpu.engine_bytes, gpu.other_bytes, gpu.held_bytes) for gpu in gpus]
        for gpus in (back.gpus, sample.gpus)
    ]
    assert facts[0] == facts[1]
    assert facts[0][0][1] == GpuMemory(total_bytes=1000, used_bytes=900, free_bytes=100, reserved_bytes=None)
    assert back.processes == (EngineProcess(pid=0, role=Role.WORKER, rss_bytes=5, started_at_seconds=1.25),)


def test_failed_sides_are_null(tmp_path: Path) -> None:
    sides = [failure(source) for source in (Source.ENGINE, Source.NVML, Source.PROCESS)]

    record(recorder(tmp_path / "trace"), snapshot(engines=sides[0], gpus=sides[1], processes=sides[2]))

    text = (tmp_path / "trace").read_text().splitlines()[1]
    assert json.loads(text) == {
        "t": 1_760_001_000.0,
        "gpus": None,
        "engines": None,
        "engines_failure": "unreachable",
        "processes": None,
    }


def test_a_gpu_whose_holders_are_unknown_for_now_stays_unknown(tmp_path: Path) -> None:
    record(recorder(tmp_path / "trace"), snapshot(gpus=(gpu(held=None), gpu(uuid="GPU-b", memory=False))))

    gpus = read(tmp_path / "trace")[0].gpus
    assert not isinstance(gpus, Failure)
    assert [gpu.held_bytes for gpu in gpus] == [None, None]


def test_gpus_of_others_are_not_recorded(tmp_path: Path) -> None:
    record(recorder(tmp_path / "trace"), snapshot(gpus=(gpu(attribution=None),)))

    assert read(tmp_path / "trace")[0].gpus == ()


def test_a_trace_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    record(recorder(file), snapshot(at=1))
    record(recorder(file), snapshot(at=2))

    assert file.read_bytes().count(b"headroom_trace") == 1
    assert times(file) == [1.0, 2.0]


@pytest.mark.parametrize("torn", [b'{"t": 176', b"\0" * 40])
def test_what_a_crash_left_of_a_line_is_taken_away(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "trace"
    record(recorder(file), snapshot(at=1))
    with file.open("ab") as stream:
        stream.write(torn)

    record(recorder(file), snapshot(at=2))

    assert times(file) == [1.0, 2.0]


def test_what_a_crash_left_of_the_header_is_taken_away(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b'{"headroom_')

    record(recorder(file), snapshot(at=2))

    assert times(file) == [2.0]


@pytest.mark.parametrize("content", ["dear diary\n", "[" * 100_000 + "\n"])
def test_a_file_that_is_no_trace_is_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "diary"
    file.write_text(content)

    (line,) = record(recorder(file, max_bytes=1), snapshot(), snapshot())

    assert line["problem"] == "the file is there and is no trace: move it away, or name another"
    assert [path.name for path in tmp_path.iterdir()] == ["diary"]
    assert file.read_text() == content


def test_at_its_size_the_trace_becomes_the_previous_one_and_there_are_no_more(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    record(recorder(file), snapshot(at=0))
    size = file.stat().st_size

    record(recorder(file, max_bytes=2 * size), *(snapshot(at=at) for at in range(1, 8)))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "trace.1"]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * size
    joined = times(tmp_path / "trace.1") + times(file)
    assert joined == [float(at) for at in range(8 - len(joined), 8)]


def test_a_trace_that_was_moved_away_starts_over(tmp_path: Path) -> None:
    file, subject = tmp_path / "trace", recorder(tmp_path / "trace")
    record(subject, snapshot(at=1))
    file.rename(tmp_path / "mine")

    record(subject, snapshot(at=2))

    assert (times(tmp_path / "mine"), times(file)) == ([1.0], [2.0])


def test_a_missing_directory_is_logged_once_and_so_is_its_coming_back(tmp_path: Path) -> None:
    subject = recorder(tmp_path / "gone" / "trace")

    lines_before = record(subject, snapshot(at=1), snapshot(at=2))
    (tmp_path / "gone").mkdir()
    lines_after = record(subject, snapshot(at=3), snapshot(at=4))

    assert [(line["event"], line.get("problem")) for line in lines_before] == [
        ("trace not written", "No such file or directory")
    ]
    assert [line["event"] for line in lines_after] == ["trace written again"]
    assert times(tmp_path / "gone" / "trace") == [3.0, 4.0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_costs_nothing_but_the_trace() -> None:
    (line,) = record(recorder(Path("/dev/full")), snapshot(), snapshot())

    assert line["problem"] == "No space left on device"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_logged(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    (line,) = record(recorder(tmp_path / "trace"), snapshot())

    assert line["problem"] == "Permission denied"


def test_a_file_system_that_hangs_is_waited_for_once_and_used_again_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, answers = tmp_path / "trace", threading.Event()
    calls = Worker.call

    async def call(worker: Worker[None], function: Callable[[], None], timeout_seconds: float) -> None:
        def late() -> None:
            answers.wait()
            function()

        assert timeout_seconds == 1.0
        await calls(worker, late, 0.05)

    monkeypatch.setattr(Worker, "call", call)
    subject = recorder(file)
    (line,) = record(subject, snapshot(at=1), snapshot(at=2))
    answers.set()

    assert line["problem"] == "the file system does not answer within 1 s"
    assert eventually(lambda: record(subject, snapshot(at=3)), "it is written again")[0]["event"] == (
        "trace written again"
    )
    assert times(file)[-1] == 3.0
