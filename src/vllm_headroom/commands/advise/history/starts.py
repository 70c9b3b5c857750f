"""Starts of the engine that came to nothing, in a trace."""

from __future__ import annotations

from vllm_headroom.commands.advise.facts import Start
from vllm_headroom.commands.advise.history.gpu_history import others_bytes
from vllm_headroom.model import EnginePage, Failure, Gpu, Snapshot
from vllm_headroom.units import GIB

HELD_BYTES = GIB
"""Where processes are not seen, an engine is there while this much is held; a CUDA context alone takes less."""


class Starts:
    """Follows the lives of the engine; one that ended and never served is a failed start.

    `serving` is whether this life has served, also while its page cannot be read.
    """

    def __init__(self) -> None:
        self.failed: list[Start] = []
        self.serving = False
        self._served: str | None = None
        self._life: str | None = None
        self._now: Start | None = None
        self._idle_room: float | None = None

    def step(self, snapshot: Snapshot) -> None:
        """Go on to the next sample."""
        gpus = () if isinstance(snapshot.gpus, Failure) else snapshot.gpus
        life = _life(snapshot, gpus)
        if isinstance(snapshot.engines, EnginePage) and snapshot.engines.engines:
            self._served, self._now, self.serving = life, None, True
            return
        self.serving = self.serving and life is not None and life == self._served
        if self._now is not None and life != self._life:
            self.failed.append(self._now)
            self._now = None
        if life is None:
            self._served = None
            self._idle_room = _room(gpus)
        elif life != self._served:
            self._life, self._now = life, self._grown(gpus)

    def _grown(self, gpus: tuple[Gpu, ...]) -> Start:
        """Return the start that goes on with one more reading, or a new one."""
        held = max((gpu.held_bytes or 0 for gpu in gpus), default=0)
        others = max((others_bytes(gpu) or 0.0 for gpu in gpus), default=0.0)
        room, before = _room(gpus), self._now
        if before is None:
            return Start(
                most_held_bytes=held,
                least_room_bytes=room,
                most_others_bytes=others,
                room_before_bytes=self._idle_room,
            )
        rooms = [known for known in (room, before.least_room_bytes) if known is not None]
        return Start(
            most_held_bytes=max(held, before.most_held_bytes),
            least_room_bytes=min(rooms, default=None),
            most_others_bytes=max(others, before.most_others_bytes),
            room_before_bytes=before.room_before_bytes,
        )


def _life(snapshot: Snapshot, gpus: tuple[Gpu, ...]) -> str | None:
    """Return what names the engine's processes, None while there are none."""
    if isinstance(snapshot.processes, Failure):
        return "held" if any((gpu.held_bytes or 0) > HELD_BYTES for gpu in gpus) else None
    started = [process.started_at_seconds for process in snapshot.processes]
    return f"{min(started):.2f}" if started else None


def _room(gpus: tuple[Gpu, ...]) -> float | None:
    """Return the least that is left on a GPU; None where none was read."""
    memories = [gpu.reading.memory for gpu in gpus if gpu.reading.memory is not None]
    rooms = [memory.total_bytes - (memory.reserved_bytes or 0) - memory.used_bytes for memory in memories]
    return max(0.0, float(min(rooms))) if rooms else None
