"""A daemon that follows a run of vLLM, on a clock that runs faster, and what it reports about it."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.vllm import Vllm
from tests.fakes.nvml.library import FakeNvml
from tests.process import Daemon, Page

HURRIED = {"module": "tests.e2e.hurried", "SPEED": "20"}
STATES = ("unknown", "down", "starting", "serving", "stalled", "asleep")
Start = Callable[..., Vllm]


def settings(port: int, nvml: FakeNvml, **variables: str) -> dict[str, str]:
    return {"ENGINE_URL": f"http://127.0.0.1:{port}", **HURRIED, **nvml.environment(), **variables}


def state(page: Page) -> str:
    (seen_state,) = (state for state in STATES if page.value("engine_state", state=state) == 1)
    return seen_state


def last_look(page: Page) -> float:
    return page.value("source_last_success_timestamp_seconds", source="nvml")


def becomes(running: Daemon, wanted: str) -> Page:
    return running.sees(lambda page: state(page) == wanted, f"the engine is {wanted}")
