"""One look at a sidecar as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.console import Group
from rich.text import Text

from vllm_headroom.commands.watch.sidecar import Document
from vllm_headroom.units import duration, size

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
ROWS: Final = 5
STYLES: Final = {"good": "green", "unknown": "dim", "warning": "yellow", "alarm": "bold red"}
WORDS: Final = {"good": "OK", "unknown": "NOT KNOWN", "warning": "WARNING", "alarm": "ALARM"}

Point = Sequence[Any]
"""Seconds and a value, None for a gap."""


def frame(document: Document, title: str, width: int) -> Group:
    """Return what is said, then free memory of each GPU of the engine's down to zero, then the load."""
    age = document["age_seconds"]
    seen = "nothing seen yet" if age is None else f"seen {duration(age)} ago"
    lines = [Text(f"{title}  {seen}", style="bold", overflow="ellipsis", no_wrap=True)]
    lines += [said(verdict) for verdict in document["verdicts"]]
    for gpu in document["gpus"]:
        lines += _room(gpu, document["history"], width)
    if document["history"]["running"]:
        lines.append(Text("running requests, the last day at most", style="dim"))
        lines += [Text(line, style="blue") for line in bars(document["history"]["running"], width, 1)]
    return Group(*lines)


def said(verdict: dict[str, Any]) -> Text:
    """Return a verdict: its level as a word, which the colour only repeats."""
    text = Text()
    text.append(f"{WORDS.get(verdict['level'], verdict['level']):<10}", style=STYLES.get(verdict["level"], ""))
    return text.append(str(verdict["sentence"]))


def _room(gpu: dict[str, Any], history: dict[str, Any], width: int) -> Iterator[Text]:
    curve: list[Point] = next((each["free_bytes"] for each in history["gpus"] if each["uuid"] == gpu["uuid"]), [])
    if not curve or not (gpu["info"] or {}).get("attribution"):
        return
    free, left = gpu["memory_free_bytes"], gpu["time_to_oom_seconds"]
    now = "not known now" if free is None else f"{size(free)} free"
    until = "" if left is None else f", none in {duration(left)}"
    span = duration(curve[-1][0] - curve[0][0])
    yield Text(f"GPU {gpu['gpu']}: {now}{until}; the last {span}, down to zero", style="bold")
    for line in bars(curve, width, ROWS):
        yield Text(line, style="red" if gpu["leak_state"] == "leaking" else "cyan")


def bars(curve: Sequence[Point], width: int, rows: int) -> list[str]:
    """Return a bar for each column, the lowest of its stretch of time; a gap is blank."""
    columns = [_lowest(curve, place, width) for place in range(width)]
    top = max((value for value in columns if value is not None), default=0.0) or 1.0
    eighths = [0 if value is None else max(1, round(8 * rows * value / top)) for value in columns]
    return [
        "".join(BLOCKS[min(8, max(0, height - 8 * row))] for height in eighths).rstrip()
        for row in reversed(range(rows))
    ]


def _lowest(curve: Sequence[Point], place: int, width: int) -> float | None:
    stretch = curve[
        place * len(curve) // width : max((place + 1) * len(curve) // width, place * len(curve) // width + 1)
    ]
    return min((float(value) for _, value in stretch if value is not None), default=None)
