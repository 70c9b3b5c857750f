"""What a process has recorded: the stacks behind the memory that it took and kept."""

from __future__ import annotations

import json
from typing import Any, Final

from vllm_headroom.parse.fields import WrongFieldError, each, number, size, text, within

FORMAT: Final = "headroom_record"
VERSION: Final = 1
MOST_STACKS: Final = 20
MOST_FRAMES: Final = 16


Answer = dict[str, Any]
"""A process's answer, as --json has it: a `note`, the `cost`, and the stacks of `host` and `gpu` that hold most.

A stack has all `bytes` that are still held of what was allocated there; the line itself is first. The cost is what the
recording took of its process: `pause_seconds` is how long it stood still at the end.
"""


def parse_answer(content: bytes, request: str) -> Answer | str | None:
    """Return the answer to the request of this id, None where it answers another, or what is wrong with it."""
    try:
        document = json.loads(content)
        if type(document) is not dict or document.get(FORMAT) != VERSION or document.get("id") != request:
            return None
        return {
            "note": text(document, "note"),
            "cost": within(document, "cost", _cost) or _cost({}),
            "host": list(each(document, "host", _stack) or ())[:MOST_STACKS],
            "gpu": list(each(document, "gpu", _stack) or ())[:MOST_STACKS],
        }
    except WrongFieldError as wrong:
        return str(wrong)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"


def _stack(entry: dict[str, Any], _place: int) -> dict[str, Any]:
    frames = entry.get("stack")
    if type(frames) is not list or not all(type(frame) is str and frame.isprintable() for frame in frames):
        raise WrongFieldError("stack", frames, "a list of files and lines")
    return {"bytes": size(entry, "bytes") or 0, "count": size(entry, "count") or 0, "stack": frames[:MOST_FRAMES]}


def _cost(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "pause_seconds": number(entry, "pause_seconds"),
        "cpu_seconds": number(entry, "cpu_seconds"),
        "memory_bytes": size(entry, "memory_bytes"),
    }
