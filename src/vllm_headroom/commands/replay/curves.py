"""Memory and load over a trace, thinned out for drawing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from vllm_headroom.derive.page_facts import running_requests
from vllm_headroom.model import Failure, Snapshot

Point = tuple[float, float | None]
"""Seconds and a value; None where it could not be read."""

Stretch = list[tuple[float, float]]
"""Points to be joined by a line."""

MARGIN: Final = 0.05


class Curves:
    """Collects what is drawn: the memory held on each GPU, by UUID, and the running requests."""

    def __init__(self) -> None:
        self.gpus: dict[str, list[Point]] = {}
        self.running: list[Point] = []

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample; a GPU that is missing from it could not be read."""
        now = snapshot.time_seconds
        gpus = () if isinstance(snapshot.gpus, Failure) else snapshot.gpus
        held = {gpu.reading.uuid: gpu.held_bytes for gpu in gpus}
        for uuid in held:
            self.gpus.setdefault(uuid, [])
        for uuid, points in self.gpus.items():
            points.append((now, held.get(uuid)))
        page = snapshot.engines
        self.running.append((now, None if isinstance(page, Failure) else running_requests(page)))


def thinned(points: Sequence[Point], columns: int) -> list[Stretch]:
    """Return at most two points per column of the picture, the lowest and the highest, so that no peak is lost.

    Columns in which nothing could be read divide the stretches: a gap is drawn as a gap.
    """
    if not points:
        return []
    begin = min(seconds for seconds, _ in points)
    width = (max(seconds for seconds, _ in points) - begin) / columns or 1.0
    stretches: list[Stretch] = [[]]
    for _, group in groupby(points, key=lambda point: int((point[0] - begin) / width)):
        known = [(seconds, value) for seconds, value in group if value is not None]
        if known:
            extremes = {min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])}
            stretches[-1] += sorted(extremes)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def limits(stretches: Sequence[Stretch]) -> tuple[float, float]:
    """Return the ends of an axis that shows all values with a margin."""
    values = [value for stretch in stretches for _, value in stretch]
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.01 * high or 1.0
    return max(0.0, low - margin), high + margin
