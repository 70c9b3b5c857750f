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
    for gpu in document["gpus"]:
        yield from _draw_room(gpu, document["history"], width)
    if document["history"]["running"]:
        yield _draw_heading("running requests, the last day at most", "dim")
        yield from (Text(line, "blue") for line in draw_bars(document["history"]["running"], width, 1, pick=max))


def _draw_heading(text: str, style: str) -> Text:
    return Text(text.translate(CONTROLS), style, no_wrap=True, overflow="ellipsis")


def _draw_room(gpu: dict[str, Any], history: dict[str, Any], width: int) -> Iterator[Text]:
    curve: list[Point] = next((each["free_bytes"] for each in history["gpus"] if each["uuid"] == gpu["uuid"]), [])
    if not curve or not (gpu["info"] or {}).get("attribution"):
        return
    free, left = gpu["memory_free_bytes"], gpu["time_to_oom_seconds"]
    now = "not known now" if free is None else f"{format_size(free)} free"
    until = "" if left is None else f", full in {format_duration(left)}"
    span = format_duration(curve[-1][0] - curve[0][0])
    name = name_device(gpu["gpu"], gpu["uuid"]).translate(CONTROLS)
    yield Text(f"{name}: {now}{until}; the last {span}, down to zero", "bold")
    style = "red" if gpu["leak_state"] == "leaking" else "cyan"
    ends = 0.0, find_top(value for _, value in curve)
    yield from (Text(line, style) for line in draw_bars(curve, width, ROWS, ends=ends))
