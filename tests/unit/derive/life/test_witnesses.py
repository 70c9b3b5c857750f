"""The page is one witness: what CPU, GPU, connections and the server's other pages make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from tests.unit.derive.life.watch import CORE, LOGIN, REFUSED, SERVER, SILENT, UNSEEN, WORKER, Watch, card, working
from vllm_headroom.derive.life.progress import STALLED_SECONDS, Activity
from vllm_headroom.derive.life.states import (
    ABSENCE,
    STANDSTILL,
    TRANSITIONS,
    AbsenceRow,
    PageAnswer,
    Requests,
    StandstillRow,
    Symptom,
)
from vllm_headroom.model import EnginePage, EngineProcess, Failure, Gpu, ServerReply
from vllm_headroom.vocabulary import EngineState, Reason, ServerAnswer, Source

DOCS: Final = Path(__file__).parents[4] / "docs" / "states.md"

SERVING, UNKNOWN, STALLED, STARTING = (
    EngineState.SERVING,
    EngineState.UNKNOWN,
    EngineState.STALLED,
    EngineState.STARTING,
)
HEALTHY, UNHEALTHY, MUTE, UNCLEAR = (
    ServerReply(answer=answer)
    for answer in (ServerAnswer.HEALTHY, ServerAnswer.UNHEALTHY, ServerAnswer.SILENT, ServerAnswer.UNCLEAR)
)
SERVER_ERROR: Final = Failure(source=Source.ENGINE, reason=Reason.HTTP_STATUS, message="500", http_status=500)
BAD_GATEWAY: Final = replace(SERVER_ERROR, message="502", http_status=502)
OLD_TRACE: Final = replace(SERVER_ERROR, http_status=None)
STEPS: Final = int(3 * STALLED_SECONDS / 5)


class Engine:
    """An engine whose witnesses say at every look what the fields say."""

    def __init__(self, *, is_seen: bool = True) -> None:
        self.watch = Watch(processes=() if is_seen else UNSEEN)
        self.is_seen = is_seen
        self.core_cpu: float | None = 0.0
        self.worker_cpu: float | None = 0.0
        """CPU seconds in a second."""
        self.server_cpu = 0.0
        self.gpu: float | None = 0.0
        self.other_bytes: int | None = None
        self.waiting: int | None = 0
        self.core_state = "S"
        self.server: ServerReply | None = HEALTHY
        self.owed_since: float | None = None
        self._finished = 20
        self._cpu = {"server": 0.0, "core": 0.0, "worker": 0.0}
        for _ in range(STEPS):
            self._finished += 1
            assert self.look(working(self._finished)) is SERVING

    def look(self, page: EnginePage | Failure, after_seconds: float = 5.0) -> EngineState:
        for name, ratio in (("server", self.server_cpu), ("core", self.core_cpu), ("worker", self.worker_cpu)):
            self._cpu[name] += after_seconds * (ratio or 0.0)
        processes: tuple[EngineProcess, ...] | Failure = UNSEEN
        if self.is_seen:
            processes = (
                replace(SERVER, cpu_seconds=self._cpu["server"], waiting_requests=self.waiting),
                replace(CORE, state=self.core_state, cpu_seconds=None if self.core_cpu is None else self._cpu["core"]),
                replace(WORKER, cpu_seconds=None if self.worker_cpu is None else self._cpu["worker"]),
            )
        device = card(70)
        gpu: Gpu = replace(
            device, reading=replace(device.reading, utilization_ratio=self.gpu), other_bytes=self.other_bytes
        )
        return self.watch.look(
            page,
            processes=processes,
            gpus=(gpu,),
            after_seconds=after_seconds,
            server=self.server,
            owed_since=self.owed_since,
        ).state

    def freeze(self, steps: int = STEPS) -> list[EngineState]:
        """Look at a page that shows work and never moves, and return the states."""
        return [self.look(working(self._finished)) for _ in range(steps)]

    def lose(self, page: Failure, steps: int = STEPS) -> list[EngineState]:
        return [self.look(page) for _ in range(steps)]


def engine(*, is_seen: bool = True, **witnesses: Any) -> Engine:
    new_engine = Engine(is_seen=is_seen)
    for name, value in witnesses.items():
        assert hasattr(new_engine, name)
        setattr(new_engine, name, value)
    return new_engine


@pytest.mark.parametrize(
    ("witnesses", "state"),
    [
        ({}, SERVING),
        ({"gpu": 1.0, "worker_cpu": 1.0, "core_cpu": 1.0}, STALLED),
        ({"gpu": 1.0}, STALLED),
        ({"core_cpu": 1.0}, STALLED),
        ({"worker_cpu": 1.0}, STALLED),
        ({"waiting": 3}, STALLED),
        ({"core_state": "T"}, STALLED),
        ({"owed_since": 0.0}, STALLED),
        ({"server": ServerReply(answer=ServerAnswer.HEALTHY, requests=3.0)}, STALLED),
        ({"server": UNHEALTHY}, STALLED),
        ({"server": MUTE}, STALLED),
        ({"server": UNCLEAR}, UNKNOWN),
        ({"server": None}, STALLED),
        ({"waiting": None}, UNKNOWN),
        ({"gpu": None}, UNKNOWN),
        ({"core_cpu": None}, UNKNOWN),
        ({"core_cpu": None, "gpu": None}, STALLED),
        ({"gpu": 1.0, "other_bytes": 9 * 2**30}, UNKNOWN),
        ({"gpu": 0.05, "core_cpu": 0.02}, SERVING),
    ],
    ids=str,
)
def test_a_page_that_shows_work_and_no_progress(witnesses: dict[str, Any], state: EngineState) -> None:
    witnessed_engine = engine(**witnesses)

    states = witnessed_engine.freeze()

    assert states[:11] == [SERVING] * 11
    assert states[16:] == [state] * (STEPS - 16)
    assert witnessed_engine.watch.seen is not None
    assert witnessed_engine.watch.seen.engine_status is not None
    assert witnessed_engine.watch.seen.engine_status.are_gauges_doubted is (state is not STALLED)
    assert witnessed_engine.look(working(99)) is SERVING


def test_a_hang_is_stalled_within_a_minute_where_activity_agrees() -> None:
    assert engine(gpu=1.0, worker_cpu=1.0).freeze(14)[-1] is STALLED


def test_nothing_is_due_while_the_gauges_are_stale() -> None:
    stale = engine()
    stale.freeze()

    assert stale.watch.seen is not None
    assert stale.watch.seen.engine_status is not None
    assert stale.watch.seen.engine_status.progress_age_seconds is None


def test_unseen_processes_and_gpus_leave_the_page() -> None:
    assert engine(is_seen=False, gpu=None).freeze()[-1] is STALLED
    assert engine(is_seen=False, gpu=0.0).freeze()[-1] is UNKNOWN
    assert engine(is_seen=False, gpu=1.0).freeze()[-1] is STALLED


def test_a_client_that_comes_to_a_hung_idle_core_reveals_it() -> None:
    hung = engine()
    assert hung.freeze()[-1] is SERVING

    hung.waiting = 1
    states = hung.freeze()

    assert states[0] is UNKNOWN, "it may be answered at once"
    assert states[4:] == [STALLED] * (STEPS - 4)


def test_workers_that_spin_without_work_prove_nothing_by_their_cpu_time() -> None:
    spinning = engine(worker_cpu=1.0)
    for _ in range(STEPS):
        assert spinning.look(working(99, running=0.0)) is SERVING

    assert {spinning.look(working(99)) for _ in range(12)} == {SERVING}
    assert {spinning.look(working(99)) for _ in range(STEPS)} == {UNKNOWN}
    spinning.gpu = 1.0
    assert [spinning.look(working(99)) for _ in range(12)][-1] is STALLED


def test_short_requests_between_two_looks_are_no_spinning_without_work() -> None:
    served = engine(core_cpu=1.0)
    for finished in range(100, 100 + STEPS):
        served.look(working(finished, running=0.0))

    served.core_cpu = 0.0
    assert {served.look(working(200)) for _ in range(STEPS)} == {SERVING}


@pytest.mark.parametrize(
    ("page", "witnesses", "state"),
    [
        (SERVER_ERROR, {}, UNKNOWN),
        (SERVER_ERROR, {"server": None}, UNKNOWN),
        (OLD_TRACE, {"server": None}, UNKNOWN),
        (SERVER_ERROR, {"server": UNCLEAR}, UNKNOWN),
        (SERVER_ERROR, {"server": MUTE}, UNKNOWN),
        (SERVER_ERROR, {"server": UNHEALTHY}, STALLED),
        (SERVER_ERROR, {"server": UNHEALTHY, "gpu": 0.9}, UNKNOWN),
        (SERVER_ERROR, {"server": UNHEALTHY, "server_cpu": 0.5}, UNKNOWN),
        (BAD_GATEWAY, {}, UNKNOWN),
        (BAD_GATEWAY, {"server": UNHEALTHY}, STALLED),
        (SILENT, {}, UNKNOWN),
        (SILENT, {"server": None}, STALLED),
        (SILENT, {"server": MUTE}, STALLED),
        (SILENT, {"server": MUTE, "gpu": 1.0, "worker_cpu": 1.0}, STALLED),
        (SILENT, {"server": UNCLEAR}, UNKNOWN),
        (SILENT, {"server": UNHEALTHY}, STALLED),
        (REFUSED, {"server": None}, STALLED),
        (REFUSED, {"server": None, "server_cpu": 0.5}, UNKNOWN),
        (LOGIN, {"server": None}, UNKNOWN),
    ],
    ids=str,
)
def test_a_page_that_fails_after_it_was_given(page: Failure, witnesses: dict[str, Any], state: EngineState) -> None:
    states = engine(**witnesses).lose(page)

    assert states[:12] == [SERVING] * 12
    assert set(states[12:]) == {state}


def test_a_server_that_spins_and_passes_its_health_check_is_unknown() -> None:
    assert set(engine(server_cpu=1.0).lose(SILENT, 120)[12:]) == {UNKNOWN}
    assert engine(server_cpu=1.0, server=MUTE).lose(SILENT, 120)[-1] is STALLED


@pytest.mark.parametrize(
    ("page", "server", "state"),
    [
        (SERVER_ERROR, None, UNKNOWN),
        (SERVER_ERROR, HEALTHY, UNKNOWN),
        (SERVER_ERROR, UNHEALTHY, UNKNOWN),
        (BAD_GATEWAY, None, STARTING),
        (BAD_GATEWAY, UNHEALTHY, STARTING),
        (BAD_GATEWAY, HEALTHY, UNKNOWN),
        (SILENT, None, STARTING),
        (SILENT, MUTE, STARTING),
        (SILENT, HEALTHY, UNKNOWN),
        (REFUSED, None, STARTING),
        (LOGIN, None, UNKNOWN),
    ],
)
def test_a_page_that_was_never_given(page: Failure, server: ServerReply | None, state: EngineState) -> None:
    watch = Watch()

    assert {watch.state_of(page, server=server) for _ in range(STEPS)} == {state}


def test_no_process_is_down_whatever_answers() -> None:
    watch = Watch()
    watch.state_of(working(5))

    assert watch.state_of(SERVER_ERROR, processes=(), server=HEALTHY) is EngineState.DOWN


WORDS: Final[dict[object, str]] = {
    None: "any",
    True: "yes",
    False: "no",
    Requests.WAITING: "wait",
    Requests.NONE: "none waits",
    Activity.BUSY: "busy",
    Activity.IDLE: "both idle",
    Activity.UNKNOWN: "not visible",
    PageAnswer.SILENT: "silent, 502 to 504",
    PageAnswer.ERROR: "an error, as 500",
    PageAnswer.UNREADABLE: "unreadable",
}


def list_servers(servers: tuple[ServerAnswer | None, ...] | None) -> str:
    if servers is None:
        return "any"
    return " or ".join("not requested" if server is None else str(server) for server in servers)


def name_state(symptom: Symptom) -> str:
    (state,) = {row.next_state for row in TRANSITIONS if row.symptom is symptom}
    return f"`{state}`"


def describe_standstill(row: StandstillRow) -> str:
    cells = (WORDS[row.has_hang_sign], WORDS[row.requests], WORDS[row.activity], list_servers(row.servers))
    return f"| {' | '.join((*cells, name_state(row.symptom), row.why))} |"


def describe_absence(row: AbsenceRow) -> str:
    cells = (WORDS[row.was_ready], WORDS[row.answer], list_servers(row.servers), WORDS[row.is_computing])
    return f"| {' | '.join((*cells, name_state(row.symptom), row.why))} |"


@pytest.mark.parametrize(
    "rows",
    [[describe_standstill(row) for row in STANDSTILL], [describe_absence(row) for row in ABSENCE]],
    ids=["standstill", "absence"],
)
def test_the_document_has_the_rows_of_the_table(rows: list[str]) -> None:
    assert "\n".join(rows) in DOCS.read_text(encoding="utf-8")


def test_no_row_that_restarts_an_engine_rests_on_the_page_where_more_is_known() -> None:
    for row in STANDSTILL:
        if row.symptom is Symptom.NO_PROGRESS:
            assert {row.has_hang_sign, row.requests, row.activity, row.servers} != {None}
    for case in ABSENCE:
        if case.symptom is Symptom.PAGE_AWAY and case.answer is PageAnswer.ERROR:
            assert case.servers == (ServerAnswer.UNHEALTHY,)
