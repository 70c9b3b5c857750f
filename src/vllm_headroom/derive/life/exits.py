"""Why did a life end, as far as that is known?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_headroom.derive.life.signs import owned
from vllm_headroom.model import Gpu, Snapshot
from vllm_headroom.vocabulary import ExitReason

TIGHT_BYTES: Final = 256 * 2**20
SHRUNK_RATIO: Final = 0.5
"""A GPU ran out of memory when the least that was free in the last minute is below both: this much, and this share of
what was free when the engine had just become ready. An engine that was made to leave little is not called so."""


def rooms(snapshot: Snapshot) -> dict[str, int]:
    """Return the least that was free on each of the engine's GPUs in the last minute, by UUID."""
    found = ((gpu.reading.uuid, _room(gpu)) for gpu in owned(snapshot))
    return {uuid: room for uuid, room in found if room is not None}


def tight(first: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Return whether a GPU has run full since the engine became ready, when `first` was free."""
    return any(uuid in first and room <= min(TIGHT_BYTES, SHRUNK_RATIO * first[uuid]) for uuid, room in now.items())


def cause(*, replaced: bool, was_tight: bool, was_killed: bool) -> ExitReason:
    """Return the reason of an end, the kernel's own word first; what is not known is `gone`."""
    if was_killed:
        return ExitReason.OOM_KILLED
    if was_tight:
        return ExitReason.OUT_OF_MEMORY
    return ExitReason.REPLACED if replaced else ExitReason.GONE


def _room(gpu: Gpu) -> int | None:
    memory = gpu.reading.memory
    if memory is None:
        return None
    used_bytes = max(memory.used_bytes, gpu.reading.used_peak_bytes or 0)
    return memory.total_bytes - (memory.reserved_bytes or 0) - used_bytes
