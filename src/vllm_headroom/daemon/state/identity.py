"""Which life of which engine a page is of."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from vllm_headroom.derive.page_facts import finished, life, named
from vllm_headroom.model import EnginePage, Failure

COUNTED_SECONDS: Final = 300.0
"""A counter alone vouches for a gap of this length. Nothing is said of growth before ten minutes of work, and a new
engine does not catch up with ten minutes of work in five, less its start."""


class Identity(Struct, frozen=True, kw_only=True):
    """What names an engine and its life: its models, when it started and how far it has counted, where it says so."""

    models: tuple[str, ...]
    life: str | None
    finished_total: float | None


def identity(page: EnginePage | Failure) -> Identity | None:
    """Return whose page it is; None while no engine on it has a name."""
    if isinstance(page, Failure) or not named(page):
        return None
    models = sorted({engine.model_name for engine in named(page)})
    return Identity(models=tuple(models), life=life(page), finished_total=finished(page))


def foreign(saved: Identity, now: Identity, gap_seconds: float) -> str | None:
    """Return why this is not the life that was saved; None when it is.

    Without a start time on both sides the counter has to vouch: it must be known, go on and not for too long.
    """
    if now.models != saved.models:
        return f"it is of another model ({', '.join(saved.models)})"
    if now.life != saved.life:
        return "it is of another engine, or of the time before the engine's restart"
    if now.life is not None:
        return None
    if saved.finished_total is None or now.finished_total is None or now.finished_total < saved.finished_total:
        return "the engine tells no start time and its count of requests does not go on from there"
    if gap_seconds > COUNTED_SECONDS:
        return (
            f"the engine tells no start time and {gap_seconds:.0f} s are too long a gap to go by its count of requests"
        )
    return None
