"""The flight record and its incidents, on real files and real full disks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.logs import capture_logs
from tests.process import eventually
from tests.samples import gpu, snapshot
from tests.unit.daemon.state.engine import free
from tests.unit.derive.life.watch import REFUSED, Watch, serving, working
from vllm_headroom.daemon.flight import MOST_USE_SAMPLES, Flight
from vllm_headroom.daemon.mappings import Mappings
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.derive.life.engine import EngineMemory
from vllm_headroom.model import (
    AllocatorHistory,
    AllocatorSnapshot,
    EnginePod,
    LineHolding,
    Snapshot,
    Values,
    Verdict,
)
from vllm_headroom.model.gpu import OomRecord, ProbedProcess, ProbeReadings
from vllm_headroom.trace import flight as record
from vllm_headroom.trace.entries import build_record, encode_line
from vllm_headroom.trace.flight import (
    append_to_record,
    list_incidents,
    locate_incident,
    parse_incident_facts,
    write_incident,
)
from vllm_headroom.trace.incident import read_incident
from vllm_headroom.vocabulary import Level, Role
from vllm_headroom.worker import Worker
from vllm_headroom_tools.trace import read_trace

FULL = Verdict(subject="GPU 0", level=Level.ALARM, sentence="GPU 0 leaks.", alert="HeadroomGpuMemoryLeak")
BEGAN = 1_760_000_000.0


def flight(folder: Path, lock: FolderLock | None = None, pod: EnginePod | None = None) -> Flight:
    lines, mappings = ("a line",), Mappings(lambda _: None)
    return Flight(folder=folder, lines=lambda: lines, version="1.2.3", lock=lock or free(), mappings=mappings, pod=pod)


def step(subject: Flight, *snapshots: Snapshot) -> list[dict[str, Any]]:
    """Take note of snapshots; return what was logged."""

    async def run() -> None:
        for tick_snapshot in snapshots:
            await subject.step(tick_snapshot, (FULL,), Values(()))

    with capture_logs() as lines:
        asyncio.run(run())
    return [dict(line) for line in lines]


def take_snapshot(watch: Watch) -> Snapshot:
    assert watch.seen is not None
    return watch.seen


def died(subject: Flight, watch: Watch | None = None) -> Watch:
    """Let an engine serve, and then be gone."""
    watch = serving() if watch is None else watch
    step(subject, take_snapshot(watch))
    watch.look(REFUSED, processes=(), gpus=(gpu(used=0, total=80 * 2**30),))
    step(subject, take_snapshot(watch))
    return watch


def header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        incident_facts = parse_incident_facts(stream.readline())
    assert incident_facts is not None
    return incident_facts


def the_incident(folder: Path) -> Path:
    (file,) = list_incidents(folder / "incidents")
    return file


def times(file: Path) -> list[float]:
    return [snapshot.time_seconds - BEGAN for snapshot in read_trace(str(file))]


def test_every_tick_is_kept_but_no_more_than_one_a_second(tmp_path: Path) -> None:
    step(flight(tmp_path), *(snapshot(at=at) for at in (0.0, 0.5, 1.0, 1.5, 2.0, 7.0)))

    assert times(tmp_path / "flight.jsonl") == [0.0, 1.0, 2.0, 7.0]


def test_the_record_is_bounded_and_its_newest_lines_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FLIGHT_BYTES", 2000)
    step(flight(tmp_path), *(snapshot(at=at) for at in range(100)))

    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["flight.jsonl", "flight.jsonl.1"]
    assert sum((tmp_path / file).stat().st_size for file in files) <= 4000
    assert times(tmp_path / "flight.jsonl")[-1] == 99.0


def test_on_a_small_volume_half_is_left_for_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOMY_BYTES", 8 * _size(tmp_path))
    monkeypatch.setattr(record, "FLIGHT_BYTES", 8 * 2000)
    step(flight(tmp_path), *(snapshot(at=at) for at in range(100)))

    assert 2000 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000


def _size(folder: Path) -> int:
    volume = os.statvfs(folder)
    return volume.f_blocks * volume.f_frsize


def test_an_incident_names_the_engines_pod_in_its_file_and_in_the_log(tmp_path: Path) -> None:
    pod = EnginePod(namespace="llm", pod="vllm-0", container="vllm")
    subject = flight(tmp_path, pod=pod)
    watch = serving()
    step(subject, take_snapshot(watch))
    watch.look(REFUSED, processes=(), gpus=(gpu(used=0, total=80 * 2**30),))
    lines = step(subject, take_snapshot(watch))

    assert read_incident(header(the_incident(tmp_path))).engine_pod == pod  # type: ignore[union-attr]
    assert "kubectl logs --previous -n llm vllm-0 -c vllm" in [line.get("engine_log") for line in lines]


def test_an_end_is_set_aside_with_what_was_known_before_it(tmp_path: Path) -> None:
    subject = flight(tmp_path)
    died(subject)

    file = the_incident(tmp_path)
    facts = header(file)
    assert (facts["what"], facts["reason"], facts["version"], facts["log"]) == ("ended", "gone", "1.2.3", ["a line"])
    assert [verdict["sentence"] for verdict in facts["before"]["verdicts"]] == ["GPU 0 leaks."]
    assert facts["before"]["t"] < facts["t"]
    assert times(file) == [10.0, 15.0]
    assert file == locate_incident(tmp_path, BEGAN + 15)
    last_incident = subject.last
    assert last_incident is not None
    assert (last_incident.seconds, last_incident.kind, last_incident.reason, last_incident.file) == (
        BEGAN + 15,
        "ended",
        "gone",
        str(file),
    )
    later = flight(tmp_path)
    step(later, snapshot(at=900))
    assert later.last == last_incident


def test_the_last_ten_minutes_of_memory_are_reported_second_by_second(tmp_path: Path) -> None:
    subject, watch = flight(tmp_path), serving()
    step(subject, take_snapshot(watch))
    for tenth in range(7000):
        subject.recent.add(BEGAN + tenth / 10, {"GPU-a": tenth, "GPU-of-others": 1})
    died(subject, watch)

    ((uuid, used),) = header(the_incident(tmp_path))["before"]["used"].items()
    assert uuid == "GPU-a"
    assert len(used) == MOST_USE_SAMPLES
    assert used[-1][1] >= 6990
    assert all(0.8 < later - at < 1.1 for (at, _), (later, _) in pairwise(used))


def test_what_follows_within_five_minutes_belongs_to_it(tmp_path: Path) -> None:
    subject = flight(tmp_path)
    watch = died(subject)
    for _ in range(70):
        watch.look(REFUSED)
        step(subject, take_snapshot(watch))

    assert times(the_incident(tmp_path))[-1] == 15.0 + 300.0


def test_a_stall_is_an_incident_and_its_end_soon_after_is_the_same(tmp_path: Path) -> None:
    subject, watch = flight(tmp_path), serving()
    step(subject, take_snapshot(watch))
    watch.look(working(20), after_seconds=70.0)
    step(subject, take_snapshot(watch))
    facts = header(the_incident(tmp_path))
    assert (facts["what"], facts["progress_age_seconds"]) == ("stalled", 70.0)

    watch.look(working(20))
    died(subject, watch)

    assert [event["what"] for event in header(the_incident(tmp_path))["events"]] == ["stalled", "ended"]


def test_what_comes_soon_after_the_engine_served_again_is_an_incident_of_its_own(tmp_path: Path) -> None:
    subject, watch = flight(tmp_path), serving()
    step(subject, take_snapshot(watch))
    for done, after_seconds in ((20, 70.0), (30, 5.0)):
        watch.look(working(done), after_seconds=after_seconds)
        step(subject, take_snapshot(watch))

    died(subject, watch)
    watch.look(working(5, started=BEGAN + 90.0))
    died(subject, watch)

    incident_events = [header(file)["events"] for file in list_incidents(tmp_path / "incidents")]
    assert [[event["what"] for event in events] for events in incident_events] == [["stalled"], ["ended"], ["ended"]]


def test_an_end_while_the_daemon_was_away_is_noticed(tmp_path: Path) -> None:
    earlier_watch = serving()
    subject = flight(tmp_path)
    watch = Watch()
    watch.state = EngineMemory(runs=earlier_watch.state.runs)
    watch.look(working(1, started=BEGAN + 500))
    step(subject, take_snapshot(watch))

    assert header(the_incident(tmp_path))["what"] == "ended"


def test_ends_that_were_counted_before_it_began_are_no_incident(tmp_path: Path) -> None:
    subject, watch = flight(tmp_path), serving()
    watch.look(REFUSED, processes=(), gpus=(gpu(used=0),))
    watch.look(REFUSED, processes=(), gpus=(gpu(used=0),))
    step(subject, take_snapshot(watch))

    assert not (tmp_path / "incidents").exists()


def test_an_end_in_the_time_of_another_daemon_is_left_to_that(tmp_path: Path) -> None:
    lock = FolderLock()
    subject, watch = flight(tmp_path, lock), serving()
    died(subject, watch)
    assert list(tmp_path.iterdir()) == []

    assert lock.take(tmp_path)
    watch.look(REFUSED, processes=(), gpus=(gpu(used=0),))
    step(subject, take_snapshot(watch))

    assert [path.name for path in tmp_path.iterdir()] == ["flight.jsonl"]


def test_xids_shortly_before_the_end_are_reported(tmp_path: Path) -> None:
    subject, watch = flight(tmp_path), serving()
    step(subject, take_snapshot(watch))
    watch.look(working(30), gpus=(gpu(xid_errors=((79, 1),)),))
    step(subject, take_snapshot(watch))
    died(subject, watch)

    (xid,) = header(the_incident(tmp_path))["xids"]
    assert (xid["uuid"], xid["xid"]) == ("GPU-a", 79)


@pytest.mark.parametrize(("minutes", "expected_xids"), [(14.5, [79]), (15.5, [])])
def test_an_xid_belongs_to_an_incident_of_the_next_15_minutes(
    tmp_path: Path, minutes: float, expected_xids: list[int]
) -> None:
    subject, watch = flight(tmp_path), serving()
    step(subject, take_snapshot(watch))
    watch.look(working(30), gpus=(gpu(xid_errors=((79, 1),)),))
    step(subject, take_snapshot(watch))
    watch.look(working(40), after_seconds=60 * minutes)
    died(subject, watch)

    assert [xid["xid"] for xid in header(the_incident(tmp_path))["xids"]] == expected_xids


def test_what_torch_was_refused_shortly_before_is_reported(tmp_path: Path) -> None:
    subject, watch = flight(tmp_path), serving()
    raised = [
        OomRecord(
            at_seconds=BEGAN + at, uuid="GPU-a", asked_bytes=5, free_bytes=3, allocated_bytes=60, reserved_bytes=64
        )
        for at in (9.0, -2000.0)
    ]
    other_processes = tuple(
        ProbedProcess(
            pid=pid, started_at_seconds=1.0, written_at_seconds=2.0, interval_seconds=5.0, role=Role.WORKER, oom=oom
        )
        for pid, oom in enumerate(raised)
    )
    step(subject, replace(take_snapshot(watch), probe=ProbeReadings(others=other_processes)))
    watch.look(REFUSED, processes=(), gpus=(gpu(used=0, total=80 * 2**30),))
    step(subject, take_snapshot(watch))

    facts = header(the_incident(tmp_path))
    assert facts["ooms"] == [{"t": BEGAN + 9, "uuid": "GPU-a", "asked": 5, "free": 3, "allocated": 60, "reserved": 64}]
    newest, _ = facts["before"]["probe"]
    assert (newest["pid"], newest["role"], newest["oom"]["asked_bytes"]) == (0, "worker", 5)
    assert "parts" not in newest, "what it does not say is left out"
    assert "snapshots" not in facts


def test_an_incident_names_torchs_snapshots_and_what_held_most(tmp_path: Path) -> None:
    subject, watch = flight(tmp_path), serving()
    holding = LineHolding(file="/site/a.py", line=3, size_bytes=8, n_blocks=2, since_seconds=1.5)
    worker = ProbedProcess(
        pid=7, started_at_seconds=1.0, written_at_seconds=2.0, interval_seconds=5.0, role=Role.WORKER, history=None
    )
    exited = [
        replace(
            worker,
            history=AllocatorHistory(
                from_seconds=1.0,
                oom=AllocatorSnapshot(at_seconds=BEGAN + at, file=f"/snap/{at}", size_bytes=9, largest=(holding,)),
            ),
        )
        for at in (9, 8, -2000)
    ]
    step(subject, replace(take_snapshot(watch), probe=ProbeReadings(others=(worker, *exited))))
    watch.look(REFUSED, processes=(), gpus=(gpu(used=0, total=80 * 2**30),))
    step(subject, take_snapshot(watch))

    assert [file["file"] for file in header(the_incident(tmp_path))["snapshots"]] == ["/snap/8", "/snap/9"]
    assert header(the_incident(tmp_path))["snapshots"][-1] == {
        "t": BEGAN + 9,
        "file": "/snap/9",
        "pid": 7,
        "size": 9,
        "problem": None,
        "largest": [{"file": "/site/a.py", "line": 3, "bytes": 8, "count": 2, "since": 1.5}],
    }


def test_of_hours_the_last_minutes_are_whole_and_the_rest_is_thinned(tmp_path: Path) -> None:
    for at in range(0, 3600, 5):
        append_to_record(tmp_path, encode_line(build_record(snapshot(at=at))))
    write_incident(tmp_path, BEGAN + 3595, {"t": 1})

    sample_times = times(the_incident(tmp_path))
    assert sample_times[:3] == [0.0, 10.0, 25.0]  # the first of each 15 s of the clock
    assert [at for at in sample_times if at >= 2995] == [float(at) for at in range(2995, 3600, 5)]


def test_an_incident_is_bounded_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "INCIDENT_BYTES", 2000)
    for at in range(100):
        append_to_record(tmp_path, encode_line(build_record(snapshot(at=at))))
    write_incident(tmp_path, BEGAN + 99, {"t": 1})

    assert the_incident(tmp_path).stat().st_size <= 2000
    assert times(the_incident(tmp_path))[-1] == 99.0


def test_of_many_incidents_those_stay_that_followed_none_soon(tmp_path: Path) -> None:
    append_to_record(tmp_path, encode_line(build_record(snapshot(at=0))))
    day = 86400.0
    alone = [BEGAN + n * day for n in range(4)]
    loop = [BEGAN + 5 * day + n * 400.0 for n in range(30)]
    for seconds in (*alone, *loop):
        write_incident(tmp_path, seconds, {"t": seconds})

    incident_times = [header(file)["t"] for file in list_incidents(tmp_path / "incidents")]
    assert len(incident_times) == record.MOST_INCIDENTS
    assert {*alone, loop[0], loop[-1]} <= set(incident_times)


@pytest.mark.parametrize("step_seconds", [-7200.0, 7200.0])
def test_a_clock_that_is_set_costs_nothing_of_the_last_minutes(tmp_path: Path, step_seconds: float) -> None:
    for at in range(0, 600, 5):
        append_to_record(tmp_path, encode_line(build_record(snapshot(at=at))))
    for at in range(600, 700, 5):
        append_to_record(
            tmp_path, encode_line(build_record(replace(snapshot(at=at), time_seconds=BEGAN + at + step_seconds)))
        )
    write_incident(tmp_path, BEGAN + 695 + step_seconds, {"t": 1})

    sample_times = times(the_incident(tmp_path))
    assert [at - step_seconds for at in sample_times[-20:]] == [float(at) for at in range(600, 700, 5)]
    assert len(sample_times) > 50


def test_a_folder_that_vanishes_costs_its_lines_and_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    subject = flight(folder)
    step(subject, snapshot(at=0))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in its place")

    (log_event,) = step(subject, snapshot(at=5), snapshot(at=10))
    folder.unlink()
    (back,) = step(subject, snapshot(at=15))

    assert log_event["event"] == "flight record not written"
    assert back["event"] == "flight record written again"
    assert times(folder / "flight.jsonl") == [15.0]


@pytest.mark.parametrize("there", [True, False])
def test_the_record_is_never_written_through_a_link(tmp_path: Path, *, there: bool) -> None:
    target_file = tmp_path / "other"
    if there:
        target_file.touch()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "flight.jsonl").symlink_to(target_file)

    (log_event,) = step(flight(tmp_path / "state"), snapshot(at=0), snapshot(at=5))

    assert log_event["event"] == "flight record not written"
    assert not target_file.exists() or target_file.read_bytes() == b""


@pytest.mark.parametrize("linked", ["state", "state/incidents"])
def test_an_incident_is_never_set_aside_through_a_link(tmp_path: Path, linked: str) -> None:
    target_folder = tmp_path / "other"
    target_folder.mkdir()
    (tmp_path / linked).parent.mkdir(exist_ok=True)
    (tmp_path / linked).symlink_to(target_folder)

    with pytest.raises(OSError, match="a link is in the place"):
        write_incident(tmp_path / "state", 1_760_000_000.0, {})

    assert list(target_folder.iterdir()) == []


FILLED = """
import resource, sys
from pathlib import Path
from tests.unit.daemon import test_flight as tests
folder = Path(sys.argv[1])
subject = tests.flight(folder)
watch = tests.serving()
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
for n in range(20):
    watch.look(tests.working(30 + n))
    print(*(each["event"] for each in tests.step(subject, tests.take_snapshot(watch))))
