"""Whose word counts now: of this run only, fresh or absent."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.samples import failure, probed
from vllm_headroom.derive.probe_files import classify_probe
from vllm_headroom.model import EngineProcess, Failure, OomRecord, ProbedProcess, ProbeReadings
from vllm_headroom.vocabulary import Role, Source

NOW = 1_760_001_000.0
BEGAN = 1_760_000_000.0


def process(pid: int = 7, began: float = BEGAN) -> EngineProcess:
    return EngineProcess(pid=pid, role=Role.WORKER, rss_bytes=1, started_at_seconds=began)


def standing(*files: ProbedProcess, processes: tuple[EngineProcess, ...] | Failure = (), now: float = NOW) -> str:
    """Return how each file stands, in a letter."""
    classified = classify_probe(files, processes, now)
    assert isinstance(classified, ProbeReadings)
    return "".join(
        "p"
        if file in classified.present
        else "s"
        if file in classified.silent
        else "o"
        if file in classified.others
        else "-"
        for file in files
    )


def aged(seconds: float, **probe_fields: Any) -> ProbedProcess:
    return probed(written_at_seconds=NOW - seconds, **probe_fields)


@pytest.mark.parametrize(
    ("interval", "age", "expected"),
    [
        (5.0, 0.0, "p"),
        (5.0, 15.0, "p"),
        (5.0, 15.1, "o"),
        (1.0, 10.0, "p"),
        (1.0, 10.1, "o"),
        (1e9, 300.0, "p"),
        (1e9, 300.1, "o"),
        (0.0, 10.1, "o"),
        (5.0, -60.0, "p"),
        (5.0, -60.1, "-"),
    ],
)
def test_where_no_process_shows_a_file_counts_while_it_is_fresh(interval: float, age: float, expected: str) -> None:
    assert standing(aged(age, interval_seconds=interval)) == expected


def test_a_file_of_a_process_that_shows_counts_under_any_pid() -> None:
    assert standing(aged(1), processes=(process(7),)) == "p"
    assert standing(aged(1), processes=(process(4007, BEGAN + 1.9),)) == "p"


def test_a_file_of_a_process_that_shows_counts_though_the_clock_was_set_between_the_two_looks_at_it() -> None:
    began = replace(process(4007, BEGAN - 7200), since_boot_seconds=812.34)

    assert standing(aged(1, since_boot_seconds=812.34), processes=(began,)) == "p"
    assert standing(aged(1, since_boot_seconds=812.35), processes=(began,)) == "o"
    assert standing(aged(1), processes=(began,)) == "o"


def test_a_fresh_file_of_another_run_does_not_count() -> None:
    last_life, this_life = aged(4, started_at_seconds=BEGAN - 60), aged(1)

    assert standing(last_life, this_life, processes=(process(7),)) == "op"
    assert standing(last_life, processes=(process(7),)) == "o"


def test_a_process_that_runs_and_does_not_write_is_silent() -> None:
    assert standing(aged(16), processes=(process(),)) == "s"
    assert standing(aged(16), processes=failure(Source.PROCESS)) == "o"


def test_a_probe_that_gave_up_is_not_taken_for_a_process_that_hangs() -> None:
    files = aged(1, stopped="it was slow"), aged(900, pid=8, stopped="it was slow")

    assert standing(*files, processes=(process(),)) == "oo"


def test_of_two_files_of_one_process_the_newest_counts() -> None:
    classified = classify_probe((aged(1), aged(5)), (), NOW)

    assert isinstance(classified, ProbeReadings)
    assert classified.present == (aged(1),)
    assert classified.others == ()


def test_a_file_dated_ahead_says_nothing_and_hides_nothing() -> None:
    """One such file, left by whoever ran in the engine's container once, would else stand forever."""
    ahead = aged(-1e9, oom=OomRecord(at_seconds=NOW + 1e9))

    assert standing(aged(1), ahead) == "p-"
    assert standing(aged(1), ahead, processes=(process(),)) == "p-"
    assert standing(ahead, processes=(process(),)) == "-"


def test_what_was_not_read_stays_so() -> None:
    assert classify_probe(None, (), NOW) is None
    assert classify_probe(failure(Source.PROBE), (), NOW) == failure(Source.PROBE)
