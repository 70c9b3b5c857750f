"""Lets the engine complete one short prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from vllm_headroom.commands.smoke.reach import Reach
from vllm_headroom.commands.smoke.step import State, Step
from vllm_headroom.model import Failure
from vllm_headroom.parse.openai import error_of, first_model, json_object
from vllm_headroom.scrape.http.reader import Answer
from vllm_headroom.vocabulary import Reason

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


async def completed(reach: Reach, deadline_seconds: float) -> Step:
    """Ask the first model that the server lists for a completion, and where it has none for a chat's answer."""
    now = asyncio.get_running_loop().time
    listed = await reach.text(MODELS, min(MODELS_SECONDS, deadline_seconds))
    if isinstance(listed, Failure):
        return Step(State.FAILED, listed.message)
    model = first_model(listed)
    if model is None:
        return Step(
            State.FAILED,
            f"{reach.address(MODELS)} lists no model: check that HEADROOM_ENGINE_URL names vLLM's own port",
        )
    troubles: list[str] = []
    for path, prompt in FORMS:
        began = now()
        body = {"model": model.name, "max_tokens": TOKENS, "temperature": 0, **prompt}
        answer = await reach.post(path, body, deadline_seconds)
        told = _tokens_or_trouble(answer, reach.address(path))
        if isinstance(told, int):
            return Step(State.OK, f"{model.name} gave {told} tokens in {now() - began:.2f} s")
        if isinstance(answer, Failure) or answer.status not in NOT_SERVED:
            return Step(State.FAILED, told)
        troubles.append(told)
    return Step(State.FAILED, troubles[0])


def _tokens_or_trouble(answer: Answer | Failure, address: str) -> int | str:
    """Return how many tokens were generated, or why this is no completion."""
    if isinstance(answer, Failure):
        if answer.reason is Reason.INCOMPLETE:
            return f"{address} hung up in the middle of the completion: look for a crash in the engine's log"
        return answer.message
    if answer.status != HTTPStatus.OK:
        said = (error_of(json_object(answer.text)) or answer.text).strip()[:SAID_CHARACTERS]
        return f"{address} answers {answer.status}{f' ({said})' if said else ''}: {_advice(answer.status, said)}"
    said = answer.text[:SAID_CHARACTERS]
    nothing = f"{address} answers 200 without a completion ({said}): check that HEADROOM_ENGINE_URL names vLLM"
    return _tokens(json_object(answer.text)) or nothing


def _advice(status: int, said: str) -> str:
    if "out of memory" in said.lower():
        return OUT_OF_MEMORY
    return BEARER if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN} else LOG


def _tokens(document: Mapping[str, Any]) -> int:
    """Return how many tokens were generated; 0 for what is no completion."""
    usage, choices = document.get("usage"), document.get("choices")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and isinstance(choices, list) and choices else 0
