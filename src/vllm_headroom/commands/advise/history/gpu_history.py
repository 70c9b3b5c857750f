"""What one GPU had left over a trace."""

from __future__ import annotations

from vllm_headroom.commands.advise.facts import Extent, GpuFacts, Leak, Shortage, Spell
from vllm_headroom.commands.advise.history.lives import others_bytes
from vllm_headroom.commands.advise.limits import APART_SECONDS, LASTING_SECONDS, PEAK_BYTES
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.model import Gpu, Leftover

MOSTLY = 0.5
"""Ours: a spell with more room in it than that is made of peaks."""


class GpuHistory:
    """Follows one GPU; what others take is not counted as the engine's shortage."""

    def __init__(self, index: int, uuid: str, began_seconds: float) -> None:
        self._index, self._uuid = index, uuid
        self._usable: float | None = None
        self._least_room: float | None = None
        self._others: Extent | None = None
        self._leftovers: tuple[Leftover, ...] = ()
        self._roomy_running: float | None = None
        self._held_since = began_seconds
        self._open: _Open | None = None
        self._spells: list[Spell] = []

    def rest(self, now: float, *, ended_engine: bool) -> None:
        """Close a spell that ends with the engine, or as it falls asleep: it takes hold of the GPU anew."""
        self._close(ended_engine=ended_engine)
        self._held_since = now

    def step(self, gpu: Gpu, now: float, seconds: float, running: float | None, *, serving: bool) -> None:
        """Go on to the next sample, `seconds` after the one before, with so many requests running in all ranks.

        What a start takes for a moment is no shortage of an engine that serves.
        """
        memory = gpu.reading.memory
        if memory is None:
            return
        self._usable, self._leftovers = float(memory.usable_bytes), gpu.leftovers
        room, others = self._usable - memory.used_bytes, others_bytes(gpu)
        self._least_room = max(0.0, room if self._least_room is None else min(room, self._least_room))
        if others is not None:
            self._others = (self._others or Extent(others, others, others)).widened(others)
        if serving:
            self._shortage(room + (others or 0.0), now, seconds, running)

    def facts(self, leak: Leak) -> GpuFacts:
        """Return what is known, with the spell that goes on."""
        closed = None if self._open is None else self._open.spell(self._held_since, ended_engine=False)
        return GpuFacts(
            index=self._index,
            uuid=self._uuid,
            leak=leak,
            usable_bytes=self._usable,
            least_room_bytes=self._least_room,
            others=self._others,
            spells=(*self._spells, *(() if closed is None else (closed,))),
            leftovers=self._leftovers,
            roomy_running=self._roomy_running,
        )

    def _shortage(self, room: float, now: float, seconds: float, running: float | None) -> None:
        if room >= LOW_BYTES:
            if self._open is not None and now - self._open.last_seconds >= APART_SECONDS:
                self._close(ended_engine=False)
            if running and self._open is None:
                self._roomy_running = max(self._roomy_running or 0.0, running)
            return
        if self._open is None:
            self._open = _Open(now)
        self._open.step(room, now, seconds, running)

    def _close(self, *, ended_engine: bool) -> None:
        if self._open is not None:
            spell = self._open.spell(self._held_since, ended_engine=ended_engine)
            self._spells += () if spell is None else (spell,)
        self._open = None


class _Open:
    """A spell that goes on."""

    def __init__(self, began_seconds: float) -> None:
        self.last_seconds = began_seconds
        self._began_seconds = began_seconds
        self._low_seconds = 0.0
        self._least_bytes = float(LOW_BYTES)
        self._running: float | None = None

    def step(self, room: float, now: float, seconds: float, running: float | None) -> None:
        """Take a sample with little room."""
        self._low_seconds += seconds
        self.last_seconds = now
        if room < self._least_bytes:
            self._least_bytes, self._running = max(0.0, room), running

    def spell(self, held_since: float, *, ended_engine: bool) -> Spell | None:
        """Return what it was; None where it was short and not near the end of the card."""
        lasted = self.last_seconds - self._began_seconds
        if self._low_seconds >= LASTING_SECONDS and self._low_seconds >= MOSTLY * lasted:
            from_the_start = self._began_seconds - held_since <= LASTING_SECONDS
            kind = Shortage.LEVEL if from_the_start else Shortage.RISEN
        elif ended_engine or self._least_bytes < PEAK_BYTES:
            kind = Shortage.PEAK
        else:
            return None
        return Spell(
            kind=kind,
            least_bytes=self._least_bytes,
            began_seconds=self._began_seconds,
            seconds=self._low_seconds,
            running=self._running,
            ended_engine=ended_engine,
        )
