"""Memory and load over a trace, thinned out for drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vllm_headroom.derive.page_facts import running_requests
from vllm_headroom.expose.drawing import Point, Stretch
from vllm_headroom.model import Failure, Snapshot

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


def limits(stretches: Sequence[Stretch]) -> tuple[float, float]:
    """Return the ends of an axis that shows all values with a margin."""
    values = [value for stretch in stretches for _, value in stretch]
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.01 * high or 1.0
    return max(0.0, low - margin), high + margin
