"""The limits on a trace by itself: each passes, fails and cannot be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import read_data
from tests.unit.commands.check.checking import check, document, run_check
from tests.unit.commands.check.engine_traces import BEGAN, HELD, RUNNING, TOTAL, engine, write_trace

Samples = Iterator[dict[str, Any]]
Change = Callable[[dict[str, Any]], dict[str, Any]]
UTILIZATION = ("--gpu-memory-utilization", "0.9")
BUDGET = 0.9 * TOTAL


def with_engine(**fields: Any) -> Change:
    return lambda sample: {**sample, "engines": [{**sample["engines"][0], **fields}]}


def spoilt(samples: Samples, change: Change, share: float = 1.0) -> Samples:
    """Change the first of the samples."""
    all_of_them = list(samples)
    for number, sample in enumerate(all_of_them):
        yield change(sample) if number < share * len(all_of_them) else sample


def test_the_discrepancy_is_the_highest_against_what_the_engine_was_configured_to_use(tmp_path: Path) -> None:
    def peaking() -> Samples:
        for number, sample in enumerate(engine(1)):
            held_bytes = int(1.05 * BUDGET) if number == 300 else HELD
            yield {**sample, "gpus": [{**sample["gpus"][0], "used": held_bytes, "engine": held_bytes}]}

    trace = write_trace(tmp_path / "t", peaking())
    status, limits = run_check("--trace", trace, "--max-discrepancy", "3%", *UTILIZATION)

    assert (status, limits["discrepancy"]["outcome"]) == (1, "failed")
    assert limits["discrepancy"]["value"] == pytest.approx(0.05, abs=1e-6)
    assert limits["discrepancy"]["why"] == "at the highest 3.52 GiB over what was reported, at 2025-10-09 09:18:20Z"
    assert run_check("--trace", trace, "--max-discrepancy", "0.06", *UTILIZATION)[0] == 0


def test_what_was_reported_can_be_given_in_bytes(steady: str) -> None:
    status, limits = run_check("--trace", steady, "--max-discrepancy", "3%", "--reported-bytes", str(HELD - HELD // 10))

    assert status == 1
    assert limits["discrepancy"]["value"] == pytest.approx(1 / 9)


def test_a_discrepancy_without_a_budget_is_unknown(steady: str) -> None:
    status, limits = run_check("--trace", steady, "--max-discrepancy", "3%")

    assert (status, limits["discrepancy"]["outcome"], limits["discrepancy"]["value"]) == (2, "cannot_tell", None)
    assert limits["discrepancy"]["why"] == (
        "the trace does not contain the engine's budget: give --gpu-memory-utilization or --reported-bytes"
    )


def test_a_discrepancy_that_was_unknown_for_too_long_is_unknown_and_a_high_one_fails(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", spoilt(engine(1), lambda sample: {**sample, "gpus": None}, 0.2))
    limit = ("--trace", trace, "--max-discrepancy", "3%", "--reported-bytes")

    below, above = run_check(*limit, str(HELD)), run_check(*limit, str(HELD // 2))

    assert (below[0], below[1]["discrepancy"]["outcome"]) == (2, "cannot_tell")
    assert below[1]["discrepancy"]["why"] == "GPU 0 could be read for 47 min 55 s of 59 min 55 s"
    assert (above[0], above[1]["discrepancy"]["outcome"]) == (1, "failed")


def test_a_request_is_priced_at_the_highest_load_that_lasted(tmp_path: Path) -> None:
    def rising() -> Samples:
        for number, sample in enumerate(engine(1)):
            running = 1 if number < 200 else 20 if number < 400 else 40 if number < 700 else 80
            yield with_engine(running=running)(sample)

    trace = write_trace(tmp_path / "t", rising())
    status, limits = run_check("--trace", trace, "--max-bytes-per-request", "2GB")
    cost = limits["bytes per running request"]

    assert (status, cost["value"], cost["why"]) == (0, HELD / 40, "68.4 GiB held at this load")
    assert run_check("--trace", trace, "--max-bytes-per-request", "1.8GB")[0] == 1


def test_no_load_that_lasted_has_no_price(tmp_path: Path) -> None:
    def restless() -> Samples:
        for number, sample in enumerate(engine(1)):
            yield with_engine(running=2.0 ** (number % 30))(sample)

    status, limits = run_check("--trace", write_trace(tmp_path / "t", restless()), "--max-bytes-per-request", "2GB")

    assert (status, limits["bytes per running request"]["value"]) == (2, None)
    assert limits["bytes per running request"]["why"] == (
        "no load has 60 readings, after 1,000 requests: run each for longer"
    )


@pytest.mark.parametrize(("allowed_preemptions", "status", "outcome"), [("3", 0, "passed"), ("1.5", 1, "failed")])
def test_preemptions_are_counted_per_thousand_requests(
    tmp_path: Path, allowed_preemptions: str, status: int, outcome: str
) -> None:
    trace = write_trace(tmp_path / "t", engine(1, preempted_per_thousand=2))
    exit_status, limits = run_check("--trace", trace, "--max-preemptions-per-thousand-requests", allowed_preemptions)
    judgement = limits["preemptions per thousand requests"]

    assert (exit_status, judgement["outcome"]) == (status, outcome)
    assert judgement["value"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("allowed_preemptions", "status", "outcome", "why"),
    [
        ("10", 1, "failed", "151 in all, of 429 requests"),
        ("200", 2, "cannot_tell", "and a limit needs 1,000; above the limit so far, 151 in all, of 429 requests"),
        ("400", 2, "cannot_tell", "too little load: 429 requests finished, and a limit needs 1,000"),
    ],
)
def test_preemptions_of_few_requests_are_judged_by_how_many_there_were(
    tmp_path: Path, allowed_preemptions: str, status: int, outcome: str, why: str
) -> None:
    trace = write_trace(tmp_path / "t", engine(1, per_second=429 / 3595, preempted_per_thousand=151_000 / 429))
    exit_status, limits = run_check("--trace", trace, "--max-preemptions-per-thousand-requests", allowed_preemptions)
    judgement = limits["preemptions per thousand requests"]

    assert (exit_status, judgement["outcome"]) == (status, outcome)
    assert judgement["value"] == pytest.approx(352, abs=1)
    assert judgement["why"].endswith(why)


def test_what_cannot_be_judged_is_not_said_to_be_kept(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", engine(1, per_second=429 / 3595, preempted_per_thousand=151_000 / 429))
    printed = check("--trace", trace, "--max-preemptions-per-thousand-requests", "200").stdout

    assert printed.endswith("Cannot tell: 2 of 2 limits cannot be judged, 0 kept.\n")


def test_unknown_preemptions_is_unknown(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", spoilt(engine(1), with_engine(preemptions_total=None)))
    status, limits = run_check("--trace", trace, "--max-preemptions-per-thousand-requests", "1")

    assert (status, limits["preemptions per thousand requests"]["value"]) == (2, None)
    assert limits["preemptions per thousand requests"]["why"] == ("the engine does not report its preemptions")


def test_a_restart_fails_unless_it_is_allowed_and_counts_go_on_over_it(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", engine(1, preempted_per_thousand=2, restarts_at=1800))
    limit = ("--trace", trace, "--max-preemptions-per-thousand-requests", "3")
    refused, allowed = run_check(*limit), run_check(*limit, "--max-restarts", "1")

    assert (refused[0], refused[1]["engine restarts"]["value"]) == (1, 1)
    assert (allowed[0], allowed[1]["engine restarts"]["outcome"]) == (0, "passed")
    assert allowed[1]["preemptions per thousand requests"]["value"] == pytest.approx(2)


@pytest.mark.parametrize(("allowed_restarts", "status"), [("0", 1), ("1", 0)])
def test_restarts_may_be_the_only_limit(tmp_path: Path, allowed_restarts: str, status: int) -> None:
    status_and_limits = run_check(
        "--trace", write_trace(tmp_path / "t", engine(1, restarts_at=1800)), "--max-restarts", allowed_restarts
    )

    assert (status_and_limits[0], *status_and_limits[1]) == (status, "engine restarts")


def test_what_was_counted_since_a_restart_that_nobody_saw_counts(tmp_path: Path) -> None:
    samples = engine(1, per_second=1, preempted_per_thousand=1000, restarts_at=600)
    watched = (sample for sample in samples if not 500 < sample["t"] - BEGAN < 1800)
    limit = ("--trace", write_trace(tmp_path / "t", watched), "--max-preemptions-per-thousand-requests", "1", "--json")
    data = read_data(check(*limit).stdout)

    assert (data["trace"]["engine_restarts"], data["trace"]["requests_finished"]) == (1, 500 + 2995)


def test_an_engine_that_died_between_two_readings_held_no_less_per_request(tmp_path: Path) -> None:
    dead = spoilt(engine(1), lambda sample: {**sample, "gpus": [{**sample["gpus"][0], "used": 0, "engine": 0}]}, 0.3)
    _, limits = run_check("--trace", write_trace(tmp_path / "t", dead), "--max-bytes-per-request", "2GB")

    assert limits["bytes per running request"]["value"] == HELD / RUNNING


def test_a_price_above_the_limit_before_the_load_was_full_is_unknown(tmp_path: Path) -> None:
    status, limits = run_check("--trace", write_trace(tmp_path / "t", engine(0.15)), "--max-bytes-per-request", "1GB")

    assert (status, limits["bytes per running request"]["outcome"]) == (2, "cannot_tell")
    assert limits["bytes per running request"]["value"] == HELD / RUNNING


@pytest.mark.parametrize(
    ("change", "share", "why"),
    [
        (lambda sample: {**sample, "engines": None}, 0.2, "the engine could be read for 47 min 55 s of 59 min 55 s"),
        (with_engine(finished_total=None), 1.0, "the engine does not report how many requests it finished"),
        (
            with_engine(finished_total=900),
            1.0,
            "too little load: 0 requests finished, and a limit needs 1,000",
        ),
    ],
)
def test_too_little_of_the_engine_passes_nothing(tmp_path: Path, change: Change, share: float, why: str) -> None:
    trace = write_trace(tmp_path / "t", spoilt(engine(1), change, share))
    limits = ("--max-leak-per-thousand-requests", "20MB", "--max-bytes-per-request", "9GB", "--max-discrepancy", "50%")
    status, judgements = run_check(
        "--trace", trace, *limits, *UTILIZATION, "--max-preemptions-per-thousand-requests", "9"
    )

    assert status == 2
    assert {value["outcome"] for value in judgements.values()} == {"cannot_tell"}
    assert {value["why"] for value in judgements.values()} == {why}


def test_a_hole_in_a_trace_is_not_watched(tmp_path: Path) -> None:
    watched = (sample for sample in engine(1) if not 1000 < sample["t"] - BEGAN < 2600)
    trace = write_trace(tmp_path / "t", watched)
    status, limits = run_check("--trace", trace, "--max-bytes-per-request", "9GB")

    assert status == 2
    assert limits["engine restarts"]["why"] == "the engine could be read for 33 min 15 s of 59 min 55 s"


@pytest.mark.parametrize("hours", [0, 1 / 12])
def test_a_trace_too_short_passes_nothing(tmp_path: Path, hours: float) -> None:
    trace = write_trace(tmp_path / "t", engine(hours))
    status, limits = run_check(
        "--trace", trace, "--max-bytes-per-request", "9GB", "--max-discrepancy", "50%", *UTILIZATION
    )

    assert status == 2
    assert {value["outcome"] for value in limits.values()} == {"cannot_tell"}


def test_each_gpu_has_its_own_judgement_at_a_cost_below_the_servers(tmp_path: Path) -> None:
    status, report = document(
        "--trace", write_trace(tmp_path / "t", engine(1, gpus=2)), "--max-bytes-per-request", str(int(HELD / RUNNING))
    )

    assert status == 0
    assert [limit["of"] for limit in report["limits"]] == [None, "GPU 0", "GPU 1"]
