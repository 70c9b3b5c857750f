"""What one GPU held in one life of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.commands.postmortem.facts import GpuAtEnd, more
from vllm_headroom.model import Gpu
from vllm_headroom.trace.course import Moment
from vllm_headroom.vocabulary import LeakState

PEAK_SECONDS: Final = 60.0
LAST_SECONDS: Final = 30.0 + PEAK_SECONDS
"""A tick, and the minute that the highest memory in use is kept for."""

BEFORE_SECONDS: Final = 300.0
"""What grew since then grew in a burst."""


_MANY: Final = 2**31
"""Where it is not known how many there were, none has joined them."""


class _Look(Struct, frozen=True, kw_only=True):
    """One GPU in one sample; what the engine held at the peak, where that is known."""

    seconds: float
    gpu: Gpu
    room_bytes: int | None
    engine_bytes: int | None


class Looks:
    """Keeps the first look of a life, and those of its last minutes."""

    def __init__(self) -> None:
        self._first: _Look | None = None
        self._last: deque[_Look] = deque()

    def add(self, gpu: Gpu, now: float, *, anew: bool) -> None:
        """Add a look; the first one is `anew` this one when the engine begins to serve."""
        look = _look(gpu, now)
        self._first = look if anew or self._first is None else self._first
        self._last.append(look)
        while self._last[0].seconds < now - BEFORE_SECONDS - LAST_SECONDS:
            self._last.popleft()

    @property
    def first_share(self) -> float:
        """How much of what it last held the engine held at first; 0 where that is not known."""
        first, last = (look and look.gpu.held_bytes for look in (self._first, self._last[-1]))
        return first / last if first and last else 0.0

    def facts(self, now: float, leak: LeakState, leaked: Moment | None) -> GpuAtEnd:
        """Return what to know at the end of the life; only after a first look."""
        first = self._first or self._last[0]
        recent = now - BEFORE_SECONDS - LAST_SECONDS
        last = [look for look in self._last if look.seconds >= self._last[-1].seconds - LAST_SECONDS]
        before = [look for look in (first, *self._last) if recent <= look.seconds < now - LAST_SECONDS]
        if not before and first.seconds >= recent:
            before = [first]
        memory, engine_bytes = first.gpu.reading.memory, _most(look.engine_bytes for look in last)
        return GpuAtEnd(
            index=first.gpu.reading.index,
            uuid=first.gpu.reading.uuid,
            total_bytes=None if memory is None else memory.total_bytes,
            usable_bytes=None if memory is None else memory.usable_bytes,
            first_room_bytes=first.room_bytes,
            last_room_bytes=_least(look.room_bytes for look in last),
            last_engine_bytes=engine_bytes,
            grown_bytes=more(first.gpu.held_bytes, engine_bytes),
            jumped_bytes=more(_most(look.gpu.held_bytes for look in before), engine_bytes),
            first_other_bytes=first.gpu.other_bytes,
            last_other_bytes=_most(look.gpu.other_bytes for look in last),
            joined=(_most(look.gpu.process_count for look in last) or 0) > (first.gpu.process_count or _MANY),
            between=_least(look.room_bytes for look in last)
            != _least(memory.left_bytes for look in last if (memory := look.gpu.reading.memory)),
            leak=leak,
            leaked=leaked,
        )

    def see(self, used: Iterable[tuple[float, int]], shift: float) -> None:
        """Let the newest look have the highest memory in use that was seen since, or in the minute before it.

        `used` has the times of the clock, which are `shift` behind those of the looks.
        """
        last = self._last[-1]
        known = [n_bytes for at, n_bytes in used if at + shift >= last.seconds - PEAK_SECONDS]
        peak_bytes = max((*known, last.gpu.reading.used_peak_bytes or 0))
        reading = replace(last.gpu.reading, used_peak_bytes=peak_bytes)
        self._last[-1] = _look(replace(last.gpu, reading=reading), last.seconds)


def _look(gpu: Gpu, now: float) -> _Look:
    memory, held_bytes = gpu.reading.memory, gpu.held_bytes
    if memory is None:
        return _Look(seconds=now, gpu=gpu, room_bytes=None, engine_bytes=held_bytes)
    above = max(0, (gpu.reading.used_peak_bytes or 0) - memory.used_bytes)
    at_peak = None if held_bytes is None else held_bytes + above
    return _Look(seconds=now, gpu=gpu, room_bytes=memory.left_bytes - above, engine_bytes=at_peak)


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
