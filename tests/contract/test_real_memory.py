"""What the detector reports about the host memory of a real vLLM, recorded with and without a leak of a known rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.traces import read_recording, watch_recording
from vllm_headroom.model import EnginePage, Failure, Snapshot
from vllm_headroom.vocabulary import LeakState, Role
from vllm_headroom_tools.history import LeakCourse, LeakReplay, Moment

FOLDER: Final = Path(__file__).parent / "memory"
NAMES: Final = sorted(file.stem for file in FOLDER.glob("*.json"))
BYTES_PER_REQUEST: Final = 12_800
BYTES_PER_SECOND: Final = 128_000


def truth(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return document


LEAKS: Final = [(name, Role(role)) for name in NAMES for role in truth(name)["leaks"]]
QUIET: Final = [(name, role) for name in NAMES for role in Role if (name, role) not in LEAKS]


def read_snapshots(name: str) -> tuple[Snapshot, ...]:
    return read_recording(FOLDER / f"{name}.jsonl.gz")


def replay_leaks(name: str) -> LeakReplay:
    return watch_recording(FOLDER / f"{name}.jsonl.gz")


def list_memory(name: str, role: Role) -> list[tuple[float, float, float]]:
    """Return times, finished requests and a role's own memory, without files, of the later half of a recording."""
    memory_points = []
    for snapshot in read_snapshots(name):
        if isinstance(snapshot.engines, EnginePage) and not isinstance(snapshot.processes, Failure):
            processes = [process for process in snapshot.processes if process.role is role]
            held_bytes = sum(process.rss_bytes - (process.file_bytes or 0) for process in processes)
            finished = sum(engine.finished_total or 0.0 for engine in snapshot.engines.engines)
            memory_points.append((snapshot.time_seconds, finished, float(held_bytes)))
    return memory_points[len(memory_points) // 2 :]


def newest(course: LeakCourse) -> Moment:
    moment = course.last_alarm or course.warning
    assert moment is not None, "it is found"
    return moment


def test_every_recording_has_its_truth_and_three_hours_are_without_a_leak() -> None:
    assert {file.name for file in FOLDER.glob("*.gz")} == {f"{name}.jsonl.gz" for name in NAMES}
    spans = [replay_leaks(name).span for name in NAMES if not truth(name)["leaks"]]
    assert sum(end - begin for begin, end in spans) >= 3 * 3600
    assert {truth(name)["release"] for name in NAMES} == {"0.28.0+cpu", "0.32.0+cpu"}


def test_what_does_not_leak_is_quiet(subtests: pytest.Subtests) -> None:
    for name, role in QUIET:
        with subtests.test(name=name, role=role):
            course = replay_leaks(name).course(role)

            assert course.leaking == []
            assert course.growing == []
            assert course.settled_seconds is not None, "it was watched long enough to say so"


def test_a_leak_is_found_and_stays_found(subtests: pytest.Subtests) -> None:
    for name, role in LEAKS:
        with subtests.test(name=name, role=role):
            course = replay_leaks(name).course(role)

            assert course.state in {LeakState.GROWING, LeakState.LEAKING}
            (begin, end), *_ = course.growing or course.leaking
            assert begin - replay_leaks(name).span[0] < 30 * 60
            assert end is None or course.leaking[-1] == (end, None)


def test_the_rate_is_what_the_memory_of_its_process_grows_by(subtests: pytest.Subtests) -> None:
    for name, role in LEAKS:
        with subtests.test(name=name, role=role):
            alarm, measured = newest(replay_leaks(name).course(role)), list_memory(name, role)
            seconds, requests, grown = (
                last_figure - first_figure for first_figure, last_figure in zip(measured[0], measured[-1], strict=True)
            )

            assert alarm.bytes_per_second == pytest.approx(grown / seconds, rel=0.1)
            assert alarm.bytes_per_request == pytest.approx(grown / requests, rel=0.1)


def test_the_rate_is_what_was_leaked(subtests: pytest.Subtests) -> None:
    """The core's memory grows by nothing else; the worker's does, by a third as much, as it keeps kernels."""
    for name, role in [(name, role) for name, role in LEAKS if role is Role.ENGINE_CORE]:
        with subtests.test(name=name, role=role):
            alarm = newest(replay_leaks(name).course(role))

            if truth(name)["leaks"][role]["way"] == "time":
                assert alarm.bytes_per_second == pytest.approx(BYTES_PER_SECOND, rel=0.1)
            else:
                assert alarm.bytes_per_request == pytest.approx(BYTES_PER_REQUEST, rel=0.1)


def test_the_kernel_kills_when_it_was_forecast() -> None:
    """Files that are mapped are taken back first: resident memory fell while the leak went on."""
    course, (_, killed) = replay_leaks("leak-to-death").course(Role.ENGINE_CORE), replay_leaks("leak-to-death").span
    alarm = course.first_alarm

    assert alarm is not None
    assert alarm.time_to_oom_seconds == pytest.approx(killed - alarm.seconds, rel=0.05)
    assert alarm.time_to_oom_seconds_lower is not None
    assert alarm.time_to_oom_seconds_lower < killed - alarm.seconds
