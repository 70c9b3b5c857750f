"""Takes the steps of the smoke test in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.settings import load_as
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.smoke.command import EngineServer, SmokeSettings, SmokeStep, take_steps

Steps = dict[str, SmokeStep]


def smoke(url: str, *words: str, say: Callable[[str], None] = lambda _line: None) -> Steps:
    """Return the steps by name; `words` are options."""
    settings = load_as(SmokeSettings, ["--engine-url", url, *words], {})
    steps = asyncio.run(take_steps(settings, EngineServer(settings), say))
    names = ["health", "completion", "metrics", "discrepancy"]
    if settings.expect_version:
        names.insert(1, "version")
    assert list(steps) == names
    return steps


def states(steps: Steps) -> list[Conclusion]:
    """Return how it went, in the order of the steps."""
    return [step.verdict for step in steps.values()]
