"""A core that dies before its server: the stall and the exit that follow within seconds are one end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import read_data
from tests.unit.commands.postmortem.test_postmortem import Run, run
from tests.unit.daemon.test_flight import flight, header, step, take_snapshot, the_incident
from tests.unit.derive.life.test_lives import killed
from tests.unit.derive.life.watch import CORE, REFUSED, SERVER, UNSEEN, WHOLE, WORKER, Watch, card, working
from vllm_headroom.daemon.flight import Flight
from vllm_headroom.model import EnginePage, EngineProcess, Failure, HostMemory
from vllm_headroom.vocabulary import ExitReason, IncidentKind

__all__ = ["run"]

FREE, HELD, FULL = card(0.0), card(70.0), card(79.9)


class Recorded:
    """An engine at work, as a daemon records it."""

    def __init__(self, folder: Path, host: HostMemory | None = None) -> None:
        self.folder, self.watch = folder, Watch(gpus=(HELD,), host=host)
        self.daemon: Flight = flight(folder)
        for done in range(24):
            self.look(working(20 + done), after_seconds=30.0)

    def look(self, page: EnginePage | Failure, **sight: object) -> None:
        self.watch.look(page, **sight)  # type: ignore[arg-type]
        step(self.daemon, take_snapshot(self.watch))

    def judge(self, run: Run) -> dict[str, object]:
        status, out, _ = run(the_incident(self.folder), "--json")
        assert status == 0
        report: dict[str, object] = read_data(out)
        return report


@pytest.mark.parametrize("remaining", [(SERVER,), (SERVER, WORKER)])
@pytest.mark.parametrize("seconds", [1.0, 5.0, 14.0])
def test_a_kill_of_the_core_is_the_cause_though_the_page_answered_for_seconds(
    run: Run, tmp_path: Path, seconds: float, remaining: tuple[EngineProcess, ...]
) -> None:
    engine = Recorded(tmp_path, killed(0))
    engine.look(working(44), processes=remaining, gpus=(FREE,), host=killed(1))
    engine.look(REFUSED, processes=(), after_seconds=seconds)

    diagnoses = engine.judge(run)
    assert [event["what"] for event in header(the_incident(tmp_path))["events"]] == ["stalled", "ended"]
    assert (diagnoses["cause"], diagnoses["sure"], diagnoses["reason"]) == ("killed_by_kernel", "sure", "oom_killed")
    for role, is_left in (("engine core", False), ("worker", WORKER in remaining), ("api server", True)):
        assert (f"{role} exited before the others" in str(diagnoses["evidence"])) is not is_left


@pytest.mark.parametrize("knows_processes", [True, False])
def test_a_gpu_that_was_full_is_the_cause_though_the_page_answered_for_seconds(
    run: Run, tmp_path: Path, *, knows_processes: bool
) -> None:
    engine = Recorded(tmp_path)
    engine.look(working(44), gpus=(FULL,))
    engine.look(working(44), gpus=(FREE,), processes=(SERVER,), after_seconds=2.0)
    engine.look(REFUSED, processes=() if knows_processes else UNSEEN, after_seconds=3.0)
    engine.look(REFUSED, processes=())

    diagnoses = engine.judge(run)
    assert (diagnoses["cause"], diagnoses["reason"]) == ("out_of_memory_burst", "out_of_memory")


def test_a_step_that_stood_still_for_a_minute_before_the_gpu_was_full_is_no_hang(run: Run, tmp_path: Path) -> None:
    engine = Recorded(tmp_path)
    engine.look(working(43), gpus=(FULL,), after_seconds=61.0)
    engine.look(REFUSED, processes=(), gpus=(FREE,))

    diagnoses = engine.judge(run)
    assert [event["what"] for event in header(the_incident(tmp_path))["events"]] == ["stalled", "ended"]
    assert diagnoses["cause"] == "out_of_memory_burst"
    assert "hang" not in {diagnosis["cause"] for diagnosis in diagnoses["also"]}  # type: ignore[attr-defined]


def test_the_page_of_the_sidecar_names_the_end_and_not_the_stall(tmp_path: Path) -> None:
    engine = Recorded(tmp_path, killed(0))
    engine.look(working(44), processes=(SERVER,), gpus=(FREE,), host=killed(1))
    assert engine.daemon.last is not None
    assert engine.daemon.last.kind == IncidentKind.STALLED

    engine.look(REFUSED, processes=(), after_seconds=3.0)

    assert (engine.daemon.last.kind, engine.daemon.last.reason) == (IncidentKind.ENDED, ExitReason.OOM_KILLED)


def test_an_end_that_came_later_or_for_no_known_reason_leaves_the_stall(run: Run, tmp_path: Path) -> None:
    late, recorded = Recorded(tmp_path / "late", killed(0)), Recorded(tmp_path / "gone", killed(0))
    late.look(working(44), processes=(SERVER,), gpus=(FREE,), host=killed(1))
    late.look(working(44), after_seconds=16.0)
    late.look(REFUSED, processes=())
    recorded.look(working(44), processes=(SERVER, CORE))
    recorded.look(REFUSED, processes=())

    assert [late.judge(run)["what"], recorded.judge(run)["what"]] == ["stalled", "stalled"]
    assert recorded.judge(run)["cause"] == "crash"


def test_a_stall_during_which_proc_fails_is_one_incident(tmp_path: Path) -> None:
    engine = Recorded(tmp_path)
    engine.look(REFUSED)
    for _ in range(13):
        engine.look(REFUSED)
    for _ in range(80):
        engine.look(REFUSED, processes=UNSEEN)
    for _ in range(13):
        engine.look(REFUSED, processes=WHOLE)

    assert [event["what"] for event in header(the_incident(tmp_path))["events"]] == ["stalled"]
