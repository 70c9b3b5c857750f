"""Ends of an engine that had served, in a trace."""

from __future__ import annotations

from vllm_headroom.commands.advise.history.starts import room_bytes
from vllm_headroom.commands.advise.limits import GONE_SHARE
from vllm_headroom.commands.advise.lives import Ending
from vllm_headroom.derive.page_facts import begun_anew, finished, life, named, running_requests
from vllm_headroom.model import EnginePage, Failure, Gpu, Snapshot


class Endings:
    """Follows an engine that serves until its page tells of another life, or is gone together with its memory."""

    def __init__(self) -> None:
        self.found: list[Ending] = []
        self._served: tuple[EnginePage, tuple[Gpu, ...]] | None = None

    def step(self, snapshot: Snapshot) -> None:
        """Go on to the next sample."""
        gpus = () if isinstance(snapshot.gpus, Failure) else snapshot.gpus
        page = snapshot.engines if isinstance(snapshot.engines, EnginePage) and named(snapshot.engines) else None
        if self._served is not None and _ended(*self._served, page, gpus):
            running, room = running_requests(self._served[0]), room_bytes(self._served[1])
            left = float(sum(_left(gpu) for gpu in gpus))
            ending = Ending(seconds=snapshot.time_seconds, running=running, room_bytes=room, orphan_bytes=left)
            self.found.append(ending)
            self._served = None
        if page is not None:
            self._served = page, gpus


def _ended(before: EnginePage, had: tuple[Gpu, ...], page: EnginePage | None, gpus: tuple[Gpu, ...]) -> bool:
    if page is not None:
        return begun_anew(life(before), life(page), finished(before), finished(page))
    held = _held(gpus)
    return held is not None and held < GONE_SHARE * (_held(had) or 0.0)


def _held(gpus: tuple[Gpu, ...]) -> float | None:
    known = [gpu.held_bytes - _left(gpu) for gpu in gpus if gpu.held_bytes is not None]
    return float(sum(known)) if known else None


def _left(gpu: Gpu) -> int:
    """Return what no living engine holds of a GPU; in the ledger it stays the engine's."""
    return sum(leftover.used_bytes or 0 for leftover in gpu.leftovers)
