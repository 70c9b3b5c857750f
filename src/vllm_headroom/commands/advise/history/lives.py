"""How lives of the engine ended, in a trace: before one served, or while it did."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_headroom.commands.advise.facts import Ending, Start
from vllm_headroom.commands.advise.limits import SOMEBODY_BYTES
from vllm_headroom.derive.life.lives import Lives
from vllm_headroom.derive.page_facts import named, running_requests
from vllm_headroom.model import EnginePage, Gpu, Snapshot


class Ends:
    """Follows the lives of the engine, as the daemon tells them apart."""

    def __init__(self) -> None:
        self.failed: list[Start] = []
        self.found: list[Ending] = []
        self._served: tuple[EnginePage, tuple[Gpu, ...]] | None = None
        self._start: Start | None = None
        self._idle_room: float | None = None

    @property
    def serving(self) -> bool:
        """Whether this life has served, also while its page cannot be read."""
        return self._served is not None

    def step(self, snapshot: Snapshot, lives: Lives) -> bool:
        """Go on to the next sample, up to which there were these lives; return whether one has ended."""
        gpus, page = snapshot.devices, snapshot.page
        ended = snapshot.life is not None and snapshot.life.ended is not None
        if ended:
            self._end(snapshot.time_seconds, gpus)
        if page is not None and named(page):
            self._served, self._start = (page, gpus), None
        elif lives.newest is None or lives.newest.ended:
            self._idle_room = room_bytes(gpus)
        elif self._served is None:
            self._start = self._grown(gpus)
        return ended

    def _end(self, now: float, gpus: tuple[Gpu, ...]) -> None:
        if self._served is not None:
            page, had = self._served
            left = sum(leftover.used_bytes or 0 for gpu in gpus for leftover in gpu.leftovers)
            running, room = running_requests(page), room_bytes(had)
            self.found.append(Ending(seconds=now, running=running, room_bytes=room, orphan_bytes=float(left)))
        elif self._start is not None:
            self.failed.append(self._start)
        self._served = self._start = None

    def _grown(self, gpus: tuple[Gpu, ...]) -> Start:
        """Return the start that goes on with one more reading, or a new one."""
        before = self._start or Start(
            most_held_bytes=0.0, least_room_bytes=None, most_others_bytes=0.0, room_before_bytes=self._idle_room
        )
        rooms = [known for known in (room_bytes(gpus), before.least_room_bytes) if known is not None]
        return replace(
            before,
            most_held_bytes=max([before.most_held_bytes, *(gpu.held_bytes or 0 for gpu in gpus)]),
            least_room_bytes=min(rooms, default=None),
            most_others_bytes=max([before.most_others_bytes, *(others_bytes(gpu) or 0 for gpu in gpus)]),
        )


def others_bytes(gpu: Gpu) -> float | None:
    """Return what is not the engine's on a GPU, 0 up to SOMEBODY_BYTES; None where its share is not known."""
    memory = gpu.reading.memory
    if memory is None or gpu.engine_bytes is None:
        return None
    rest = float(max(0, memory.used_bytes - gpu.engine_bytes))
    return rest if rest > SOMEBODY_BYTES else 0.0


def room_bytes(gpus: tuple[Gpu, ...]) -> float | None:
    """Return the least that is left on a GPU; None where none was read."""
    rooms = [gpu.reading.memory.left_bytes for gpu in gpus if gpu.reading.memory is not None]
    return max(0.0, float(min(rooms))) if rooms else None
