"""One look at a sidecar as rich draws it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console, Group
from rich.text import Text

from vllm_headroom.expose.drawing import find_top
from vllm_headroom.model import name_device
from vllm_headroom.units import format_duration, format_size
from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom_tools.terminal import Point, draw_bars, wrap_line
from vllm_headroom_tools.watch.sidecar import Document, describe_verdict

ROWS: Final = 5


def draw_frame(found: Document | str, title: str, console: Console) -> Group:
    """Return what is said, then free memory of each GPU of the engine's down to zero, then the load; or why not."""
    if isinstance(found, str):
        return Group(Text(found.translate(CONTROLS), style="bold red"))
    return Group(*_draw_lines(found, title, console.width))


def _draw_lines(document: Document, title: str, width: int) -> Iterator[Text]:
    age = document["age_seconds"]
    seen = "nothing seen yet" if age is None else f"seen {format_duration(age)} ago"
    yield _draw_heading(f"{title}  {seen}", "bold")
    for verdict in document["verdicts"]:
        yield wrap_line(describe_verdict(verdict), width)
    history = document["history"]
    for gpu in document["gpus"]:
        curve: list[Point] = next((each["free_bytes"] for each in history["gpus"] if each["uuid"] == gpu["uuid"]), [])
        if (gpu["info"] or {}).get("attribution"):
            yield from _draw_room(name_device(gpu["gpu"], gpu["uuid"]).translate(CONTROLS), gpu, curve, width)
    yield from _draw_room("host memory", _find_host_facts(document), history.get("host_free_bytes", []), width)
    if document["history"]["running"]:
        yield _draw_heading("running requests, the last day at most", "dim")
        yield from (Text(line, "blue") for line in draw_bars(document["history"]["running"], width, 1, pick=max))


def _draw_heading(text: str, style: str) -> Text:
    return Text(text.translate(CONTROLS), style, no_wrap=True, overflow="ellipsis")


def _find_host_facts(document: Document) -> dict[str, Any]:
    """Return what is known of the host under the names of a GPU's facts."""
    limit, used = document["host_memory_limit_bytes"], document["host_memory_used_bytes"]
    return {
        "memory_free_bytes": None if limit is None or used is None else max(0, limit - used),
        "time_to_oom_seconds": document["host_time_to_oom_seconds"],
        "leak_state": "leaking" if "leaking" in (document["host_leak_state"] or {}).values() else None,
    }


def _draw_room(name: str, facts: dict[str, Any], curve: list[Point], width: int) -> Iterator[Text]:
    if not curve:
        return
    free, left = facts["memory_free_bytes"], facts["time_to_oom_seconds"]
    now = "not known now" if free is None else f"{format_size(free)} free"
    until = "" if left is None else f", full in {format_duration(left)}"
    span = format_duration(curve[-1][0] - curve[0][0])
    yield Text(f"{name}: {now}{until}; the last {span}, down to zero", "bold")
    style = "red" if facts["leak_state"] == "leaking" else "cyan"
    ends = 0.0, find_top(value for _, value in curve)
    yield from (Text(line, style) for line in draw_bars(curve, width, ROWS, ends=ends))