tests.died(subject, watch)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
watch.look(tests.REFUSED, after_seconds=60.0)
print(*(each["event"] for each in tests.step(subject, tests.take_snapshot(watch))))
"""


def test_a_disk_that_is_full_in_the_midst_of_a_line_costs_the_record_and_no_tick(tmp_path: Path) -> None:
    """The kernel refuses to make a file larger, after part of a line, as a full disk does."""
    process = subprocess.run(
        [sys.executable, "-c", FILLED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )

    lines = [line for line in process.stdout.splitlines() if line]
    assert lines[0] == "flight record not written"
    assert lines[-1].split(" an ")[0] == "flight record written again"
    assert times(tmp_path / "flight.jsonl")
    assert header(the_incident(tmp_path))["what"] == "ended"


def test_a_volume_that_hangs_delays_one_tick_and_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, calls, waits = threading.Event(), Worker.call, []

    async def call(worker: Worker[None], function: Callable[[], None], timeout_seconds: float) -> None:
        waits.append(timeout_seconds)

        def late() -> None:
            answers.wait()
            function()

        await calls(worker, late, 0.05)

    monkeypatch.setattr(Worker, "call", call)
    subject = flight(tmp_path)
    (log_event,) = step(subject, snapshot(at=1), snapshot(at=2))
    answers.set()

    assert log_event["problem"] == "the file system does not answer within 1 s"
    later = count(30)
    eventually(
        lambda: any(line["event"].endswith("again") for line in step(subject, snapshot(at=next(later)))),
        "it answers again",
    )
    assert set(waits) == {1.0}


KILLED = """
import sys
from pathlib import Path
from vllm_headroom.trace.flight import write_incident
print("begins", flush=True)
number = 0
while True:
    number += 1
    write_incident(Path(sys.argv[1]), 1_760_000_400.0 + number % 12, {"t": 1.0, "number": number})
"""


def test_kill_9_while_incidents_are_written_leaves_whole_ones(tmp_path: Path) -> None:
    for at in range(400):
        append_to_record(tmp_path, encode_line(build_record(snapshot(at=at))))
    for kill in range(30):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        threading.Event().wait(0.003 * (kill % 10))
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
        for file in list_incidents(tmp_path / "incidents"):
            assert header(file)["t"] == 1.0
            assert times(file)[-1] == 399.0
    assert len(list_incidents(tmp_path / "incidents")) <= record.MOST_INCIDENTS + 1
    assert json.loads((tmp_path / "flight.jsonl").read_bytes().splitlines()[-1])["t"] == BEGAN + 399
