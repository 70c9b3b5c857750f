"""An engine with a probe in it, whose memory grows as a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from tests.samples import engine, gpu, page, snapshot
from vllm_headroom.derive.leak.inside import InsideTracks, update_insides
from vllm_headroom.derive.leak.leak import observe_gpus
from vllm_headroom.model import EngineStatus, Inside, Snapshot
from vllm_headroom.vocabulary import EngineState, MemoryPart

SECONDS: Final = 5.0
LEAK: Final = 640_000
"""The post-mortem's leak, in each reading of five seconds."""

BASE: Final = 70 * 10**9
TOTAL: Final = 85 * 10**9

Grown = tuple[float, float, float]
"""What tensors, fragments and what is outside torch have grown by."""


def look(
    at: int,
    grown: Grown,
    *,
    cached: float = 0,
    seconds: float = SECONDS,
    awake: bool = True,
    restarts: int = 0,
    is_known: bool = True,
) -> Snapshot:
    tensors, fragments, outside = (int(part) for part in grown)
    allocated, reserved = BASE + tensors, BASE + 10**9 + tensors + fragments + int(cached)
    held_bytes, parts = reserved + 10**9 + outside, ((MemoryPart.FRAGMENTED, fragments),)
    inside = Inside(allocated_bytes=allocated, reserved_bytes=reserved, parts=parts) if is_known else None
    sample = snapshot(
        at=at * seconds,
        engines=page(engine(running=30.0, finished_total=at * 50.0, awake=awake)),
        gpus=(gpu(total=TOTAL, used=held_bytes, inside=inside),),
    )
    return replace(sample, engine_status=EngineStatus(state=EngineState.SERVING, restarts=restarts))


def follow(tracks: InsideTracks, sample: Snapshot) -> InsideTracks:
    return update_insides(tracks, sample, observe_gpus(sample, sample.devices))


def followed(looks: int, grown: Callable[[int], Grown], tracks: InsideTracks | None = None) -> InsideTracks:
    tracks = {} if tracks is None else tracks
    for at in range(looks):
        tracks = follow(tracks, look(at, grown(at)))
    return tracks


def tensors(at: int) -> Grown:
    return at * LEAK, 0, 0
