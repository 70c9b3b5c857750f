"""Ends of an engine that had served, in a trace."""

from __future__ import annotations

from typing import Final

from vllm_headroom.commands.advise.history.starts import room_bytes
from vllm_headroom.commands.advise.limits import GONE_SHARE, SOMEBODY_BYTES
from vllm_headroom.commands.advise.lives import Ending
from vllm_headroom.derive.page_facts import begun_anew, finished, life, named, running_requests
from vllm_headroom.model import EnginePage, Failure, Gpu, Snapshot

ORPHAN_SHARE: Final = 0.5
"""Ours: where others have at once half of what the engine let go, it is its own: what it left behind."""


class Orphans:
    """What processes of an engine that ended still hold of one GPU: nobody finds them to be the engine's any more."""

    def __init__(self) -> None:
        self.n_bytes = 0.0
        self._engine_bytes, self._others_bytes = 0.0, 0.0

    def step(self, engine_bytes: float, others_bytes: float) -> float:
        """Take what the engine and others hold now; return what others hold without the orphans."""
        fell, rose = self._engine_bytes - engine_bytes, others_bytes - self._others_bytes
        if fell > GONE_SHARE * self._engine_bytes and rose >= ORPHAN_SHARE * fell:
            self.n_bytes = min(fell, rose)
        self.n_bytes = min(self.n_bytes, others_bytes)
        self._engine_bytes, self._others_bytes = engine_bytes, others_bytes
        rest = others_bytes - self.n_bytes
        return rest if rest > SOMEBODY_BYTES else 0.0


class Endings:
    """Follows an engine that serves until its page tells of another life, or is gone together with its memory."""

    def __init__(self) -> None:
        self.found: list[Ending] = []
        self._served: tuple[EnginePage, tuple[Gpu, ...]] | None = None

    def step(self, snapshot: Snapshot, orphan_bytes: float) -> None:
        """Go on to the next sample; `orphan_bytes` is what its processes left behind."""
        gpus = () if isinstance(snapshot.gpus, Failure) else snapshot.gpus
        page = snapshot.engines if isinstance(snapshot.engines, EnginePage) and named(snapshot.engines) else None
        if self._served is not None and _ended(*self._served, page, gpus):
            running, room = running_requests(self._served[0]), room_bytes(self._served[1])
            ending = Ending(seconds=snapshot.time_seconds, running=running, room_bytes=room, orphan_bytes=orphan_bytes)
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
    known = [gpu.held_bytes for gpu in gpus if gpu.held_bytes is not None]
    return float(sum(known)) if known else None
