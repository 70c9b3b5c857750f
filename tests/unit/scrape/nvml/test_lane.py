"""Calls that are made in one go on NVML's thread, one of which may hang."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from vllm_headroom.scrape.nvml.reader import MIN_CALL_SECONDS, Lane, read_loop_seconds

FOR_EVER = 600.0
SHORT_SECONDS = 0.2
PROMPTLY_SECONDS = 20.0


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Let every call that hangs on this return at the end."""
    event = threading.Event()
    yield event
    event.set()


def call_all(lane: Lane, limit_seconds: float, **calls: Callable[[], object]) -> dict[str, object]:
    async def ask() -> dict[str, object]:
        return dict(await lane.make_calls(calls, limit_seconds, read_loop_seconds() + FOR_EVER))

    return asyncio.run(ask())


def test_all_calls_are_made_on_one_thread_and_their_errors_are_outcomes() -> None:
    lane, error = Lane(), LookupError()

    def broken() -> object:
        raise error

    answers = call_all(lane, FOR_EVER, first=threading.get_ident, second=broken, third=threading.get_ident)
    lane.stop()

    assert answers["second"] is error
    assert answers["first"] == answers["third"] != threading.get_ident()


def test_after_one_that_hangs_the_others_are_made_once_and_elsewhere(released: threading.Event) -> None:
    lane, calls = Lane(), []

    def note(name: str) -> Callable[[], None]:
        return lambda: calls.append((name, threading.get_ident()))

    answers = call_all(lane, SHORT_SECONDS, first=note("first"), hung=released.wait, last=note("last"))

    assert answers.keys() == {"first", "last"}
    assert lane.stuck_subjects == {"hung"}

    released.set()
    until(lambda: not lane.stuck_subjects)
    lane.stop()

    (_, first_thread), (_, last_thread) = calls  # the thread that was given up makes no call when it goes on
    assert [name for name, _ in calls] == ["first", "last"]
    assert first_thread != last_thread


def test_calls_that_each_return_in_time_may_take_longer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, wait = Lane(), asyncio.wait
    begun_calls, leave = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]

    async def over(futures: tuple[asyncio.Future[None]], timeout: float) -> object:  # noqa: ASYNC109 - as asyncio has it
        """Let the time of one call be over just when it has returned."""
        place = sum(event.is_set() for event in leave)
        leave[place].set()
        if place == len(leave) - 1:
            return await wait(futures, timeout=timeout)
        return await asyncio.to_thread(begun_calls[place + 1].wait, PROMPTLY_SECONDS)

    def slow(place: int) -> bool:
        begun_calls[place].set()
        return leave[place].wait(PROMPTLY_SECONDS)

    monkeypatch.setattr(asyncio, "wait", over)
    answers = call_all(lane, FOR_EVER, first=lambda: slow(0), second=lambda: slow(1), third=lambda: slow(2))
    lane.stop()

    assert answers == {"first": True, "second": True, "third": True}


def test_without_time_nothing_is_asked() -> None:
    lane, calls = Lane(), []

    async def ask() -> dict[str, Exception | None]:
        return await lane.make_calls(
            {"late": lambda: calls.append("late")}, FOR_EVER, read_loop_seconds() + MIN_CALL_SECONDS / 2
        )

    assert asyncio.run(ask()) == {}
    assert calls == []
    assert not lane.stuck_subjects


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PROMPTLY_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
