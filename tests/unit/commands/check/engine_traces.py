"""Traces of an engine under a steady load, five seconds apart, as `check` meets them in CI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any, Final

HEADER: Final = '{"headroom_trace": 1}'
BEGAN: Final = 1_760_000_000.0
STEP: Final = 5.0
MIB: Final = 2**20
TOTAL: Final = 80_000 * MIB
HELD: Final = 70_000 * MIB
RUNNING: Final = 40.0


def engine(
    hours: float = 2.5,
    *,
    per_second: float = 20.0,
    running: float = RUNNING,
    held_bytes: int = HELD,
    leak: float = 0.0,
    host_leak: float = 0.0,
    preempted_per_thousand: float = 0.0,
    capacity: int | None = 1_000_000,
    restarts_at: float = 0.0,
    gpus: int = 1,
    model: str = "m",
    total: int = TOTAL,
) -> Iterator[dict[str, Any]]:
    """Yield the samples; `leak` and `host_leak` are bytes per thousand requests, in the allocator's steps."""
    for step in range(int(hours * 3600 / STEP)):
        seconds = step * STEP
        alive = seconds - restarts_at if 0 < restarts_at <= seconds else seconds
        started = BEGAN + (seconds - alive)
        finished = alive * per_second
        grown = ceil(finished * leak / 1000 / (2 * MIB)) * 2 * MIB
        used = held_bytes + grown
        gpu = {"total": total, "used": used, "engine": used, "other": 0, "processes": 1}
        rss = 3_000 * MIB + int(finished * host_leak / 1000)
        yield {
            "t": BEGAN + seconds,
            "gpus": [{"gpu": index, "uuid": f"GPU-{index}", **gpu} for index in range(gpus)],
            "engines": [
                {
                    "model_name": model,
                    "engine": "0",
                    "running": running,
                    "waiting": 0,
                    "finished_total": finished,
                    "preemptions_total": finished * preempted_per_thousand / 1000,
                    "kv_capacity_tokens": capacity,
                    "started_at": started,
                }
            ],
            "processes": [{"role": "engine_core", "rss": rss, "started_at": started}],
        }


def write_trace(file: Path, samples: Iterator[dict[str, Any]]) -> str:
    """Write a trace; return its name."""
    file.write_text("\n".join((HEADER, *map(json.dumps, samples))) + "\n", encoding="utf-8")
    return str(file)
