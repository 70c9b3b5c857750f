"""What the detector is told of each GPU."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom.derive.leak.facts import Observation, room
from vllm_headroom.derive.page_facts import awake, finished, life, running_requests
from vllm_headroom.model import Gpu, Snapshot


def observations(snapshot: Snapshot, gpus: tuple[Gpu, ...]) -> Iterator[tuple[Gpu, Observation]]:
    """Yield each GPU with what the detector is told of it."""
    page = snapshot.page
    finished_total, running, named, is_awake = finished(page), running_requests(page), life(page), awake(page)
    for gpu in gpus:
        seen = Observation(
            seconds=snapshot.monotonic_seconds,
            held_bytes=gpu.held_bytes,
            finished_total=finished_total,
            running=running,
            life=named,
            neighbours=gpu.process_count if gpu.engine_bytes is None else None,
            awake=is_awake,
            room_bytes=room(gpu),
        )
        yield gpu, seen
