"""What a page says of the server as a whole: all its engines taken together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from vllm_headroom.model import EnginePage, EngineReading

RESTART_SHARE: Final = 0.5


def engines(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return what each engine says, nothing where the page could not be read."""
    return () if page is None else page.engines


def named(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return the engines with a model's name: before its first request, vLLM V0 tells its settings and no name."""
    return tuple(engine for engine in engines(page) if engine.model_name)


def together(values: Iterable[float | None]) -> float | None:
    """Return the sum; None where one is unknown, for the rest is not the whole, or there is none."""
    known: list[float] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return sum(known) if known else None


def running_requests(page: EnginePage | None) -> float | None:
    """Return the requests all engines of the page run; None where one does not say, or there is none.

    One that sleeps runs none: what its page shows then was frozen in it.
    """
    return together(0.0 if each.running and each.awake is False else each.running for each in named(page))


def finished(page: EnginePage | None) -> float | None:
    """Return the requests all engines of the page finished; None where one does not say."""
    return together(engine.finished_total for engine in named(page))


def life(page: EnginePage | None) -> str | None:
    """Return what names this life of the server: when it started, where the page says so."""
    started = {engine.started_at_seconds for engine in engines(page) if engine.started_at_seconds is not None}
    return ",".join(sorted(f"{seconds:.3f}" for seconds in started)) or None


def begun_anew(life: str | None, new_life: str | None, finished: float | None, new_finished: float | None) -> bool:
    """Return whether the second pair belongs to another life than the first; what is unknown tells nothing.

    A counter that falls within one life was reset. Of several servers that answer in turn the latest start is the life;
    an earlier one is a restart only where the count is less than half, be it that the clock was set: servers that share
    the load count about alike.
    """
    fell = finished is not None and new_finished is not None and new_finished < RESTART_SHARE * finished
    if life is None or new_life is None:
        return fell
    if life == new_life:  # nearly always: their parts are not looked at then
        return False
    before, now = _latest(life), _latest(new_life)
    return now > before or (now < before and fell) or life.count(",") != new_life.count(",")


def _latest(life: str) -> tuple[int, str]:
    """Return what orders lives by their latest start; a process has its pid before it."""
    starts = [name.rpartition(":")[2] for name in life.split(",")]
    return max((len(start), start) for start in starts)


def awake(page: EnginePage | None) -> bool | None:
    """Return False while an engine of the page sleeps; None where none says."""
    said = [engine.awake for engine in engines(page) if engine.awake is not None]
    return all(said) if said else None
