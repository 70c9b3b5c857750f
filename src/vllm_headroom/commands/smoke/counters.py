"""Is the completion in the engine's metrics?"""

from __future__ import annotations

import asyncio
from typing import Final

from vllm_headroom.commands.smoke.reach import Reach
from vllm_headroom.commands.smoke.step import State, Step
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.page import nothing_found, parse_engines

POLL_SECONDS: Final = 0.5
COUNTED_SECONDS: Final = 15.0
"""vLLM counts a request as it finishes; its web server may be busy, and gauges of several of them lag."""

NEEDED: Final = ("requests_running", "requests_waiting", "requests_finished")

NO_COUNTERS: Final = (
    "the page answers and has no counters of vLLM's, although it completes: take --disable-log-stats out of vLLM's"
    " options; if it is not there, HEADROOM_ENGINE_URL is not vLLM's own port"
)
UNCOUNTED: Final = (
    "finished requests stay at {:.0f} after a completion: check that HEADROOM_ENGINE_URL is the page of the server that"
    " answers beside it"
)


async def read_page(reach: Reach) -> EnginePage | Failure:
    """Return the engine's page, understood."""
    text = await reach.page()
    return text if isinstance(text, Failure) else parse_engines(text)


async def counted(
    reach: Reach, before: EnginePage | Failure, patience_seconds: float = COUNTED_SECONDS
) -> tuple[Step, EnginePage | Failure]:
    """Return whether one more request has finished than in `before`, and the page that says so."""
    finished_before = 0.0 if isinstance(before, Failure) else finished(before)
    now = asyncio.get_running_loop().time
    ends = now() + patience_seconds
    while True:
        page = await read_page(reach)
        more = 0.0 if isinstance(page, Failure) else finished(page) - finished_before
        if more >= 1 or now() >= ends:
            break
        await asyncio.sleep(POLL_SECONDS)
    problem = _lacking(page, NO_COUNTERS)
    if problem is None and more < 1:
        problem = UNCOUNTED.format(finished_before)
    if isinstance(page, Failure) or problem is not None:
        return Step(State.FAILED, problem or ""), page
    return Step(State.OK, f"{_inputs(page)}; finished requests rose by {more:.0f}"), page


def offered(page: EnginePage | Failure) -> Step:
    """Return what the page offers when there is no completion to count."""
    problem = _lacking(page, "" if isinstance(page, Failure) else nothing_found(page))
    if isinstance(page, Failure) or problem is not None:
        return Step(State.FAILED, problem or "")
    text = f"{_inputs(page)}; there is no completion to look for in them"
    return Step(State.SKIPPED, text)


def finished(page: EnginePage) -> float:
    """Return how many requests have finished, on all engines of the page; a counter not there yet is at 0."""
    return sum(engine.finished_total or 0.0 for engine in page.engines)


def _lacking(page: EnginePage | Failure, nothing: str) -> str | None:
    """Return what keeps a request from being found on the page, `nothing` where it has no engine; None if nothing."""
    if isinstance(page, Failure):
        return page.message
    if not page.engines:
        return nothing
    missing = [name for name, is_there in page.inputs if name in NEEDED and not is_there]
    return f"the page does not offer {', '.join(missing)}: `vllm-headroom doctor` says more" if missing else None


def _inputs(page: EnginePage) -> str:
    there = sum(is_there for _, is_there in page.inputs)
    return f"{there} of {len(page.inputs)} inputs are on the page"
