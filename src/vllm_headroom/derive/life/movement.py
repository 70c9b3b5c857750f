"""When did the work of each engine last move?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.page_facts import named
from vllm_headroom.derive.readings import engine_labels
from vllm_headroom.model import EnginePage, EngineReading

IDLE_SECONDS: Final = 60.0
"""How long no request must have run or waited before what the KV cache holds is called stranded."""

Labels = tuple[str, str]


class Movement(Struct, frozen=True, kw_only=True):
    """What one engine had counted, when that last changed and since when it has been idle, on the monotonic clock.

    `moved_seconds` is of its work, and now while it has none; `done_seconds` is when its tokens or steps last changed.
    """

    counted: tuple[float | None, ...]
    busy: bool
    moved_seconds: float
    done_seconds: float
    idle_seconds: float | None
    kv_used_ratio: float | None


def moved(before: Mapping[Labels, Movement], page: EnginePage, now: float) -> dict[Labels, Movement]:
    """Return the movement of each engine of the page; one that was idle or slept starts to move when it has work."""
    return {engine_labels(engine): _of(before.get(engine_labels(engine)), engine, now) for engine in named(page)}


def progress_age(movements: Mapping[Labels, Movement], now: float, owed_since: float | None = None) -> float | None:
    """Return the longest time in which an engine that has work has not moved; None where none has work that shows.

    A request of the daemon's own that has waited since `owed_since` is work, be it on the page or not: the gauges of a
    core that hangs show what was there before. It is as old as what was done last, whoever had asked for it.
    """
    ages = [now - each.moved_seconds for each in movements.values() if each.busy and any(map(_is_known, each.counted))]
    if owed_since is not None and movements:
        ages.append(now - max(owed_since, *(each.done_seconds for each in movements.values())))
    return max(ages, default=None)


def stranded(movements: Mapping[Labels, Movement], now: float) -> tuple[tuple[Labels, float], ...]:
    """Return what the KV cache of each engine still holds that has been awake and idle for a minute."""
    return tuple(
        (labels, each.kv_used_ratio)
        for labels, each in movements.items()
        if each.kv_used_ratio is not None and each.idle_seconds is not None and now - each.idle_seconds >= IDLE_SECONDS
    )


def worked(page: EnginePage) -> bool | None:
    """Return whether any engine of the page has ever done something; taken for granted where none shows on it.

    None where they have a name and tell nothing of work, as Dynamo's own series.
    """
    if not page.engines:
        return True
    told = [fact for engine in named(page) for fact in (*_counted(engine)[:-1], engine.running)]
    return None if told and not any(map(_is_known, told)) else any(told)


def _of(before: Movement | None, engine: EngineReading, now: float) -> Movement:
    asleep = engine.awake is False
    counted, busy = _counted(engine), bool(engine.running or engine.waiting) and not asleep
    same = before is not None and before.counted == counted
    done = before is not None and before.counted[_DONE] == counted[_DONE]
    rested = before.idle_seconds if before is not None and before.idle_seconds is not None else now
    return Movement(
        counted=counted,
        busy=busy,
        moved_seconds=before.moved_seconds if before is not None and before.busy and same else now,
        done_seconds=before.done_seconds if before is not None and done else now,
        idle_seconds=None if busy or asleep or engine.running is None else rested,
        kv_used_ratio=engine.kv_used_ratio,
    )


def _is_known(value: float | None) -> bool:
    return value is not None


_DONE: Final = slice(1, 4)
"""Tokens and steps: a request that is given up counts as finished and frees its share of the cache."""


def _counted(engine: EngineReading) -> tuple[float | None, ...]:
    """Return what moves while the engine works.

    A step whose requests all prefill counts nothing (vllm/v1/engine/async_llm.py: no IterationStats without outputs);
    what moves then is the KV cache, which takes up each chunk. Waiting requests do not count: they come from outside.
    """
    return (
        engine.finished_total,
        engine.prompt_tokens_total,
        engine.generation_tokens_total,
        engine.steps_total,
        engine.kv_used_ratio,
    )
