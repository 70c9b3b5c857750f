"""The command over small traces: its JSON, its words, its exit status."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.command import read_data, run_command, run_process
from tests.unit.commands.replay.traces import BEGAN, HEADER, MIB, STEP, flat, leaking, sample, text

HOURS = 3.0
"""Long enough for the alarm, which these traces give after little more than one."""


def replay(*words: str, trace: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return run_command("replay", *words, stdin=trace, **environ)


def answer(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    process = replay("-", "--json", trace=text(records))
    assert (process.returncode, process.stderr) == (0, "")
    data = read_data(process.stdout)
    assert isinstance(data, dict)
    return data


@pytest.fixture(scope="module")
def leak() -> str:
    return text(leaking(HOURS))


def test_a_flat_trace_has_no_intervals() -> None:
    reply = answer(flat(HOURS))

    assert reply == {
        "samples": 2160,
        "span_seconds": 2159 * STEP,
        "gpus": [
            {
                "gpu": 0,
                "uuid": "GPU-a",
                "state": "stable",
                "verdict": "no_leak",
                "growing_intervals": [],
                "leaking_intervals": [],
                "first_leaking": None,
                "last_leaking": None,
            }
        ],
        "host": [],
        "host_memory": None,
        "sleeps": [],
        "stranded": [],
    }


def test_a_leak_is_found_with_its_rate_and_lasts_to_the_end(leak: str) -> None:
    process = run_process("replay", "-", "--json", "--fail-on-leak", stdin=leak)
    (gpu,) = read_data(process.stdout)["gpus"]

    assert process.returncode == 1
    assert gpu["state"] == "leaking"
    ((began, end_seconds),) = gpu["leaking_intervals"]
    assert end_seconds is None
    assert gpu["growing_intervals"][-1][1] == began
    first_leaking, last_leaking = gpu["first_leaking"], gpu["last_leaking"]
    assert first_leaking["t"] == began
    assert last_leaking["t"] == BEGAN + (HOURS * 3600 / STEP - 1) * STEP
    assert last_leaking["bytes_per_request"] == pytest.approx(12_800, rel=0.1)
    assert last_leaking["bytes_per_second_lower"] <= 128_000 <= last_leaking["bytes_per_second_upper"]
    assert last_leaking["leaked_bytes"] == pytest.approx(
        128_000 * HOURS * 3600, rel=0.12
    )  # it began before it was seen
    assert (
        last_leaking["time_to_oom_seconds_lower"]
        < last_leaking["time_to_oom_seconds"]
        < first_leaking["time_to_oom_seconds"]
    )


def test_a_restart_ends_the_alarm_and_what_it_held_is_no_growth() -> None:
    def restarted() -> Iterable[dict[str, Any]]:
        records = list(leaking(HOURS))
        yield from records
        for step in range(720):
            t = BEGAN + HOURS * 3600 + step * STEP
            yield sample(t, 70_000 * MIB, finished=step * 50, started=BEGAN + HOURS * 3600)

    (gpu,) = answer(restarted())["gpus"]

    assert [end_seconds for _, end_seconds in gpu["leaking_intervals"]] == [BEGAN + HOURS * 3600]
    assert gpu["state"] == "stable"
    assert gpu["last_leaking"]["t"] == BEGAN + HOURS * 3600 - STEP


@pytest.mark.parametrize("nothing", [None, [], [{"gpu": 0, "uuid": "GPU-a"}]])
def test_samples_in_which_the_gpu_could_not_be_read_end_no_interval(nothing: list[dict[str, Any]] | None) -> None:
    def gaps() -> Iterable[dict[str, Any]]:
        for number, record in enumerate(leaking(HOURS)):
            yield {**record, "gpus": nothing} if number % 100 < 10 or number > 2150 else record

    (gpu,) = answer(gaps())["gpus"]

    assert [end_seconds for _, end_seconds in gpu["leaking_intervals"]] == [None]
    assert gpu["state"] == "unknown"


def test_host_memory_has_its_own_verdict() -> None:
    def host() -> Iterable[dict[str, Any]]:
        for number, record in enumerate(leaking(HOURS)):
            # Eight times as fast: the limit is unknown, and slower growth would have to last for six hours.
            grown = 8 * (record["gpus"][0]["used"] - 69_000 * MIB)
            processes = [
                {"role": "engine_core", "rss": grown, "started_at": BEGAN},
                {"role": "worker", "rss": 10**10, "started_at": BEGAN},
            ]
            yield {**sample(record["t"], 70_000 * MIB, finished=number * 50), "processes": processes}

    reply = answer(host())

    assert reply["gpus"][0]["leaking_intervals"] == []
    core, worker = reply["host"]
    assert (core["process"], core["state"]) == ("engine_core", "leaking")
    assert core["leaking_intervals"] == [[core["first_leaking"]["t"], None]]
    assert core["first_leaking"]["bytes_per_second"] == pytest.approx(8 * 128_000, rel=0.3)
    assert core["first_leaking"]["bytes_per_second_lower"] < core["first_leaking"]["bytes_per_second"]
    assert core["first_leaking"]["time_to_oom_seconds"] is None
    assert core["growing_intervals"] == [[core["growing_intervals"][0][0], core["first_leaking"]["t"]]]
    assert core["last_leaking"]["t"] == BEGAN + HOURS * 3600 - STEP
    assert worker == {
        "process": "worker",
        "state": "stable",
        "verdict": "no_leak",
        "growing_intervals": [],
        "leaking_intervals": [],
        "first_leaking": None,
        "last_leaking": None,
    }


def test_host_memory_against_a_limit_has_a_time_and_what_the_kernel_did() -> None:
    def host() -> Iterable[dict[str, Any]]:
        for number, record in enumerate(leaking(HOURS)):
            grown = record["gpus"][0]["used"] - 69_000 * MIB
            process = {"role": "engine_core", "rss": grown + 10**10, "file": 10**10, "started_at": BEGAN}
            memory = {"used": grown + 10**9, "limit": 20_000 * MIB, "oom_kills": int(number > 2000)}
            yield {
                **sample(record["t"], 70_000 * MIB, finished=number * 50),
                "processes": [process],
                "host": memory,
            }

    reply = answer(host())

    (core,) = reply["host"]
    assert core["first_leaking"]["time_to_oom_seconds"] == pytest.approx(
        (20_000 * MIB - 10**9 - 1_000 * MIB) / 128_000 - (core["first_leaking"]["t"] - BEGAN), rel=0.3
    )
    assert reply["host_memory"]["limit"] == 20_000 * MIB
    assert reply["host_memory"]["oom_kills"] == 1
    report = replay("-", trace=text(host())).stdout
    assert "of 19.5 GiB in use." in report
    assert "Out-of-memory kills by the kernel: 1." in report


@pytest.mark.parametrize("bases", [("machine", "cgroup"), ("a later version's", "")])
def test_a_use_is_compared_with_the_limit_of_its_own_sample(bases: tuple[str, str]) -> None:
    scopes = [(8.62, 64.0, bases[0]), (2.2, 2.45, bases[1]), (2.1, 2.45, bases[1])]
    hosts = [
        {"used": int(used * 1024) * MIB, "limit": int(limit * 1024) * MIB, "basis": basis}
        for used, limit, basis in scopes
    ]
    trace = [{**sample(BEGAN + 5 * number, 70_000 * MIB), "host": host} for number, host in enumerate(hosts)]

    host_memory = answer(trace)["host_memory"]
    report = replay("-", trace=text(trace)).stdout

    assert (host_memory["used"], host_memory["limit"]) == (int(2.2 * 1024) * MIB, int(2.45 * 1024) * MIB)
    where = " in the engine's container" if bases[1] else ""
    assert f"Host memory: at most 2.2 GiB of 2.45 GiB in use{where}." in report


def test_a_host_leak_alone_fails_as_well() -> None:
    def host() -> Iterable[dict[str, Any]]:
        for record in leaking(HOURS):
            process = {"role": "worker", "rss": 8 * record["gpus"][0]["used"], "started_at": BEGAN}
            yield {**record, "gpus": [], "processes": [process]}

    assert replay("-", "--fail-on-leak", trace=text(host())).returncode == 1


def test_a_gpu_without_a_name_has_none_in_the_answer() -> None:
    reply = answer({"t": 10 * second, "gpus": [{"used": 5}, {"used": 6}]} for second in range(3))

    assert [(gpu["gpu"], gpu["uuid"]) for gpu in reply["gpus"]] == [(0, None), (1, None)]


def test_a_trace_without_samples_is_an_answer() -> None:
    process = replay("-", "--json", "--fail-on-leak", trace=f"{HEADER}\n")

    assert (process.returncode, process.stderr) == (0, "")
    assert read_data(process.stdout) == {
        "samples": 0,
        "span_seconds": 0.0,
        "gpus": [],
        "host": [],
        "host_memory": None,
        "sleeps": [],
        "stranded": [],
    }
    assert replay("-", trace=f"{HEADER}\n").stdout == "The trace has no samples.\n"


@pytest.mark.parametrize("seconds", [180, 3000])
def test_a_past_too_short_for_an_alarm_is_no_proof(seconds: int) -> None:
    process = replay("-", trace=text(flat(seconds / 3600)))

    assert "GPU 0 (GPU-a): cannot tell, " in process.stdout
    assert "growth has to last 10 min for an early warning, about 60 for an alarm; " in process.stdout
    assert "no leak" not in process.stdout


def test_a_past_in_which_the_engine_slept_is_no_proof() -> None:
    awake = (sample(BEGAN + step * 60, 70_000 * MIB) for step in range(120))
    asleep = ({**record, "engines": [{**record["engines"][0], "awake": False}]} for record in awake)

    assert "GPU 0 (GPU-a): cannot tell, the detector never" in replay("-", trace=text(asleep)).stdout


def test_growth_of_a_gpu_with_unknown_holders_is_not_called_the_engines() -> None:
    def shared() -> Iterable[dict[str, Any]]:
        for record in leaking(3):
            (gpu,) = record["gpus"]
            yield {**record, "gpus": [{**gpu, "engine": None, "other": None, "processes": 2}]}

    process = replay("-", trace=text(shared()))

    assert "GPU 0 (GPU-a): FILLS, by whom is not known; leaking at the end." in process.stdout


def test_the_words_say_when_how_fast_how_much_and_how_long(tmp_path: Path, leak: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(leak)

    process = replay(str(file), COLUMNS="90")

    assert (process.returncode, process.stderr) == (0, "")
    lines = process.stdout.splitlines()
    assert lines[0] == "2160 samples over 2 h 59 min, 2025-10-09 08:53:20Z to 2025-10-09 11:53:15Z."
    assert "GPU 0 (GPU-a): LEAKING; leaking at the end." in lines
    for title in ("early warning", "alarm", "how fast", "driven by    requests", "how much", "time to OOM"):
        assert any(line.strip().startswith(title) for line in lines), title
    assert "GPU 0: free memory on a scale from 0, GiB; ▲ is the first alarm" in lines
    assert "running requests" in lines
    assert max(map(len, lines)) <= 90
    assert "\x1b" not in process.stdout


@pytest.mark.parametrize("words", [("-", "--json"), ("-",), ("-", "--fail-on-leak")])
def test_a_bad_line_ends_with_status_2_and_is_named(words: tuple[str, ...]) -> None:
    process = replay(*words, trace=text(islice(flat(1), 3)) + '{"t": 1, "gpus": 3}\n')

    assert (process.returncode, bool(process.stdout)) == (2, "--json" in words)
    assert process.stderr == "vllm-headroom replay: line 5: gpus: got 3, accepts a list or null\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "needs a TRACE or --from-prometheus, and not both"),
        (("-", "--from-prometheus", "http://x"), "needs a TRACE or --from-prometheus, and not both"),
        (("-", "--colour"), "--colour: not an option, see --help"),
        (("-", "--fail_on_leek"), "--fail_on_leek: not an option, did you mean --fail-on-leak?"),
        (("-", "again"), "'again': not an option, see --help"),
        (("-", "--ca-file"), "--ca-file: got nothing, accepts the path of a file"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(words: tuple[str, ...], problem: str) -> None:
    process = replay(*words)

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"vllm-headroom replay: {problem}\n"


def test_files_that_cannot_be_used_end_with_status_2_and_one_line(tmp_path: Path) -> None:
    missing, folder = tmp_path / "missing", tmp_path

    for trace, problem in ((missing, "No such file or directory"), (folder, "Is a directory")):
        process = replay(str(trace))
        assert process.returncode == 2
        assert process.stderr == f"vllm-headroom replay: {trace}: cannot be read: {problem}\n"


def test_a_reader_who_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "replay", "-", "--json"],
        input=f"{HEADER}\n",
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(write)

    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("record", [lambda: flat(0.5), lambda: leaking(0.5)])
def test_the_same_trace_gives_the_same_answer(record: Callable[[], Iterable[dict[str, Any]]]) -> None:
    assert answer(record()) == answer(record())


def test_the_picture_shows_free_memory_and_the_way_to_zero(tmp_path: Path, leak: str) -> None:
    file = tmp_path / "leak.svg"

    assert replay("-", "--svg", str(file), "--json", trace=leak).returncode == 0

    drawn = file.read_text(encoding="utf-8")
    ET.fromstring(drawn)  # noqa: S314 - of our own
    assert "GPU 0: free memory on a scale from 0; leaking at the end" in drawn
    assert 'class="ahead"' in drawn
    begins, ends, *load = re.findall(r">([\d :-]+Z)</text>", drawn)
    assert load == [begins, ends], "both boxes have the same time"


def test_the_picture_of_a_trace_from_1970_to_the_year_9999_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "far.svg"
    used_bytes = itertools.count(40 * 2**30, 2**21)
    records = [sample(seconds, next(used_bytes)) for seconds in (0.0, 253_402_300_799.0) * 100]

    process = replay("-", "--svg", str(file), trace=text(records))

    assert process.returncode == 0
    assert "Traceback" not in process.stderr
    ET.fromstring(file.read_text(encoding="utf-8"))  # noqa: S314 - of our own


def test_the_picture_has_the_host_where_the_trace_has_it(tmp_path: Path) -> None:
    file = tmp_path / "host.svg"
    records = [{**record, "host": {"used": 2 * 2**30, "limit": 5 * 2**30}} for record in flat(0.5)]

    report = replay("-", "--svg", str(file), trace=text(records)).stdout

    drawn = file.read_text(encoding="utf-8")
    assert "host memory: free, on a scale from 0</text>" in drawn
    assert ">3 GiB</text>" in drawn
    assert "host memory: free, on a scale from 0, GiB" in report
    assert "host memory" not in replay("-", trace=text(flat(0.5))).stdout


def test_a_card_that_is_empty_after_an_end_sets_no_scale(tmp_path: Path) -> None:
    file, end_seconds = tmp_path / "ended.svg", BEGAN + 3600.0
    empty_samples = [sample(end_seconds + STEP * step, 0, running=0.0, finished=36_000.0) for step in range(12)]

    process = replay("-", "--svg", str(file), trace=text([*flat(1.0), *empty_samples]))

    assert "     13.0 │" in process.stdout
    assert ">13 GiB</text>" in file.read_text(encoding="utf-8")


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, leak: str) -> None:
    done = replay("-", "--svg", str(tmp_path / "none" / "leak.svg"), trace=leak)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot be written: No such file or directory" in done.stderr
