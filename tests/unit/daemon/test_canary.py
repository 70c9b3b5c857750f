"""When a canary asks, and since when it says that it waits."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.logs import capture_logs
from tests.samples import engine, failure, page, snapshot
from vllm_headroom.daemon.canary import CANARY_RETRY_SECONDS, Canary
from vllm_headroom.model import EnginePage, EngineReading, EngineStatus, Failure, HangSign, Snapshot
from vllm_headroom.vocabulary import EngineState, Source

INTERVAL_SECONDS = 300.0
RESTING = engine(running=0.0, waiting=0.0, awake=True)


class Clock:
    """Stands still but for waits, which take no time; the last of them never ends."""

    def __init__(self, waits: int = 0) -> None:
        self.now = 1000.0
        self.waits: list[float] = []
        self._left = waits

    def time(self) -> float:
        raise AssertionError

    def monotonic(self) -> float:
        return self.now

    async def sleep_until(self, monotonic_seconds: float) -> None:
        if not self._left:
            raise asyncio.CancelledError
        self._left -= 1
        self.waits.append(monotonic_seconds - self.now)
        self.now = monotonic_seconds


class Engine:
    """Answers as instructed, and counts."""

    def __init__(self, answers: list[bool | None]) -> None:
        self.answers = answers
        self.models: list[str] = []

    async def ask(self, model_name: str) -> bool | None:
        self.models.append(model_name)
        return self.answers.pop(0)


def test_a_request_that_raises_is_no_silence_of_the_engine() -> None:
    clock = Clock(waits=3)

    async def fail(_model_name: str) -> bool | None:
        raise IndexError("range")

    canary = Canary(fail, INTERVAL_SECONDS, clock, pause_seconds=INTERVAL_SECONDS)
    with capture_logs() as lines, pytest.raises(asyncio.CancelledError):
        asyncio.run(canary.run(make_snapshot))

    assert canary.unanswered_since_seconds is None
    assert clock.waits == [INTERVAL_SECONDS] * 3, "it goes on"
    assert [line["log_level"] for line in lines] == ["error"]


def make_snapshot(*engines: EngineReading, state: EngineState = EngineState.SERVING) -> Snapshot:
    return lived(page(*(engines or (RESTING,))), state)


def lived(engines: EnginePage | Failure, state: EngineState = EngineState.SERVING) -> Snapshot:
    return replace(snapshot(engines=engines), engine_status=EngineStatus(state=state))


def turned(canary: Canary, *snapshots: Snapshot | None) -> None:
    for tick_snapshot in snapshots:
        asyncio.run(canary.send(tick_snapshot))


def test_an_idle_engine_that_may_hang_is_asked() -> None:
    fake_engine = Engine([True])
    doubted = EngineStatus(state=EngineState.UNKNOWN, hang_signs=(HangSign.STUCK,))

    turned(
        Canary(fake_engine.ask, INTERVAL_SECONDS, Clock(), pause_seconds=15),
        replace(make_snapshot(), engine_status=doubted),
    )

    assert fake_engine.models == ["m"]


@pytest.mark.parametrize("state", [EngineState.SERVING, EngineState.UNKNOWN])
def test_an_engine_with_gauges_that_nothing_supports_is_asked(state: EngineState) -> None:
    target = Engine([True])
    doubted = EngineStatus(state=state, are_gauges_doubted=True)
    shown = replace(snapshot(engines=page(engine(running=106.0, waiting=15.0))), engine_status=doubted)

    asyncio.run(Canary(target.ask, INTERVAL_SECONDS, Clock(), pause_seconds=15).send(shown))

    assert target.models == ["m"]


@pytest.mark.parametrize("state", [EngineState.SERVING, EngineState.STALLED])
@pytest.mark.parametrize("awake", [True, None])
def test_an_engine_that_is_awake_and_idle_is_asked(state: EngineState, awake: bool | None) -> None:  # noqa: FBT001
    fake_engine = Engine([True])

    turned(
        Canary(fake_engine.ask, INTERVAL_SECONDS, Clock(), pause_seconds=15),
        make_snapshot(replace(RESTING, awake=awake), state=state),
    )

    assert fake_engine.models == ["m"]


@pytest.mark.parametrize(
    "other_snapshot",
    [
        None,
        make_snapshot(replace(RESTING, running=1.0)),
        make_snapshot(replace(RESTING, waiting=1.0)),
        make_snapshot(RESTING, replace(RESTING, engine="1", running=1.0)),
        make_snapshot(replace(RESTING, running=None)),
        make_snapshot(replace(RESTING, waiting=None)),
        make_snapshot(replace(RESTING, awake=False)),
        make_snapshot(replace(RESTING, model_name="")),
        lived(page()),
        lived(failure(Source.ENGINE)),
        replace(make_snapshot(), engine_status=None),
        *(
            make_snapshot(state=state)
            for state in EngineState
            if state not in (EngineState.SERVING, EngineState.STALLED)
        ),
    ],
)
def test_any_other_is_not_and_owes_nothing(other_snapshot: Snapshot | None) -> None:
    fake_engine = Engine([False])
    canary = Canary(fake_engine.ask, INTERVAL_SECONDS, Clock(), pause_seconds=15)
    turned(canary, make_snapshot())
    assert canary.unanswered_since_seconds == 1000.0

    turned(canary, other_snapshot)

    assert fake_engine.models == ["m"]
    assert canary.unanswered_since_seconds is None


def test_a_request_is_owed_an_answer_from_when_it_is_asked() -> None:
    async def waiting() -> tuple[float | None, float | None]:
        answer = asyncio.Future[bool | None]()

        async def ask(_: str) -> bool | None:
            return await answer

        canary = Canary(ask, INTERVAL_SECONDS, Clock(), pause_seconds=15)
        turn = asyncio.create_task(canary.send(make_snapshot()))
        await asyncio.sleep(0)
        pending = canary.unanswered_since_seconds
        answer.set_result(True)
        await turn
        return pending, canary.unanswered_since_seconds

    assert asyncio.run(waiting()) == (1000.0, None)


def test_what_is_not_answered_is_asked_again_soon_and_owed_since_the_first_time() -> None:
    clock, fake_engine = Clock(waits=5), Engine([True, False, False, True, None])
    canary, owed = Canary(fake_engine.ask, INTERVAL_SECONDS, clock, pause_seconds=15), list[float | None]()

    def newest() -> Snapshot:
        owed.append(canary.unanswered_since_seconds)
        return make_snapshot()

    with capture_logs() as lines, pytest.raises(asyncio.CancelledError):
        asyncio.run(canary.run(newest))

    assert clock.waits == [
        INTERVAL_SECONDS,
        INTERVAL_SECONDS,
        CANARY_RETRY_SECONDS,
        CANARY_RETRY_SECONDS,
        INTERVAL_SECONDS,
    ]
    assert owed == [None, None, 1600.0, 1600.0, None]
    assert [line["event"].split(":")[0] for line in lines] == [
        "canary is not answered",
        "canary is answered",
        "canary cannot be asked",
    ]


def test_while_the_daemon_stood_still_nobody_owed_it_an_answer() -> None:
    clock, fake_engine = Clock(), Engine([False])
    canary = Canary(fake_engine.ask, INTERVAL_SECONDS, clock, pause_seconds=15)
    turned(canary, make_snapshot())
    clock.now += 5
    canary.note_tick()
    assert canary.unanswered_since_seconds == 1000.0

    clock.now += 300  # stopped, and instructed to go on
    canary.note_tick()
    assert canary.unanswered_since_seconds == 1300.0
    clock.now += 5
    canary.note_tick()
    assert canary.unanswered_since_seconds == 1300.0
