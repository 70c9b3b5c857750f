"""One look at a sidecar as rich draws it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console, Group
from rich.text import Text

from vllm_headroom.expose.drawing import scale
from vllm_headroom.model import called
from vllm_headroom.units import duration, size
from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom_tools.terminal import Point, bars, hanging
from vllm_headroom_tools.watch.sidecar import Document, said

ROWS: Final = 5


def frame(found: Document | str, title: str, console: Console) -> Group:
    """Return what is said, then free memory of each GPU of the engine's down to zero, then the load; or why not."""
    if isinstance(found, str):
        return Group(Text(found.translate(CONTROLS), style="bold red"))
    return Group(*_lines(found, title, console.width))


def _lines(document: Document, title: str, width: int) -> Iterator[Text]:
    age = document["age_seconds"]
    seen = "nothing seen yet" if age is None else f"seen {duration(age)} ago"
    yield _heading(f"{title}  {seen}", "bold")
    for verdict in document["verdicts"]:
        yield hanging(said(verdict), width)
    for gpu in document["gpus"]:
        yield from _room(gpu, document["history"], width)
    if document["history"]["running"]:
        yield _heading("running requests, the last day at most", "dim")
        yield from (Text(line, "blue") for line in bars(document["history"]["running"], width, 1, pick=max))


def _heading(text: str, style: str) -> Text:
    return Text(text.translate(CONTROLS), style, no_wrap=True, overflow="ellipsis")


def _room(gpu: dict[str, Any], history: dict[str, Any], width: int) -> Iterator[Text]:
    curve: list[Point] = next((each["free_bytes"] for each in history["gpus"] if each["uuid"] == gpu["uuid"]), [])
    if not curve or not (gpu["info"] or {}).get("attribution"):
        return
    free, left = gpu["memory_free_bytes"], gpu["time_to_oom_seconds"]
    now = "not known now" if free is None else f"{size(free)} free"
    until = "" if left is None else f", none in {duration(left)}"
    span = duration(curve[-1][0] - curve[0][0])
    name = called(gpu["gpu"], gpu["uuid"]).translate(CONTROLS)
    yield Text(f"{name}: {now}{until}; the last {span}, down to zero", "bold")
    style = "red" if gpu["leak_state"] == "leaking" else "cyan"
    ends = 0.0, scale(value for _, value in curve)
    yield from (Text(line, style) for line in bars(curve, width, ROWS, ends=ends))
