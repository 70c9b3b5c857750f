"""Real ends: vLLM on stand-in cards and on the CPU that was killed, stopped or out of memory beside a daemon.

Each is judged as an incident, and without its header as a trace, at the rate of its record and with half its samples.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import Struct

from tests.captures.ends.keep import HERE
from vllm_headroom.model import Ending
from vllm_headroom.trace.entries import HEADER, encode_line
from vllm_headroom.trace.flight import INCIDENT_KEY
from vllm_headroom.vocabulary import EndCause, ExitReason, IncidentKind, Role, Sureness
from vllm_headroom_tools.history import LeakReplay
from vllm_headroom_tools.postmortem.report import NO_INCIDENT, read_postmortem
from vllm_headroom_tools.trace import read_trace

CORE, WORKER, SERVER = Role.ENGINE_CORE, Role.WORKER, Role.API_SERVER


class Truth(Struct, frozen=True):
    """What was done to the engine, and `at` what time in seconds since the epoch its first process exited.

    `order` is in what order its processes exited, and `shown` is how many of them the whole record shows to have exited
    before the rest. `reason` is that of the exit; `replayed` where the samples, which lack the probe's reports, have
    another.
    """

    cause: EndCause
    at: float
    order: tuple[Role, ...]
    shown: int = 1
    reason: ExitReason = ExitReason.GONE
    replayed: ExitReason | None = None


CORE_KILLED: Final = Truth(cause=EndCause.CRASH, at=1795495492.59, order=(CORE, SERVER, WORKER))
SERVER_KILLED: Final = Truth(cause=EndCause.CRASH, at=1795495699.64, order=(SERVER, CORE))
WORKER_KILLED: Final = Truth(cause=EndCause.CRASH, at=1795496062.13, order=(WORKER, SERVER, CORE))
"""One of two; the core waits for it forever, and was killed minutes later."""
NEVER_FITTED: Final = Truth(
    cause=EndCause.NEVER_FITTED,
    at=1795496394.16,
    order=(CORE, SERVER),
    shown=0,
    reason=ExitReason.OUT_OF_MEMORY,
    replayed=ExitReason.GONE,
)
FILLED: Final = Truth(
    cause=EndCause.BURST, at=1795496530.01, order=(CORE, SERVER), shown=0, reason=ExitReason.OUT_OF_MEMORY
)
"""Tensors were kept until nothing was left, within two seconds."""

REAL: Final = {
    "card-core-killed-at-work-1s": CORE_KILLED,
    "card-core-killed-at-work-5s": CORE_KILLED,
    "card-filled-1s": FILLED,
    "card-filled-5s": FILLED,
    "card-never-fitted-1s": NEVER_FITTED,
    "card-never-fitted-5s": NEVER_FITTED,
    "card-server-killed-at-work-1s": SERVER_KILLED,
    "card-server-killed-at-work-5s": SERVER_KILLED,
    "card-worker-killed-at-work-1s": WORKER_KILLED,
    "card-worker-killed-at-work-5s": WORKER_KILLED,
}
OLD: Final = {"old-card-prompt-logprobs": (EndCause.BURST, ExitReason.OUT_OF_MEMORY)}
"""Incidents that the version before this one wrote, whose header has no cause: they stay readable."""

OF_A_STEP: Final = {
    "card-peak-adapter": "one adapter to load and 7,000 tokens of one request",
    "card-peak-decode": "1,848 tokens of 56 requests, 1,792 of them drafted",
    "card-peak-encoder": "one image of 960,400 pixels",
    "card-peak-prefill": "757 prompt tokens in 29 requests",
    "card-peak-prompt_logprobs": "2,220 prompt tokens with prompt logprobs of 2 requests",
    "card-peak-sampling": "sampling for 60 requests",
}
"""Engines that one step ended on a nearly full card, with the probe's peaks on, and that step in words."""

PARTS: Final = {"all": slice(None), "even": slice(None, None, 2), "odd": slice(1, None, 2)}


def read_lines(name: str) -> list[bytes]:
    with gzip.open(HERE / f"{name}.jsonl.gz") as stream:
        return stream.readlines()


def write_part(folder: Path, name: str, part: str, *, headed: bool) -> Path:
    """Write a capture with a part of its samples, and perhaps without the facts of the incident."""
    header_line, *samples = read_lines(name)
    file = folder / "trace.jsonl"
    file.write_bytes(b"".join((header_line if headed else encode_line(HEADER), *samples[PARTS[part]])))
    return file


def check_order(truth: Truth, ending: Ending, part: str) -> None:
    """Require that those named as the first to exit are the first, and at the full rate that they are named."""
    named = {lost_process.role for lost_process in ending.lost_processes}
    assert named in [set(truth.order[:count]) for count in range(len(truth.order))]
    if part == "all":
        assert named == set(truth.order[: truth.shown])


CASES: Final = [pytest.param(name, part, id=f"{name}-{part}") for name in REAL for part in PARTS]


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_real_incident_has_its_cause_and_who_went_first(tmp_path: Path, name: str, part: str) -> None:
    truth, report = REAL[name], read_postmortem(write_part(tmp_path, name, part, headed=True))

    assert report.findings[0].cause == truth.cause
    assert report.ending is not None
    check_order(truth, report.ending, part)


@pytest.mark.parametrize(("name", "part"), CASES)
def test_its_samples_alone_have_one_exit_at_its_time_and_its_cause(tmp_path: Path, name: str, part: str) -> None:
    truth, file, watch = REAL[name], write_part(tmp_path, name, part, headed=False), LeakReplay()
    for snapshot in read_trace(str(file)):
        watch.step(snapshot)
    reason = truth.replayed or truth.reason

    assert [event.reason for event in watch.events if event.kind is IncidentKind.ENDED] == [reason]
    assert watch.engine.runs.exits == {reason: 1}
    assert watch.engine.runs.restarts == 0
    assert all(event.seconds >= truth.at for event in watch.events)
    assert read_postmortem(file).findings[0].cause == truth.cause


def read_header(name: str) -> dict[str, Any]:
    incident_facts: dict[str, Any] = json.loads(read_lines(name)[0])[INCIDENT_KEY]
    return incident_facts


@pytest.mark.parametrize("name", REAL)
def test_the_daemon_counted_the_reason_of_the_exit(name: str) -> None:
    reasons = [event["reason"] for event in read_header(name)["events"] if event["what"] == IncidentKind.ENDED]

    assert reasons == [REAL[name].reason]


@pytest.mark.parametrize("name", OLD)
def test_an_incident_of_the_version_before_is_read(name: str) -> None:
    report = read_postmortem(HERE / f"{name}.jsonl.gz")

    assert "cause" not in read_header(name)
    assert report.ending is not None
    assert (report.findings[0].cause, report.ending.reason) == OLD[name]
    assert report.incident is not NO_INCIDENT
    assert report.incident.before.leaks


@pytest.mark.parametrize("name", OF_A_STEP)
def test_a_step_that_ran_out_of_memory_is_named_and_sure(name: str) -> None:
    (finding, *_) = read_postmortem(HERE / f"{name}.jsonl.gz").findings

    assert (finding.cause, finding.sureness) == (EndCause.BURST, Sureness.SURE)
    assert finding.sentence.endswith(f"an allocation of torch failed in a step of {OF_A_STEP[name]}.")


def test_every_capture_is_judged() -> None:
    assert {file.name for file in HERE.glob("*.gz")} == {f"{name}.jsonl.gz" for name in (*REAL, *OLD, *OF_A_STEP)}
