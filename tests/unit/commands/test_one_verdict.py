"""One trace has one verdict on leaks: of advise, replay and check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import generate
import pytest

from tests.command import read_data, run_command
from tests.unit.commands.advise import traces

CONTRACT: Final = Path(__file__).parents[2] / "contract"
RECORDED: Final = tuple(
    CONTRACT / f"{name}.jsonl.gz"
    for name in (
        "card/h100-leak",
        "card/h100-sleep",
        "memory/leak-by-request",
        "memory/leak-to-death",
        "memory/quiet-bursty",
        "memory/quiet-level",
    )
)
GENERATED: Final = (
    ("leak_low_rps", 1, 12.0),
    ("leak_req_51.2", 0, 3.0),
    ("leak_sleep_wake", 0, 6.0),
    ("warmup_ramp", 31, 4.0),
    ("sawtooth_gc", 30, 3.0),
)
LIMITS: Final = (
    "--max-leak-per-thousand-requests",
    "1GiB",
    "--max-host-leak-per-thousand-requests",
    "1GiB",
)
OUTCOMES: Final = {
    "leaking": {"passed", "failed", "cannot_tell"},  # by the limit
    "growing": {"cannot_tell"},
    "no_leak": {"passed", "cannot_tell"},  # by what would have been seen
    "cannot_tell": {"passed", "cannot_tell"},
}
"""What `check` may answer to each verdict."""


def grow_for_five_hours() -> Iterator[traces.Record]:
    """A request a second, and 44 MiB an hour that stop after five of ten hours: an early warning of 3.7 h."""
    for step in traces.steps(10):
        hours = step * traces.STEP / 3600
        grown_mib = int(min(hours, 5.0) * 44) // 2 * 2
        yield traces.sample(
            step, served=int(step * traces.STEP), running=8, kv_used_ratio=0.04, engine_mib=70_000 + grown_mib
        )


def write(folder: Path, text: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text(text)
    return file


def ask(file: Path) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return the status and the object of each command on a trace."""
    words = {
        "advise": (str(file),),
        "replay": (str(file), "--fail-on-leak"),
        "check": ("--trace", str(file), *LIMITS),
    }
    answers = {}
    for command, arguments in words.items():
        process = run_command(command, *arguments, "--json")
        answers[command] = (process.returncode, read_data(process.stdout))
    return answers


def agree(file: Path) -> set[str]:
    """Assert that the commands agree on each series; return the verdicts."""
    answers = ask(file)
    status, advised = answers["advise"]
    replay_status, replayed = answers["replay"]
    _, checked = answers["check"]
    by_replay = {f"GPU {gpu['gpu']}": gpu["verdict"] for gpu in replayed["gpus"]}
    by_replay |= {host["process"]: host["verdict"] for host in replayed["host"]}
    by_advise = {leak["series"]: leak["verdict"] for leak in advised["leaks"]}
    by_check = {limit["of"]: limit["leak_verdict"] for limit in checked["limits"] if limit["leak_verdict"]}
    outcomes = {limit["of"]: limit["outcome"] for limit in checked["limits"]}

    assert by_advise == by_replay
    assert by_check == by_replay
    assert all(outcomes[series] in OUTCOMES[verdict] for series, verdict in by_replay.items())
    causes = {advice["cause"] for advice in advised["advice"]}
    verdicts = set(by_replay.values())
    assert ("leaking" in verdicts) == bool(causes & {"gpu_leak", "host_leak"})
    assert ("leaking" in verdicts) == (replay_status == 1)
    if "growing" in verdicts:
        assert status != 0
    return verdicts


def test_an_early_warning_of_hours_is_an_answer_of_all_three(tmp_path: Path) -> None:
    file = write(tmp_path, traces.text(grow_for_five_hours()))

    assert agree(file) == {"growing", "no_leak"}
    process = run_command("advise", str(file))
    assert process.returncode == 2
    shown = " ".join(process.stdout.split())
    assert "GPU 0: only early warnings, no alarm, and a longer trace shows whether that is a leak: look again" in shown


@pytest.mark.parametrize("trace", [traces.healthy, traces.gpu_leak, traces.host_leak, traces.too_many_requests])
def test_traces_of_one_cause(trace: traces.Trace, tmp_path: Path) -> None:
    verdicts = agree(write(tmp_path, traces.text(trace())))

    assert ("leaking" in verdicts) == (trace in {traces.gpu_leak, traces.host_leak})


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name)
def test_recorded_traces(file: Path) -> None:
    verdicts = agree(file)

    assert ("leaking" in verdicts or "growing" in verdicts) == ("leak" in file.name)


@pytest.mark.parametrize(("name", "seed", "hours"), GENERATED)
def test_generated_traces(name: str, seed: int, hours: float, tmp_path: Path) -> None:
    lines = generate.lines(generate.make(name, seed, hours, 15.0))
    verdicts = agree(write(tmp_path, "\n".join(lines)))

    assert verdicts & {"leaking", "growing"} or not name.startswith("leak")
