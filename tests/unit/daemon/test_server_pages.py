"""When the server's other pages are requested, and for how long an answer counts."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.logs import capture_logs
from tests.samples import engine, page, snapshot
from tests.unit.daemon.test_canary import Clock
from vllm_headroom.daemon.server_pages import ROUND_SECONDS, ServerPages
from vllm_headroom.model import EngineStatus, Failure, ServerReply, Snapshot
from vllm_headroom.vocabulary import EngineState, Reason, ServerAnswer, Source

HEALTHY, SILENT, UNCLEAR = ServerAnswer.HEALTHY, ServerAnswer.SILENT, ServerAnswer.UNCLEAR


class Server:
    """Gives these answers, and healthy from then on."""

    def __init__(self, *answers: ServerAnswer) -> None:
        self.answers = [*answers]
        self.rounds = 0

    async def ask(self) -> ServerReply:
        self.rounds += 1
        return ServerReply(answer=self.answers.pop(0) if self.answers else HEALTHY)


def failed(reason: Reason) -> Snapshot:
    return snapshot(engines=Failure(source=Source.ENGINE, reason=reason, message="it failed"))


def answering(age_seconds: float | None, *, is_doubted: bool = False) -> Snapshot:
    status = EngineStatus(state=EngineState.SERVING, progress_age_seconds=age_seconds, are_gauges_doubted=is_doubted)
    return replace(snapshot(engines=page(engine(running=1.0))), engine_status=status)


def answers(server: Server, *snapshots: Snapshot | None) -> list[ServerAnswer | None]:
    pages, latest_answers = ServerPages(server.ask, Clock()), list[ServerAnswer | None]()
    for tick_snapshot in snapshots:
        asyncio.run(pages.send(tick_snapshot))
        latest_answers.append(None if pages.latest is None else pages.latest.answer)
    return latest_answers


@pytest.mark.parametrize("reason", Reason)
def test_only_a_page_behind_which_a_server_may_run_makes_it_ask(reason: Reason) -> None:
    server = Server()

    answers(server, failed(reason))

    assert server.rounds == (reason in (Reason.HTTP_STATUS, Reason.TIMEOUT, Reason.INCOMPLETE))


@pytest.mark.parametrize(
    ("newest_snapshot", "is_asked"),
    [
        (None, False),
        (answering(None), False),
        (answering(19.0), False),
        (answering(20.0), True),
        (answering(None, is_doubted=True), True),
        (replace(answering(60.0), engine_status=None), False),
    ],
)
def test_a_page_that_answers_makes_it_ask_only_without_progress(
    newest_snapshot: Snapshot | None, *, is_asked: bool
) -> None:
    server = Server()

    assert answers(server, newest_snapshot) == [HEALTHY if is_asked else None]
    assert server.rounds == is_asked


def test_an_answer_is_forgotten_once_the_page_is_enough() -> None:
    assert answers(Server(), failed(Reason.TIMEOUT), answering(0.0)) == [HEALTHY, None]


def test_a_request_that_raises_is_tried_again_and_shows_nothing() -> None:
    async def fail() -> ServerReply:
        raise IndexError("range")

    clock = Clock(waits=3)
    pages = ServerPages(fail, clock)
    pages.latest = ServerReply(answer=HEALTHY)
    with capture_logs() as lines, pytest.raises(asyncio.CancelledError):
        asyncio.run(pages.run(lambda: failed(Reason.TIMEOUT)))

    assert pages.latest is None
    assert clock.waits == [ROUND_SECONDS] * 3
    assert [line["log_level"] for line in lines] == ["error"]


def test_one_late_answer_is_no_silence() -> None:
    late = failed(Reason.TIMEOUT)
    server = Server(SILENT, SILENT, HEALTHY, SILENT)

    assert answers(server, late, late, late, late) == [UNCLEAR, SILENT, HEALTHY, UNCLEAR]


def test_it_asks_every_ten_seconds_at_most_and_logs_a_change() -> None:
    clock, server = Clock(waits=4), Server(HEALTHY, HEALTHY, ServerAnswer.UNHEALTHY)

    with capture_logs() as lines, pytest.raises(asyncio.CancelledError):
        asyncio.run(ServerPages(server.ask, clock).run(lambda: failed(Reason.HTTP_STATUS)))

    assert clock.waits == [ROUND_SECONDS] * 4
    assert server.rounds == 4
    assert [line["answer"] for line in lines] == ["healthy", "unhealthy", "healthy"]
