"""Which GPUs are the engine's though they were lost before this daemon began?"""

from __future__ import annotations

from msgspec.structs import replace

from vllm_headroom.model import Gpu, Snapshot
from vllm_headroom.vocabulary import Attribution


def with_lost(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with whose its GPUs are where some that this life of the engine had do not show any more.

    A GPU that does not open tells no UUID, and NVML lists no process on it: it is the engine's where no more of them do
    not open than are missing. Another is not, though it be the only one left.
    """
    known = {} if snapshot.life is None else dict(snapshot.life.first_rooms)
    missing = sorted(known.keys() - {gpu.reading.uuid for gpu in snapshot.devices})
    unopened = sum(not gpu.reading.uuid for gpu in snapshot.devices)
    if not missing or not snapshot.devices:
        return snapshot
    name = missing[0] if len(missing) == 1 else ""

    def whose(gpu: Gpu) -> Gpu:
        if not gpu.reading.uuid and unopened <= len(missing):
            reading = replace(gpu.reading, uuid=name)
            return replace(gpu, reading=reading, attribution=gpu.attribution or Attribution.PROCESS)
        if gpu.attribution is Attribution.SINGLE and gpu.reading.uuid not in known:
            return replace(gpu, attribution=None, held_bytes=None)
        return gpu

    return replace(snapshot, gpus=tuple(map(whose, snapshot.devices)))
