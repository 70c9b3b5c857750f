"""One short completion, and its effect on the engine's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

import httpx
from msgspec import Struct

from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.daemon.parts import build_page_reader
from vllm_headroom.daemon.sampler import close_all
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.engines import explain_empty_page, parse_engines
from vllm_headroom.scrape.http.failures import hide_secrets
from vllm_headroom.scrape.http.reader import PageReader, Reply
from vllm_headroom.vocabulary import Reason
from vllm_headroom_tools.look import fetch_once
from vllm_headroom_tools.openai import find_error, parse_first_model, parse_object


class EngineServer:
    """Requests to the server that has the engine's page."""

    def __init__(self, settings: PlainSettings) -> None:
        self._settings = settings
        self._page = httpx.URL(settings.engine_url)

    def address(self, path: str) -> str:
        """Return where something is, without what may be secret."""
        return str(hide_secrets(self._page.join(path)))

    async def text(self, path: str, seconds: float) -> str | Failure:
        """Return what is served at `path`, which is relative to the engine's page; never raise."""
        answer = await fetch_once(self._reader(path, seconds))
        return self._told(path, seconds, answer) if isinstance(answer, Failure) else answer

    async def page(self) -> str | Failure:
        """Return the engine's page of metrics; never raise."""
        return await self.text("", self._settings.engine_timeout_seconds)

    async def post(self, path: str, body: Mapping[str, object], seconds: float) -> Reply | Failure:
        """Return what is answered to `body`; never raise."""
        reader = self._reader(path, seconds)
        try:
            answer = await reader.post(body)
        finally:
            await close_all(reader)
        return self._told(path, seconds, answer) if isinstance(answer, Failure) else answer

    def _told(self, path: str, seconds: float, failure: Failure) -> Failure:
        """Return a failure to answer in time without the daemon's advice, which is about another time limit."""
        if failure.reason is not Reason.TIMEOUT:
            return failure
        message = f"{self.address(path)} did not answer within {seconds:.3g} s: look whether vLLM hangs, in its log"
        return Failure(source=failure.source, reason=failure.reason, message=message)

    def _reader(self, path: str, seconds: float) -> PageReader:
        return build_page_reader(self._settings, str(self._page.join(path)), timeout_seconds=seconds)


class StepState(StrEnum):
    """The state of a step; what could not be tried is never called ok."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


class SmokeStep(Struct, frozen=True):
    """The result of one step; `text` says what was seen, or why it failed or was skipped, and what to do."""

    state: StepState
    text: str


MODELS: Final = "v1/models"
MODELS_SECONDS: Final = 10.0
TOKENS: Final = 8
FORMS: Final[tuple[tuple[str, Mapping[str, object]], ...]] = (
    ("v1/completions", {"prompt": "Hello"}),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
)
"""The second for a model that has only chat."""

NOT_SERVED: Final = frozenset(
    {HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED}
)
"""What servers answer to a form of request that the model does not serve."""

SAID_CHARACTERS: Final = 200
OUT_OF_MEMORY: Final = (
    "lower --gpu-memory-utilization: what runs out of memory now lies outside that budget, and needs more left over"
)
BEARER: Final = "set HEADROOM_ENGINE_BEARER_TOKEN_FILE to a token that may use the API"
LOG: Final = "look for the cause in the engine's log"


async def request_completion(reach: EngineServer, deadline_seconds: float) -> SmokeStep:
    """Ask the first model that the server lists for a completion, and where it has none for a chat's answer."""
    now = asyncio.get_running_loop().time
    listed = await reach.text(MODELS, min(MODELS_SECONDS, deadline_seconds))
    if isinstance(listed, Failure):
        return SmokeStep(StepState.FAILED, listed.message)
    model = parse_first_model(listed)
    if model is None:
        return SmokeStep(
            StepState.FAILED,
            f"{reach.address(MODELS)} lists no model: check that HEADROOM_ENGINE_URL names vLLM's own port",
        )
    troubles: list[str] = []
    for path, prompt in FORMS:
        began = now()
        body = {"model": model.name, "max_tokens": TOKENS, "temperature": 0, **prompt}
        answer = await reach.post(path, body, deadline_seconds)
        tokens = _read_completion(answer, reach.address(path))
        if isinstance(tokens, int):
            return SmokeStep(StepState.OK, f"{model.name} gave {tokens} tokens in {now() - began:.2f} s")
        if isinstance(answer, Failure) or answer.status not in NOT_SERVED:
            return SmokeStep(StepState.FAILED, tokens)
        troubles.append(tokens)
    return SmokeStep(StepState.FAILED, troubles[0])


