"""What a process has recorded: the stacks behind the memory that it took and kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from vllm_headroom.parse.fields import WrongFieldError, each, number, size, text, within

FORMAT: Final = "headroom_record"
VERSION: Final = 1
MOST_STACKS: Final = 20
MOST_FRAMES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where memory was allocated, the line itself first, with all that is still held of it."""

    n_bytes: int
    count: int
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the recording took of its process: `pause_seconds` is how long the process stood still at the end."""

    pause_seconds: float | None = None
    cpu_seconds: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One process's answer: the stacks that hold most, and what it has to say of the recording."""

    host: tuple[Stack, ...] = ()
    gpu: tuple[Stack, ...] = ()
    cost: Cost = Cost()
    note: str | None = None


def parse_answer(content: bytes, request: str) -> Answer | str | None:
    """Return the answer to the request of this id, None where it answers another, or what is wrong with it."""
    try:
        document = json.loads(content)
        if type(document) is not dict or document.get(FORMAT) != VERSION or document.get("id") != request:
            return None
        return Answer(
            host=(each(document, "host", _stack) or ())[:MOST_STACKS],
            gpu=(each(document, "gpu", _stack) or ())[:MOST_STACKS],
            cost=within(document, "cost", _cost) or Cost(),
            note=text(document, "note"),
        )
    except WrongFieldError as wrong:
        return str(wrong)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"


def _stack(entry: dict[str, Any], _place: int) -> Stack:
    frames = entry.get("stack")
    if type(frames) is not list or not all(type(frame) is str and frame.isprintable() for frame in frames):
        raise WrongFieldError("stack", frames, "a list of files and lines")
    return Stack(n_bytes=size(entry, "bytes") or 0, count=size(entry, "count") or 0, frames=tuple(frames[:MOST_FRAMES]))


def _cost(entry: dict[str, Any]) -> Cost:
    return Cost(
        pause_seconds=number(entry, "pause_seconds"),
        cpu_seconds=number(entry, "cpu_seconds"),
        memory_bytes=size(entry, "memory_bytes"),
    )
