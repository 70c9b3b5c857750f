"""What a request came to, and what the server's words for it mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from vllm_headroom.parse.openai import error_of, json_object
from vllm_headroom.vocabulary import CONTROLS

OUT_OF_MEMORY: Final = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
"""torch's "CUDA out of memory" and the name of its exception, HIP's, and CUDA's own "out of memory"."""

ENGINE_DEAD: Final = re.compile(
    r"EngineCore encountered an issue|EngineDead|Background loop (?:has errored|is stopped)"
)
"""What vLLM's web server says when its engine is gone: V1's EngineDeadError, V0's AsyncEngineDeadError."""

BUSY: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
BROKEN_FINISHES: Final = frozenset({"abort", "error"})
LONGEST_TEXT: Final = 160
"""Characters of the server's words that are shown."""


class Outcome(StrEnum):
    """What became of a request; a closed set, each request is counted in one."""

    SUCCEEDED = "succeeded"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    REJECTED = "rejected"
    REFUSED = "refused"
    CLOSED = "closed"
    TIMED_OUT = "timed_out"
    UNFINISHED = "unfinished"
    NOT_SENT = "not_sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A request's outcome, and `text` to say of it; tokens are the server's counts, None where it gave none."""

    outcome: Outcome
    text: str = ""
    engine_dead: bool = False
    prompt_tokens: int | None = None
    generation_tokens: int | None = None


def refusal(status: int, body: bytes) -> Answer:
    """Return what a status other than 200 means."""
    text = body.decode(errors="replace")
    said = error_of(json_object(text)) or text
    otherwise = Outcome.REJECTED if status in BUSY else Outcome.FAILED
    return _failed(said, f"{status}: {said}" if said else str(status), otherwise)


def broken(said: str) -> Answer:
    """Return what an error within a stream means."""
    return _failed(said, said, Outcome.FAILED)


def shown(text: str) -> str:
    """Return the beginning of a text, fit for a line of a terminal."""
    line = " ".join(text.split()).translate(CONTROLS)
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}..."


def _failed(said: str, text: str, otherwise: Outcome) -> Answer:
    outcome = Outcome.OUT_OF_MEMORY if OUT_OF_MEMORY.search(said) else otherwise
    return Answer(outcome=outcome, text=shown(text), engine_dead=ENGINE_DEAD.search(said) is not None)