def _read_completion(answer: Reply | Failure, address: str) -> int | str:
    """Return how many tokens were generated, or why this is no completion."""
    if isinstance(answer, Failure):
        if answer.reason is Reason.INCOMPLETE:
            return f"{address} hung up in the middle of the completion: look for a crash in the engine's log"
        return answer.message
    if answer.status != HTTPStatus.OK:
        said = (find_error(parse_object(answer.text)) or answer.text).strip()[:SAID_CHARACTERS]
        return f"{address} answers {answer.status}{f' ({said})' if said else ''}: {_advise(answer.status, said)}"
    said = answer.text[:SAID_CHARACTERS]
    nothing = f"{address} answers 200 without a completion ({said}): check that HEADROOM_ENGINE_URL names vLLM"
    return _count_tokens(parse_object(answer.text)) or nothing


def _advise(status: int, said: str) -> str:
    if "out of memory" in said.lower():
        return OUT_OF_MEMORY
    return BEARER if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN} else LOG


def _count_tokens(document: Mapping[str, Any]) -> int:
    """Return how many tokens were generated; 0 for what is no completion."""
    usage, choices = document.get("usage"), document.get("choices")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and isinstance(choices, list) and choices else 0


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


async def read_page(reach: EngineServer) -> EnginePage | Failure:
    """Return the engine's page, understood."""
    text = await reach.page()
    return text if isinstance(text, Failure) else parse_engines(text)


async def check_counters(
    reach: EngineServer, before: EnginePage | Failure, patience_seconds: float = COUNTED_SECONDS
) -> tuple[SmokeStep, EnginePage | Failure]:
    """Return whether one more request has finished than in `before`, and the page that says so."""
    finished_before = 0.0 if isinstance(before, Failure) else sum_finished(before)
    now = asyncio.get_running_loop().time
    ends = now() + patience_seconds
    while True:
        page = await read_page(reach)
        more = 0.0 if isinstance(page, Failure) else sum_finished(page) - finished_before
        if more >= 1 or now() >= ends:
            break
        await asyncio.sleep(POLL_SECONDS)
    problem = _find_missing(page, NO_COUNTERS)
    if problem is None and more < 1:
        problem = UNCOUNTED.format(finished_before)
    if isinstance(page, Failure) or problem is not None:
        return SmokeStep(StepState.FAILED, problem or ""), page
    return SmokeStep(StepState.OK, f"{_count_inputs(page)}; finished requests rose by {more:.0f}"), page


def check_inputs(page: EnginePage | Failure) -> SmokeStep:
    """Return what the page offers when there is no completion to count."""
    problem = _find_missing(page, "" if isinstance(page, Failure) else explain_empty_page(page))
    if isinstance(page, Failure) or problem is not None:
        return SmokeStep(StepState.FAILED, problem or "")
    text = f"{_count_inputs(page)}; there is no completion to look for in them"
    return SmokeStep(StepState.SKIPPED, text)


def sum_finished(page: EnginePage) -> float:
    """Return how many requests have finished, on all engines of the page; a counter not there yet is at 0."""
    return sum(engine.finished_total or 0.0 for engine in page.engines)


def _find_missing(page: EnginePage | Failure, nothing: str) -> str | None:
    """Return what keeps a request from being found on the page, `nothing` where it has no engine; None if nothing."""
    if isinstance(page, Failure):
        return page.message
    if not page.engines:
        return nothing
    missing = [name for name, is_there in page.inputs if name in NEEDED and not is_there]
    return f"the page does not offer {', '.join(missing)}: `vllm-headroom doctor` says more" if missing else None


def _count_inputs(page: EnginePage) -> str:
    there = sum(is_there for _, is_there in page.inputs)
    return f"{there} of {len(page.inputs)} inputs are on the page"
