"""What the engine's log reports about the last start and the exit before."""

from typing import Final

from vllm_headroom import catalog
from vllm_headroom.model import LogReading, Sample, Snapshot
from vllm_headroom.vocabulary import StartPart

FIELDS: Final = {
    StartPart.WEIGHTS: ("weights_bytes", "profiled_weights_bytes"),
    StartPart.ACTIVATIONS: ("activation_bytes",),
    StartPart.NON_TORCH: ("non_torch_bytes",),
    StartPart.CUDA_GRAPHS: ("graphs_bytes",),
    StartPart.KV_CACHE: ("kv_cache_bytes",),
}
"""For each part, the fields of ProcessFigures that may contain its size. The first field with a
value is used.
"""


def derive_startup(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the part sizes of the newest start, from the rank with the largest.

    A part has no sample if its size is missing or negative. A failed start logs negative sizes.
    """
    if not isinstance(snapshot.log, LogReading) or snapshot.log.start is None:
        return ()
    samples = []
    for part, fields in FIELDS.items():
        figures = (snapshot.log.start.find_largest(field) for field in fields)
        part_bytes = next((figure for figure in figures if figure is not None), None)
        if part_bytes is not None and part_bytes >= 0:
            samples.append(Sample(catalog.ENGINE_STARTUP, (str(part),), float(part_bytes)))
    return tuple(samples)


def derive_refusal(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the refused allocation of the last exit, or nothing once the engine serves again."""
    status = snapshot.engine_status
    if status is None or status.log is None or status.log.failure is None:
        return ()
    refusal = status.log.failure.refusal
    if refusal is None or refusal.asked_bytes is None:
        return ()
    return (Sample(catalog.ENGINE_REFUSED, (), float(refusal.asked_bytes)),)
