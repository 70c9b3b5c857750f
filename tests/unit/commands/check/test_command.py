"""The command's options and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import run_process
from tests.unit.commands.check.checking import check
from tests.unit.commands.check.engine_traces import HEADER, engine, write_trace
from vllm_headroom_tools.check.command import COMMAND, LIMITS
from vllm_headroom_tools.cli import build_parser

A_SIZE = "accepts a size such as 1MiB, or a number of bytes from 1 MiB on"
LIMIT = ("--max-leak-per-thousand-requests", "1MB")


@pytest.mark.parametrize("json", [(), ("--json",), ("--format", "github")])
def test_a_bad_line_ends_with_status_2_and_is_named(tmp_path: Path, json: tuple[str, ...]) -> None:
    trace = write_trace(tmp_path / "t", engine(1))
    with Path(trace).open("a") as stream:
        stream.write('{"t": 1, "gpus": 3}\n')
    process = check("--trace", trace, *LIMIT, *json)

    assert (process.returncode, bool(process.stdout)) == (2, "--json" in json)
    assert process.stderr == f"vllm-headroom check: --trace: {trace}: line 722: gpus: got 3, accepts a list or null\n"


def test_a_bad_baseline_is_named(steady: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    process = check("--trace", steady, "--baseline", str(missing), *LIMIT)

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"vllm-headroom check: --baseline: {missing}: cannot be read: No such file or directory\n"


def test_a_trace_can_come_from_standard_input(steady: str) -> None:
    process = run_process("check", "--trace", "-", *LIMIT, stdin=Path(steady).read_text())

    assert (process.returncode, process.stderr) == (0, "")


def test_a_trace_without_samples_is_unknown() -> None:
    process = run_process("check", "--trace", "-", *LIMIT, stdin=f"{HEADER}\n")

    assert (process.returncode, process.stderr) == (2, "")
    assert "the trace has no samples" in process.stdout


def test_a_report_that_cannot_be_written_ends_with_status_2(steady: str, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "report.xml"
    process = check("--trace", steady, *LIMIT, "--junit", str(file))

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"vllm-headroom check: {file}: cannot be written: No such file or directory\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--trace: needed, accepts the path of a trace, or - for standard input"),
        (
            ("--trace", "x", "--max-bytes-per-request", "2"),
            f"--max-bytes-per-request: got '2' (without a unit it is bytes: 2GiB?), {A_SIZE}",
        ),
        (("--trace", "x"), "needs a limit, such as --max-leak-per-thousand-requests 1MiB"),
        (("--trace", "x", "--max-growth-over-baseline", "5%"), "--max-growth-over-baseline needs a --baseline"),
        (
            ("--trace", "-", "--baseline", "-", *LIMIT),
            "--trace and --baseline cannot both be standard input",
        ),
        (
            ("--trace", "x", "--max-leak-per-thousand-requests", "1G"),
            f"--max-leak-per-thousand-requests: got '1G' (G has two meanings: 1GiB or 1GB?), {A_SIZE}",
        ),
        (
            ("--trace", "x", "--max-discrepancy", "3"),
            "--max-discrepancy: got '3', accepts a share such as 5% or 0.05, at most 100%",
        ),
        (
            ("--trace", "x", *LIMIT, "--gpu-memory-utilization", "90"),
            "--gpu-memory-utilization: got '90' (did you mean 90%?), accepts a ratio above 0, at most 1",
        ),
        (
            ("--trace", "x", *LIMIT, "--gpu-memory-utilization", "0.9", "--reported-bytes", "1GB"),
            "--gpu-memory-utilization and --reported-bytes cannot both be given",
        ),
        (
            ("--trace", "x", *LIMIT, "--json", "--format", "github"),
            "--json and --format cannot both be given",
        ),
        (
            ("--trace", "x", "--max-preemptions-per-thousand-requests", "nan"),
            "--max-preemptions-per-thousand-requests: got 'nan', accepts a number, 0 or more",
        ),
        (
            ("--trace", "x", *LIMIT, "--max-restarts", "-1"),
            "--max-restarts: got '-1', accepts a whole number from 0 on",
        ),
    ],
)
def test_bad_options_end_with_status_2_and_one_line(words: tuple[str, ...], problem: str) -> None:
    process = check(*words)

    assert (process.returncode, bool(process.stdout)) == (2, "--json" in words)
    assert process.stderr == f"vllm-headroom check: {problem}\n"


def test_every_limit_that_can_be_set_is_judged() -> None:
    options = vars(build_parser(COMMAND, "check").read(["--trace", "x"]))

    assert {name for name in options if name.startswith("max_")} == LIMITS.keys()
