"""Rules on engines that end before they serve."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, inf
from statistics import median
from typing import Final

from msgspec.structs import replace

from vllm_headroom.commands.advise.facts import Facts, Start
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, lowered, several
from vllm_headroom.commands.advise.limits import AIM_BYTES, FAILED_STARTS, HIGHEST_UTILIZATION
from vllm_headroom.commands.advise.rules.cache import split
from vllm_headroom.commands.advise.rules.room import ran_short, take_less
from vllm_headroom.commands.advise.settings import Flag
from vllm_headroom.derive.verdicts import LOW_BYTES, NEIGHBOUR_BYTES
from vllm_headroom.units import size

LOADED_RATIO: Final = 0.5
"""Ours: an engine that held half of the GPU before it gave up had loaded its model."""


def failing_starts(facts: Facts) -> Advice | None:
    """Fit where FAILED_STARTS and more ended before the engine served.

    With less than LOW_BYTES left, or on a GPU that others held already, the changes are those of the runbooks' README,
    branch A. With room left after the model was loaded, vLLM found none for its KV cache: "No available memory for the
    cache blocks", or a cache too small for one request of the longest kind.
    """
    starts = facts.failed_starts
    if len(starts) < FAILED_STARTS:
        return None
    taken = median(start.most_others_bytes for start in starts) > NEIGHBOUR_BYTES
    if not taken and all(start.least_room_bytes is None or start.least_room_bytes >= LOW_BYTES for start in starts):
        return _no_cache(facts, starts)
    return Advice(
        cause=Cause.START_UP,
        summary="The engine runs out of GPU memory while it starts."
        if not taken
        else "The engine ends while it starts, on a GPU that others hold already.",
        evidence=tuple(_evidence(starts)),
        changes=_beside_others(facts) if taken else _smaller(facts),
        remark='vLLM\'s log says at which step: look for "memory" in it.',
    )


def _no_cache(facts: Facts, starts: tuple[Start, ...]) -> Advice | None:
    usable = min((gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes), default=inf)
    loaded = tuple(start for start in starts if start.most_held_bytes >= LOADED_RATIO * usable)
    if len(loaded) < FAILED_STARTS:
        return None
    return Advice(
        cause=Cause.MODEL_DOES_NOT_FIT,
        summary="The engine loads its model and ends before it serves, with GPU memory left.",
        evidence=tuple(_evidence(loaded)),
        changes=several(_larger(facts, loaded), split(facts)),
        remark="vllm-headroom plan says what fits; a shorter longest request is enough where vLLM's log says so.",
    )


def _beside_others(facts: Facts) -> tuple[Change, ...]:
    move = Change(
        text="Find them with nvidia-smi on the node, and have their owner move or stop them; a left-over of this engine"
        " is ended with kill",
        cost="none to this engine",
    )
    rooms = [start.room_before_bytes for start in facts.failed_starts if start.room_before_bytes is not None]
    usable = [gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes]
    if not rooms or not usable or facts.settings.sizes_cache_in_bytes:
        return (move,)
    value = floor((min(rooms) - AIM_BYTES) / max(usable) * 100) / 100
    if facts.settings.gpu_memory_utilization is None and value >= HIGHEST_UTILIZATION:
        return (move,)
    share = lowered(
        facts,
        Flag.GPU_MEMORY_UTILIZATION,
        value,
        text=f"{size(min(rooms))} were free before the start, and vLLM refuses to start with less than its share",
        cost="a smaller KV cache, or none at all if the model does not fit; a restart",
    )
    return several(move, share)


def _smaller(facts: Facts) -> tuple[Change, ...]:
    rooms = [start.least_room_bytes for start in facts.failed_starts if start.least_room_bytes is not None]
    lower = take_less(facts, facts.gpus[0], AIM_BYTES - min(rooms)) if rooms and facts.gpus else None
    fewer = lowered(
        facts,
        Flag.MAX_NUM_SEQS,
        (facts.settings.max_num_seqs or 0) // 2,
        text="warming up the sampler and the graphs take less",
        cost="in a burst requests wait in the queue; a restart",
    )
    eager = Change(
        flag=Flag.ENFORCE_EAGER,
        text="captures no CUDA graphs, if it ends while it does",
        cost="every token comes slower; a restart",
    )
    wider = split(facts)
    if wider is not None:
        wider = replace(wider, text="if it ends while it loads the weights, which do not fit then")
    return several(lower, fewer, eager, wider)


def _larger(facts: Facts, starts: tuple[Start, ...]) -> Change | None:
    """Return a larger share where the GPU had more than AIM_BYTES left at all of these starts."""
    rooms = [start.least_room_bytes for start in starts if start.least_room_bytes is not None]
    now = facts.settings.gpu_memory_utilization
    if not rooms or min(rooms) <= AIM_BYTES or facts.settings.sizes_cache_in_bytes or now is None or ran_short(facts):
        return None
    usable = max(gpu.usable_bytes or 0.0 for gpu in facts.gpus)
    spare = (min(rooms) - AIM_BYTES) / usable
    value = floor(min(HIGHEST_UTILIZATION, now + spare) * 100) / 100
    if value <= now:
        return None
    return Change(
        flag=Flag.GPU_MEMORY_UTILIZATION,
        value=value,
        now=now,
        text=f"{size(min(rooms))} were left when it ended",
        cost="less room for bursts; a restart",
    )


def _evidence(starts: tuple[Start, ...]) -> Iterator[Evidence]:
    yield Evidence("failed_starts", len(starts), f"{len(starts)} starts ended before it served")
    held = max(start.most_held_bytes for start in starts)
    yield Evidence("most_held_bytes", held, f"it held {size(held)} of a GPU at the most")
    rooms = [start.least_room_bytes for start in starts if start.least_room_bytes is not None]
    if rooms:
        yield Evidence("least_room_bytes", min(rooms), f"{size(min(rooms))} were left at the least")
    others = max(start.most_others_bytes for start in starts)
    if others > 0:
        yield Evidence("most_others_bytes", others, f"others held {size(others)}")
