"""Traces made by hand: what a sidecar would have recorded, five seconds apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

HEADER = '{"headroom_trace": 1}'
BEGAN = 1_760_000_000.0
STEP = 5.0
MIB = 2**20
TOTAL = 81_559 * MIB


def text(records: Iterable[dict[str, Any]]) -> str:
    return "\n".join((HEADER, *map(json.dumps, records))) + "\n"


def sample(
    t: float,
    used: int | None,
    *,
    running: float = 40.0,
    finished: float = 0.0,
    started: float = BEGAN,
    **record_fields: Any,
) -> dict[str, Any]:
    """Return one sample of one engine on one GPU; the GPUs could not be read where `used` is None."""
    gpu = {"gpu": 0, "uuid": "GPU-a", "total": TOTAL, "used": used, "engine": used, "other": 0, "processes": 1}
    engine = {"model_name": "m", "engine": "0", "running": running, "waiting": 0, "finished_total": finished}
    return {
        "t": t,
        "gpus": None if used is None else [gpu],
        "engines": [{**engine, "started_at": started}],
        **record_fields,
    }


def flat(hours: float) -> Iterator[dict[str, Any]]:
    """Ten requests a second, memory as it was."""
    for step in range(int(hours * 3600 / STEP)):
        yield sample(BEGAN + step * STEP, 70_000 * MIB, finished=step * STEP * 10)


def leaking(hours: float, bytes_per_request: float = 12_800.0, seed: int = 1) -> Iterator[dict[str, Any]]:
    """About ten requests a second that each leave something behind; the allocator takes 2 MiB at a time."""
    random, finished, running = Random(seed), 0, 40.0  # noqa: S311 - a trace that is the same every time
    for step in range(int(hours * 3600 / STEP)):
        finished += max(0, round(random.gauss(50, 7)))
        running = max(0.0, running + random.gauss(0, 2) + 0.1 * (40 - running))
        grown = -(-int(finished * bytes_per_request) // (2 * MIB)) * 2 * MIB
        yield sample(BEGAN + step * STEP, 70_000 * MIB + grown, running=round(running), finished=finished)
