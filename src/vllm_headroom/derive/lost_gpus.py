"""The engine's GPUs that cannot be opened."""

from msgspec.structs import replace

from vllm_headroom.model import Gpu, Snapshot
from vllm_headroom.vocabulary import Attribution


def add_lost_gpus(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with unopened GPUs attributed to the engine, if they must be its own.

    A GPU that cannot be opened has no UUID and no process list. Where GPUs of the engine are
    missing, the unopened GPUs are the engine's if there are no more of them than missing ones.
    While GPUs of the engine are missing, another readable GPU is not assumed to be the engine's,
    even if it is the only one. The snapshot is returned unchanged where no GPU is missing.
    """
    if snapshot.engine_status is None or not snapshot.devices:
        return snapshot
    engine_uuids = {uuid for uuid, _ in snapshot.engine_status.first_room_bytes}
    missing_uuids = sorted(engine_uuids - {gpu.reading.uuid for gpu in snapshot.devices})
    if not missing_uuids:
        return snapshot
    unopened_count = sum(1 for gpu in snapshot.devices if not gpu.reading.uuid)
    is_engines = unopened_count <= len(missing_uuids)
    # Where several GPUs are missing, it is unknown which of them an unopened GPU is.
    lost_uuid = missing_uuids[0] if len(missing_uuids) == 1 else ""
    gpus = []
    for gpu in snapshot.devices:
        if is_engines and not gpu.reading.uuid:
            gpus.append(_attribute_lost(gpu, lost_uuid))
        elif gpu.attribution is Attribution.SINGLE and gpu.reading.uuid not in engine_uuids:
            gpus.append(replace(gpu, attribution=None, held_bytes=None))
        else:
            gpus.append(gpu)
    return replace(snapshot, gpus=tuple(gpus))


def _attribute_lost(gpu: Gpu, uuid: str) -> Gpu:
    """Return an unreadable GPU as one of the engine's; the UUID is empty where not known."""
    return replace(
        gpu,
        reading=replace(gpu.reading, uuid=uuid),
        attribution=gpu.attribution or Attribution.PROCESS,
    )
