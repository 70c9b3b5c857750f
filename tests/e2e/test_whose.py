"""Whose processes and memory the real daemon takes for its engine's, beside others that look like vLLM's."""

from __future__ import annotations

from tests.e2e.life import Start, becomes, last_look, settings, state
from tests.fakes.nvml.library import GIB, FakeNvml
from tests.process import Daemon, Page, daemon

REASONS = ("replaced", "gone", "out_of_memory", "oom_killed")


def held(page: Page, holder: str) -> float:
    return page.value("gpu_memory_held_bytes", holder=holder) / GIB


def ends(page: Page) -> float:
    return sum(page.value("engine_exits_total", reason=reason) for reason in REASONS)


def looked(running: Daemon) -> Page:
    """Return a page of which every source was read after now."""
    before = last_look(running.sees(lambda page: page.has("engine_state", state="down"), "a first look"))
    return running.sees(lambda page: last_look(page) > before + 10, "two more looks")


def test_another_engine_is_not_taken_for_one_that_is_not_up_yet(
    start: Start, nvml: FakeNvml, port: int, another_port: int
) -> None:
    start("another", port=another_port, held_gib=30)
    with daemon(**settings(port, nvml)) as running:
        alone = looked(running)
        assert state(alone) == "down"
        assert not alone.has("host_memory_bytes", process="engine_core")

        start("ours", held_gib=20)
        serving = becomes(running, "serving")
        both = running.sees(lambda page: held(page, "engine") == 20, "the engine's memory is told from the other's")
        assert held(both, "other") == 30
        assert (ends(serving), serving.value("engine_restarts_total")) == (0, 0)
        assert "a life of the engine ended" not in running.log()
