"""The engine's own log: it gives the reason of an exit, makes a cause sure, or contradicts it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.engine_logs import DEATH, VLLM_0_19, begin
from tests.samples import values
from tests.unit.derive.life.watch import BEGAN, REFUSED, Watch, card, exits, serving, working
from vllm_headroom import catalog
from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.derive.life.progress import STALLED_SECONDS
from vllm_headroom.derive.startup import derive_refusal
from vllm_headroom.derive.verdicts import judge_snapshot
from vllm_headroom.model import Diagnosis, Ending, LogEnding, LogReading, Values
from vllm_headroom.model.gpu import Gpu
from vllm_headroom.parse.log.reader import read_log
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import EndCause, EngineState, ExitReason, Sureness

CUDA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
NO_CACHE = "ValueError: No available memory for the cache blocks. Try increasing\n"
KILLED = "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': -9}\n"
STOP = "(APIServer pid=1) INFO:     Shutting down\n"
HANG = "TimeoutError: RPC call to execute_model timed out.\n"
STRANGE = 'Traceback (most recent call last):\n  File "/x/vllm/a.py", line 1, in b\nKeyError: 7\n'


def end_of(text: str) -> LogEnding:
    """Return what a log reports about the end of the one start."""
    (start,) = read_log([text.encode()]).starts
    return LogEnding(failure=start.root_failure, is_stopped=start.is_stopped, seconds=0.0)


def reading(text: str, at: float) -> LogReading:
    ending = replace(end_of(text), seconds=BEGAN + at)
    return LogReading(start=None, endings=(ending,), newest_seconds=BEGAN + at)


def die(text: str | None, watch: Watch | None = None, **look_fields: Any) -> tuple[Watch, Ending]:
    """Let an engine at work be gone, with a log of this text."""
    watch = watch or serving(gpus=(card(70),))
    log = None if text is None else reading(text, watch.at + 5)
    status = watch.look(REFUSED, processes=(), log=log, **look_fields)
    assert status.event is not None
    return watch, status.event


def judge(text: str | None, *, idle: bool = False, gpus: tuple[Gpu, ...] = (card(70),)) -> tuple[Diagnosis, ...]:
    watch = Watch(gpus=gpus)
    for done in range(10, 200, 10):
        watch.look(working(done, running=0.0 if idle else 4.0))
    _, ending = die(text, watch)
    return judge_ending(ending)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (VLLM_0_19 + DEATH, ExitReason.OUT_OF_MEMORY),
        (VLLM_0_19 + STOP, ExitReason.STOPPED),
        (VLLM_0_19 + CUDA, ExitReason.GONE),
        (None, ExitReason.GONE),
    ],
)
def test_an_exit_is_counted_under_the_reason_of_the_log(text: str | None, reason: ExitReason) -> None:
    watch, ending = die(text)

    assert ending.reason is reason
    assert watch.seen is not None
    assert watch.seen.engine_status is not None
    assert exits(watch.seen.engine_status) == {reason: 1}


@pytest.mark.parametrize(
    ("text", "cause", "sureness"),
    [
        (VLLM_0_19 + DEATH, EndCause.BURST, Sureness.SURE),
        (VLLM_0_19 + CUDA, EndCause.CRASH, Sureness.SURE),
        (VLLM_0_19 + HANG, EndCause.HANG, Sureness.SURE),
        (VLLM_0_19 + STOP, EndCause.STOPPED, Sureness.SURE),
        (VLLM_0_19 + KILLED, EndCause.KILLED, Sureness.LIKELY),
        (begin("0.19.0") + NO_CACHE, EndCause.NEVER_FITTED, Sureness.SURE),
    ],
)
def test_the_log_names_the_cause(text: str, cause: EndCause, sureness: Sureness) -> None:
    (answer,) = judge(text)

    assert (answer.cause, answer.sureness) == (cause, sureness)
    assert "log" in answer.evidence[0]


def test_the_refused_allocation_is_in_the_answer() -> None:
    (answer,) = judge(VLLM_0_19 + DEATH)

    assert any("3.74 GiB were refused on GPU 0" in evidence for evidence in answer.evidence)
    assert any("line 17" in evidence for evidence in answer.evidence)


@pytest.mark.parametrize(
    ("other_gib", "first_other_bytes", "cause"),
    [
        ("2.00", 0, EndCause.NEIGHBOUR),
        ("2.00", 2 * GIB, EndCause.BURST),  # it was there when the engine began to serve
        ("0.10", 0, EndCause.BURST),  # without it the allocation would have fitted, but it is no process
        ("2.00", None, EndCause.BURST),
    ],
)
def test_a_process_that_came_after_the_last_sample_is_a_neighbour(
    other_gib: str, first_other_bytes: int | None, cause: EndCause
) -> None:
    death = DEATH.replace("Including non-", f"Process 77 has {other_gib} GiB memory in use. Including non-")
    _, ending = die(VLLM_0_19 + death)
    gpu = replace(ending.gpus[0], first_other_bytes=first_other_bytes)
    (answer,) = judge_ending(replace(ending, gpus=(gpu,)))

    assert (answer.cause, answer.sureness) == (cause, Sureness.SURE)


def test_a_cause_that_was_only_possible_is_stated_by_the_log() -> None:
    (answer,) = judge(VLLM_0_19 + DEATH, gpus=(card(78),))

    assert (answer.cause, answer.sureness) == (EndCause.BURST, Sureness.SURE)
    assert answer.sentence.startswith("Out of GPU memory in a burst: 3.74 GiB were refused on GPU 0")


def test_what_the_samples_alone_would_have_said_is_said_too() -> None:
    (alone,) = (item for item in judge(None, idle=True) if item.cause is EndCause.IDLE)
    (answer,) = judge(VLLM_0_19 + DEATH, idle=True)

    assert answer.cause is EndCause.BURST
    assert any(alone.sentence[1:-1] in evidence and "contradicts" in evidence for evidence in answer.evidence)


def test_a_likely_cause_of_the_samples_becomes_sure() -> None:
    watch = Watch(gpus=(card(70),))
    for done in range(10, 100, 10):
        watch.look(working(done))
    watch.look(working(110), gpus=(card(79.9),))
    _, ending = die(VLLM_0_19 + DEATH, watch)
    (without,) = (item for item in judge_ending(replace(ending, log=None)) if item.cause is EndCause.BURST)
    (answer,) = judge_ending(ending)

    assert without.sureness is Sureness.LIKELY
    assert (answer.cause, answer.sureness, answer.sentence) == (EndCause.BURST, Sureness.SURE, without.sentence)
    assert "by the samples alone that was likely" in answer.evidence


def test_a_bare_exception_is_evidence_and_no_cause() -> None:
    without = judge(None)
    answers = judge(VLLM_0_19 + STRANGE)

    assert [(item.cause, item.sureness) for item in answers] == [(item.cause, item.sureness) for item in without]
    assert "KeyError" in answers[0].evidence[-1]


def test_a_whole_log_without_an_error_contradicts_a_lack_of_memory() -> None:
    full = (card(79.9),)
    watch = Watch(gpus=full)
    for done in range(10, 200, 10):
        watch.look(working(done))
    _, ending = die(None, watch)
    assert judge_ending(ending)[0].cause is EndCause.BURST

    silent = judge_ending(replace(ending, log=LogEnding(seconds=ending.seconds)))
    assert EndCause.BURST not in [item.cause for item in silent]
    assert any("no error and no shutdown" in evidence for evidence in silent[0].evidence)


def test_the_verdict_has_the_refused_allocation_until_the_engine_serves_again() -> None:
    watch, _ = die(VLLM_0_19 + DEATH)
    log = reading(VLLM_0_19 + DEATH, watch.at)

    def sentence() -> str:
        assert watch.seen is not None
        return judge_snapshot(watch.seen, Values(()))[0].sentence

    for _ in range(20):
        watch.look(REFUSED, processes=(), log=log)
    assert "3.74 GiB were refused on GPU 0" in sentence()
    assert watch.seen is not None
    assert values(derive_refusal(watch.seen), catalog.ENGINE_REFUSED) == {(): round(3.74 * GIB)}
    for done in (10, 20, 30):
        watch.look(working(done, started=BEGAN + 9000), log=log)
    assert "refused" not in sentence()
    assert derive_refusal(watch.seen) == ()


@pytest.mark.parametrize(("text", "reason"), [(VLLM_0_19 + DEATH, ExitReason.OUT_OF_MEMORY), (None, ExitReason.GONE)])
def test_a_stall_just_before_the_exit_is_no_hang_if_the_log_says_that_memory_ran_out(
    text: str | None, reason: ExitReason
) -> None:
    watch = serving(gpus=(card(70),))
    while watch.state_of(working(20)) is not EngineState.STALLED:
        assert watch.at < 10 * STALLED_SECONDS

    _, ending = die(text, watch)

    assert ending.reason is reason
    assert (ending.hung_seconds is None) is (reason is ExitReason.OUT_OF_MEMORY)
