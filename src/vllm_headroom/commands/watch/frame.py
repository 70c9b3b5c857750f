"""One look at a sidecar as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from vllm_headroom.commands.bars import Point, bars
from vllm_headroom.commands.terminal import BLUE, BOLD, CYAN, DIM, RED, Terminal
from vllm_headroom.commands.watch.sidecar import Document
from vllm_headroom.units import duration, size
from vllm_headroom.vocabulary import CONTROLS

ROWS: Final = 5
WIDTH: Final = 80
WORDS: Final = {"good": "OK", "unknown": "NOT KNOWN", "warning": "WARNING", "alarm": "ALARM"}


def frame(document: Document, title: str, terminal: Terminal) -> Iterator[str]:
    """Yield what is said, then free memory of each GPU of the engine's down to zero, then the load."""
    width, age = terminal.columns or WIDTH, document["age_seconds"]
    seen = "nothing seen yet" if age is None else f"seen {duration(age)} ago"
    yield terminal.painted(_cut(f"{title}  {seen}", width), BOLD)
    for verdict in document["verdicts"]:
        yield from terminal.lines(said(verdict))
    for gpu in document["gpus"]:
        yield from _room(gpu, document["history"], terminal)
    if document["history"]["running"]:
        yield terminal.painted(_cut("running requests, the last day at most", width), DIM)
        yield from (terminal.painted(line, BLUE) for line in bars(document["history"]["running"], width, 1, pick=max))


def said(verdict: dict[str, Any]) -> str:
    """Return a verdict: its level as a word, which the colour only repeats."""
    return f"{WORDS.get(verdict['level'], verdict['level']):<10}{verdict['sentence']}".translate(CONTROLS)


def _cut(text: str, width: int) -> str:
    text = text.translate(CONTROLS)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _room(gpu: dict[str, Any], history: dict[str, Any], terminal: Terminal) -> Iterator[str]:
    curve: list[Point] = next((each["free_bytes"] for each in history["gpus"] if each["uuid"] == gpu["uuid"]), [])
    if not curve or not (gpu["info"] or {}).get("attribution"):
        return
    width = terminal.columns or WIDTH
    free, left = gpu["memory_free_bytes"], gpu["time_to_oom_seconds"]
    now = "not known now" if free is None else f"{size(free)} free"
    until = "" if left is None else f", none in {duration(left)}"
    span = duration(curve[-1][0] - curve[0][0])
    head = f"GPU {gpu['gpu']}: {now}{until}; the last {span}, down to zero"
    yield from (terminal.painted(line, BOLD) for line in terminal.lines(head))
    for line in bars(curve, width, ROWS):
        yield terminal.painted(line, RED if gpu["leak_state"] == "leaking" else CYAN)
