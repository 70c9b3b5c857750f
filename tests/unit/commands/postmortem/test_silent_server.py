"""A server that gives no page any more and runs on: it hangs, or was instructed to end."""

from __future__ import annotations

from tests.samples import snapshot
from tests.unit.derive.life.watch import BEGAN, CORE, REFUSED, SERVER, SILENT, STEP_SECONDS, WHOLE, card, working
from vllm_headroom.model import Diagnosis, EnginePage, EngineProcess, Failure
from vllm_headroom.vocabulary import EndCause, Sureness
from vllm_headroom_tools.postmortem.report import EndFollower, judge_end

Look = tuple[EnginePage | Failure, tuple[EngineProcess, ...]]
AT_WORK: list[Look] = [(working(20.0 + done), WHOLE) for done in range(12)]


def diagnose_looks(looks: list[Look]) -> Diagnosis:
    follower = EndFollower()
    for turn, (engines, processes) in enumerate(looks):
        gpu = card(70 if CORE in processes else 0)
        follower.step(snapshot(at=BEGAN + STEP_SECONDS * turn, engines=engines, processes=processes, gpus=(gpu,)))
    return judge_end(follower.ending)[0]


def test_a_server_that_waits_without_its_core_behind_a_closed_port_was_asked_to_end() -> None:
    """So vLLM 0.32 does on SIGTERM, for as long as its clients hold their connections."""
    waits: list[Look] = [*AT_WORK, *[(REFUSED, (SERVER,))] * 14]

    for diagnosis in (diagnose_looks(waits), diagnose_looks([*waits, (REFUSED, ())])):
        assert (diagnosis.cause, diagnosis.sureness) == (EndCause.STOPPED, Sureness.LIKELY)
        assert diagnosis.sentence.startswith("A requested shutdown: ")


def test_a_server_that_follows_its_core_within_seconds_crashed() -> None:
    diagnoses = diagnose_looks([*AT_WORK, (working(32.0), (SERVER,)), (REFUSED, (SERVER,)), (REFUSED, ())])

    assert (diagnoses.cause, diagnoses.sureness) == (EndCause.CRASH, Sureness.LIKELY)


def test_a_whole_server_without_a_page_hangs_since_its_page_was_last_seen() -> None:
    diagnoses = diagnose_looks([*AT_WORK, *[(SILENT, WHOLE)] * 13])

    assert diagnoses.cause is EndCause.HANG
    assert diagnoses.sentence.startswith("A hang: the engine had work and made no progress for 1 min ")
