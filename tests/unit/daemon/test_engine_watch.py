"""What follows a sample can fail without ending the daemon or keeping the other steps from running."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.logs import capture_logs
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.engine_watch import EngineWatch

STEPS = ("history", "recorder", "flight")


class Steps:
    """Stand-ins of a sampler and of the steps after it; those in `faulty` raise."""

    def __init__(self) -> None:
        self.faulty: set[str] = set()
        self.calls: list[str] = []

    def build_watch(self) -> EngineWatch:
        result = SimpleNamespace(snapshot=SimpleNamespace(page=None), verdicts=(), values=None)

        async def tick() -> Any:
            return result

        parts: dict[str, Any] = {
            "sampler": SimpleNamespace(tick=tick, latest=result),
            "history": SimpleNamespace(step=lambda *_: self.call("history")),
            "recorder": SimpleNamespace(record=lambda *_: self.wait("recorder")),
            "flight": SimpleNamespace(step=lambda *_: self.wait("flight")),
        }
        return EngineWatch(**parts, keeper=None, canary=None, server_pages=None, gpus=None, clock=SystemClock())  # type: ignore[arg-type]

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faulty:
            raise IndexError(name)

    async def wait(self, name: str) -> None:
        self.call(name)


@pytest.mark.parametrize("faulty", STEPS)
def test_a_step_after_the_sample_that_raises_costs_itself(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_headroom.daemon.engine_watch.count_running", lambda _: 0.0)
    steps = Steps()
    watch = steps.build_watch()

    async def turn() -> None:
        await watch.sample()
        await watch.record()

    with capture_logs() as lines:
        for names in ({faulty}, {faulty}, set(), {faulty}):
            steps.faulty = names
            asyncio.run(turn())

    assert steps.calls == [*STEPS] * 4
    assert [line["log_level"] for line in lines] == ["error", "info", "error"], "once each time that it begins"
