"""The step that ran out of memory, in words, as the probe and the header of an incident have it."""

from __future__ import annotations

import pytest

from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.model import Diagnosis, Ending, GpuAtEnd, PeakReadings, StepAtError, StepFacts, WorkPeak, WorkPeaks
from vllm_headroom.trace.incident import (
    Incident,
    LastInService,
    Oom,
    ProbedMemory,
    add_evidence,
    drop_unknown,
    read_incident,
)
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import EndCause, ExitReason, IncidentKind, LeakState, Sureness, Work

END_SECONDS = 1_760_000_000.0
STEP = StepFacts(
    at_seconds=END_SECONDS - 3,
    requests=2,
    tokens=8193,
    prompt_tokens=8192,
    logprobs_requests=1,
    logprobs_tokens=8192,
    images=3,
    pixels=1_048_576,
    adapters=1,
)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (Work.PREFILL, "8,192 prompt tokens in 2 requests"),
        (Work.DECODE, "8,193 tokens of 2 requests"),
        (Work.PROMPT_LOGPROBS, "8,192 prompt tokens with prompt logprobs of one request"),
        (Work.ENCODER, "3 images of 1,048,576 pixels"),
        (Work.SAMPLING, "sampling for 2 requests"),
        (Work.ADAPTER, "one adapter to load and 8,193 tokens of 2 requests"),
    ],
)
def test_a_step_in_words(work: Work, words: str) -> None:
    assert STEP.describe(work) == words


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (Work.DECODE, "450 tokens of 50 requests, 400 of them drafted"),
        (Work.SAMPLING, "sampling for 50 requests and 400 drafted tokens"),
    ],
)
def test_a_drafted_step_in_words(work: Work, words: str) -> None:
    assert StepFacts(at_seconds=END_SECONDS, requests=50, tokens=450, drafts=400).describe(work) == words


def judge(oom_seconds: float, *, leak: LeakState = LeakState.STABLE, work: Work = Work.PROMPT_LOGPROBS) -> Diagnosis:
    """The first cause of an engine that torch failed, as its incident is written and read."""
    oom = Oom(t=oom_seconds, uuid="GPU-a", asked=4 * GIB, free=GIB, step=StepAtError(work=work, step=STEP))
    peak = WorkPeak(transient_bytes=int(3.1 * GIB), size=8192, step=STEP)
    lower = WorkPeak(transient_bytes=GIB, size=8192, step=STEP)
    works = WorkPeaks(work=Work.PREFILL, recent=lower), WorkPeaks(work=Work.PROMPT_LOGPROBS, recent=peak)
    earlier_last_in_service = LastInService(probe=(ProbedMemory(pid=1, peaks=PeakReadings(works=works)),))
    written = drop_unknown(
        Incident(t=END_SECONDS, what=IncidentKind.ENDED, ooms=(oom,), before=earlier_last_in_service)
    )
    incident = read_incident(written)
    assert incident is not None
    gpu = GpuAtEnd(index=0, uuid="GPU-a", first_room_bytes=4 * GIB, last_room_bytes=GIB, leak=leak)
    end = Ending(
        kind=IncidentKind.ENDED, seconds=END_SECONDS, reason=ExitReason.OUT_OF_MEMORY, has_served=True, gpus=(gpu,)
    )
    return judge_ending(add_evidence(end, incident))[0]


def test_the_step_that_ran_out_of_memory_is_named_and_sure() -> None:
    cause = judge(END_SECONDS - 2)

    assert (cause.cause, cause.sureness) == (EndCause.BURST, Sureness.SURE)
    assert cause.sentence == (
        "Out of GPU memory in a burst: an allocation of torch failed in a step of 8,192 prompt tokens with prompt"
        " logprobs of one request."
    )
    assert (
        "the highest peak, 3.1 GiB at 08:53:17, was a step of 8,192 prompt tokens with prompt logprobs of one request"
    ) in cause.evidence


def test_an_error_long_before_the_end_did_not_end_it() -> None:
    cause = judge(END_SECONDS - 300)

    assert cause.sureness is not Sureness.SURE
    assert "step" not in cause.sentence


def test_a_leak_that_filled_the_card_is_not_the_last_requests_fault() -> None:
    assert judge(END_SECONDS - 2, leak=LeakState.LEAKING).sureness is not Sureness.SURE
