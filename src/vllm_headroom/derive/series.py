"""The labels and samples of series, and a limit on how many series are remembered."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final, TypeVar

from vllm_headroom.model import EngineReading, Gpu, Metric, Sample

MOST_REMEMBERED: Final = 256
"""The maximum number of entries kept for engines or GPUs that are not currently visible. A page may
show this many engines. No machine has this many GPUs or GPU partitions. Names may change at every
tick, so without a limit, memory would keep growing.
"""

K = TypeVar("K")
V = TypeVar("V")


def limit_remembered(entries: Mapping[K, V], present: Collection[K]) -> dict[K, V]:
    """Return the entries.

    Return the entries, or only those named in `present` if there are more than MOST_REMEMBERED.
    """
    if len(entries) <= MOST_REMEMBERED:
        return dict(entries)
    return {name: entry for name, entry in entries.items() if name in present}


def label_gpu(gpu: Gpu) -> tuple[str, str]:
    """Return the values of the labels `gpu` and `uuid`."""
    return str(gpu.reading.index), gpu.reading.uuid


def label_engine(engine: EngineReading) -> tuple[str, str]:
    """Return the values of the labels `model_name` and `engine`."""
    return engine.model_name, engine.engine


def make_states(metric: Metric, labels: tuple[str, ...], current: StrEnum) -> tuple[Sample, ...]:
    """Return one sample per state: 1 for the current state, 0 for the others."""
    members = type(current).__members__.values()  # three times as fast as a loop over the class
    return tuple(
        [
            Sample(metric, (*labels, str(member)), 1.0 if member is current else 0.0)
            for member in members
        ]
    )


def make_facts(
    table: tuple[tuple[Metric, str], ...], labels: tuple[str, ...], reading: object
) -> list[Sample]:
    """Return the samples of a reading.

    The table has each metric and the attribute that it exports. An attribute that is None has no
    sample. There are no samples if the reading is None.
    """
    if reading is None:
        return []
    samples = []
    for metric, attribute in table:
        value = getattr(reading, attribute)
        if value is not None:
            samples.append(Sample(metric, labels, float(value)))
    return samples
