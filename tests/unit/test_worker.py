import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from vllm_headroom import worker as worker_module
from vllm_headroom.worker import SharedCaller, SharedThread, Worker

DEADLINE_SECONDS = 20.0
SHORT_SECONDS = 0.05


@pytest.fixture
def worker() -> Iterator[Worker[object]]:
    worker: Worker[object] = Worker("test")
    yield worker
    worker.stop()
    wait_for(lambda: not worker.is_alive)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def give_up(worker: Worker[object], released: threading.Event) -> None:
    """Let a call that has begun time out; it is out until `released`."""
    has_begun = threading.Event()

    def hang() -> bool:
        has_begun.set()
        return released.wait()

    async with asyncio.timeout(DEADLINE_SECONDS):
        while not has_begun.is_set():  # on a busy machine the time may be over before the call's turn
            with pytest.raises(TimeoutError):
                await worker.call(hang, SHORT_SECONDS)


async def answer(worker: Worker[object] | SharedCaller[object], value: str) -> object:
    """Return what a call gives once the worker takes calls again."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            return await worker.call(lambda: value, DEADLINE_SECONDS)
        await asyncio.sleep(0.01)
    return None


def test_it_returns_what_the_function_returns_on_its_own_thread(worker: Worker[object]) -> None:
    names = [asyncio.run(worker.call(lambda: threading.current_thread().name, DEADLINE_SECONDS)) for _ in range(2)]

    assert names == ["test", "test"]


def test_it_raises_what_the_function_raises(worker: Worker[object]) -> None:
    def broken() -> object:
        raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(worker.call(broken, DEADLINE_SECONDS))


def test_a_call_that_takes_too_long_is_dropped_and_the_next_one_answered(worker: Worker[object]) -> None:
    released = threading.Event()

    async def steps() -> None:
        await give_up(worker, released)
        released.set()
        assert await answer(worker, "next") == "next"

    asyncio.run(steps())


def test_a_call_that_timed_out_before_its_turn_is_never_made(worker: Worker[object]) -> None:
    released, calls = threading.Event(), []

    async def steps() -> None:
        first_task = asyncio.create_task(worker.call(released.wait, DEADLINE_SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await worker.call(lambda: calls.append("second"), SHORT_SECONDS)
        released.set()
        assert await first_task is True
        await worker.call(lambda: calls.append("third"), DEADLINE_SECONDS)

    asyncio.run(steps())

    assert calls == ["third"]


def test_while_a_call_that_was_given_up_is_out_others_are_refused_at_once(worker: Worker[object]) -> None:
    released, calls = threading.Event(), []

    async def steps() -> None:
        await give_up(worker, released)
        for _ in range(1000):  # each would wait for its whole time if it were not refused
            with pytest.raises(TimeoutError):
                await worker.call(lambda: calls.append("refused"), DEADLINE_SECONDS)
        released.set()
        assert await answer(worker, "next") == "next"

    asyncio.run(steps())

    assert calls == []


def test_a_call_whose_caller_was_cancelled_counts_as_given_up(worker: Worker[object]) -> None:
    has_begun, released = threading.Event(), threading.Event()

    def hang() -> bool:
        has_begun.set()
        return released.wait()

    async def steps() -> None:
        first_task = asyncio.create_task(worker.call(hang, DEADLINE_SECONDS))
        assert await asyncio.to_thread(has_begun.wait, DEADLINE_SECONDS)
        first_task.cancel()
        await asyncio.wait([first_task])
        with pytest.raises(TimeoutError):
            await worker.call(lambda: "second", DEADLINE_SECONDS)
        released.set()

    asyncio.run(steps())


def test_it_serves_a_new_loop_after_the_one_it_answered_to_has_closed(worker: Worker[object]) -> None:
    released = threading.Event()
    asyncio.run(give_up(worker, released))
    released.set()

    assert asyncio.run(answer(worker, "answer")) == "answer"


def test_a_stopped_worker_runs_until_its_call_returns() -> None:
    worker: Worker[object] = Worker("test")
    released = threading.Event()
    asyncio.run(give_up(worker, released))
    worker.stop()
    assert worker.is_alive

    released.set()
    wait_for(lambda: not worker.is_alive)


def test_the_process_ends_while_a_call_hangs() -> None:
    script = (
        "import asyncio, threading\n"
        "from vllm_headroom.worker import Worker\n"
        "async def main():\n"
        "    try:\n"
        "        await Worker('test').call(threading.Event().wait, 0.1)\n"
        "    except TimeoutError:\n"
        "        print('timed out')\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )

    assert process.stdout == "timed out\n"


def test_a_thread_that_cannot_be_started_is_an_error_of_that_call_and_tried_again_at_the_next(
    worker: Worker[object],
) -> None:
    previous_size = threading.stack_size(2**47)  # more than there are addresses: the kernel refuses it
    try:
        with pytest.raises(OSError, match="no thread can be started"):
            asyncio.run(worker.call(lambda: None, DEADLINE_SECONDS))
    finally:
        threading.stack_size(previous_size)

    assert asyncio.run(worker.call(lambda: "made", DEADLINE_SECONDS)) == "made"


def test_the_thread_of_a_worker_that_nobody_has_any_more_ends() -> None:
    worker = Worker[int]("forgotten")
    assert asyncio.run(worker.call(lambda: 1, 30)) == 1
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "forgotten")

    del worker
    gc.collect()

    thread.join(30)
    assert not thread.is_alive()


class TestSharedThread:
    """Several callers on one thread."""

    def test_the_calls_of_all_callers_are_made_one_after_another_on_one_thread(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_module, "TURN_SECONDS", DEADLINE_SECONDS)  # however busy the machine is
        running: list[int] = []

        def name_thread(number: int) -> str:
            running.append(number)
            assert running == [number]
            running.pop()
            return threading.current_thread().name

        async def call_all() -> list[object]:
            thread = SharedThread("shared")
            callers: list[SharedCaller[object]] = [SharedCaller(thread) for _ in range(20)]
            calls = [caller.call(partial(name_thread, n), DEADLINE_SECONDS) for n, caller in enumerate(callers)]
            return await asyncio.gather(*calls)

        names = asyncio.run(call_all())

        assert names == ["shared"] * 20

    def test_an_error_is_that_callers_own(self) -> None:
        def broken() -> object:
            raise LookupError

        async def steps() -> None:
            thread = SharedThread("shared")
            failing: SharedCaller[object] = SharedCaller(thread)
            other_caller: SharedCaller[object] = SharedCaller(thread)
            outcomes = await asyncio.gather(
                failing.call(broken, DEADLINE_SECONDS),
                other_caller.call(lambda: "answer", DEADLINE_SECONDS),
                return_exceptions=True,
            )
            assert isinstance(outcomes[0], LookupError)
            assert outcomes[1] == "answer"

        asyncio.run(steps())

    def test_while_calls_are_stuck_the_other_callers_are_answered_and_theirs_are_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_module, "TURN_SECONDS", SHORT_SECONDS)
        released = threading.Event()

        async def steps() -> None:
            thread = SharedThread("stuck")
            stuck: list[SharedCaller[object]] = [SharedCaller(thread) for _ in range(3)]
            other_caller: SharedCaller[object] = SharedCaller(thread)
            begun_calls: list[int] = []

            def hang() -> bool:
                begun_calls.append(1)
                return released.wait()

            waiting = [asyncio.create_task(caller.call(hang, DEADLINE_SECONDS)) for caller in stuck]
            await asyncio.sleep(0)
            for _ in range(3):
                assert await other_caller.call(lambda: "answer", DEADLINE_SECONDS) == "answer"
            wait_for(lambda: len(begun_calls) == 3)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            for caller in stuck:
                with pytest.raises(TimeoutError):
                    await caller.call(lambda: "too early", DEADLINE_SECONDS)
            released.set()
            for caller in stuck:
                assert await answer(caller, "next") == "next"

        asyncio.run(steps())
        wait_for(lambda: sum(thread.name == "stuck" for thread in threading.enumerate()) <= 1)

    def test_a_call_that_takes_longer_than_a_turn_is_answered_nevertheless(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_module, "TURN_SECONDS", SHORT_SECONDS)
        released = threading.Event()

        async def steps() -> None:
            thread = SharedThread("shared")
            slow: SharedCaller[object] = SharedCaller(thread)
            other_caller: SharedCaller[object] = SharedCaller(thread)
            call = asyncio.create_task(slow.call(lambda: released.wait() and "slow", DEADLINE_SECONDS))
            await asyncio.sleep(0)
            assert await other_caller.call(lambda: "answer", DEADLINE_SECONDS) == "answer"
            released.set()
            assert await call == "slow"

        asyncio.run(steps())

    def test_a_call_whose_time_is_over_before_its_turn_is_never_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_module, "TURN_SECONDS", DEADLINE_SECONDS)
        released, calls = threading.Event(), []

        async def steps() -> None:
            thread = SharedThread("shared")
            slow: SharedCaller[object] = SharedCaller(thread)
            other_caller: SharedCaller[object] = SharedCaller(thread)
            call = asyncio.create_task(slow.call(released.wait, DEADLINE_SECONDS))
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                await other_caller.call(lambda: calls.append("late"), 0.0)
            released.set()
            assert await call is True
            await other_caller.call(lambda: calls.append("next"), DEADLINE_SECONDS)

        asyncio.run(steps())

        assert calls == ["next"]

    def test_a_thread_that_cannot_be_started_is_an_error_of_all_calls_and_tried_again_at_the_next(self) -> None:
        thread = SharedThread("shared")
        callers: list[SharedCaller[object]] = [SharedCaller(thread) for _ in range(2)]

        async def call_all() -> list[object]:
            calls = [caller.call(lambda: "made", DEADLINE_SECONDS) for caller in callers]
            return await asyncio.gather(*calls, return_exceptions=True)

        previous_size = threading.stack_size(2**47)  # more than there are addresses: the kernel refuses it
        try:
            refused = asyncio.run(call_all())
        finally:
            threading.stack_size(previous_size)

        assert [str(error) for error in refused] == ["[Errno 11] no thread can be started"] * 2
        assert asyncio.run(call_all()) == ["made"] * 2
