"""The kinds of history that tell the memory of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from vllm_headroom import catalog
from vllm_headroom.commands.replay.prometheus.join import Kind, Side, Value

_MIB: Final = 2**20
_FACTS: Final = ("total", "used", "reserved", "engine", "other")


def _own_sample(values: Iterable[Value]) -> Side:
    """Return the devices this exporter took for the engine's."""
    ours: dict[str, bool] = {}
    memory: list[Value] = []
    for series, value in values:
        if series.name == catalog.GPU_INFO.name:
            uuid = series.labels.get("uuid", "")
            ours[uuid] = ours.get(uuid, False) or bool(series.labels.get("attribution"))
        else:
            memory.append((series, value))
    return [device for device in _own_memory(memory) if ours.get(device["uuid"], True)]


def _sample(fields: Mapping[str, str], *, uuid_label: str, unit_bytes: int = 1) -> Callable[[Iterable[Value]], Side]:
    """Return what makes devices of values; where a series has a holder, that is its field."""

    def sample(values: Iterable[Value]) -> Side:
        devices: dict[str, dict[str, float]] = {}
        for series, value in values:
            facts = devices.setdefault(series.labels.get(uuid_label, ""), {})
            facts[series.labels.get("holder", fields[series.name])] = value
            if (index := series.labels.get("gpu", "")).isdecimal():
                facts["gpu"] = int(index)
        return [_device(uuid, facts, unit_bytes) for uuid, facts in sorted(devices.items())]

    return sample


def _device(uuid: str, facts: Mapping[str, float], unit_bytes: int) -> dict[str, Any]:
    """Return the device as a trace has it; without a total, it is what is used, free and reserved.

    Where the reserved part is not exported either, that sum falls short of the device by it, and what is left on the
    device is still right.
    """
    known = {fact: round(facts[fact] * unit_bytes) for fact in (*_FACTS, "free") if fact in facts}
    if "used" in known and "free" in known:
        known.setdefault("total", known["used"] + known["free"] + known.get("reserved", 0))
    index = facts.get("gpu")
    device: dict[str, Any] = {"gpu": None if index is None else int(index), "uuid": uuid}
    return device | {fact: known.get(fact) for fact in _FACTS}


_OWN_FIELDS: Final = {
    catalog.GPU_MEMORY_TOTAL.name: "total",
    catalog.GPU_MEMORY_USED.name: "used",
    catalog.GPU_MEMORY_RESERVED.name: "reserved",
    catalog.GPU_MEMORY_HELD.name: "held",
}
_own_memory: Final = _sample(_OWN_FIELDS, uuid_label="uuid")
OWN_GPUS: Final = Kind(
    side="gpus",
    lead=(catalog.GPU_MEMORY_USED.name,),
    names=(*_OWN_FIELDS, catalog.GPU_INFO.name),
    identity=frozenset(("gpu", "uuid", "holder", "attribution")),
    sample=_own_sample,
)
_DCGM_FIELDS: Final = {
    "DCGM_FI_DEV_FB_USED": "used",
    "DCGM_FI_DEV_FB_FREE": "free",
    "DCGM_FI_DEV_FB_RESERVED": "reserved",
}
DCGM_GPUS: Final = Kind(
    side="gpus",
    lead=("DCGM_FI_DEV_FB_USED",),
    names=tuple(_DCGM_FIELDS),
    identity=frozenset(("gpu", "UUID")),
    sample=_sample(_DCGM_FIELDS, uuid_label="UUID", unit_bytes=_MIB),  # dcgm-exporter, default-counters.csv: in MiB
)
_SMI_FIELDS: Final = {
    "nvidia_smi_memory_used_bytes": "used",
    "nvidia_smi_memory_total_bytes": "total",
    "nvidia_smi_memory_reserved_bytes": "reserved",
    "nvidia_smi_index": "gpu",
}
SMI_GPUS: Final = Kind(
    side="gpus",
    lead=("nvidia_smi_memory_used_bytes",),
    names=tuple(_SMI_FIELDS),
    identity=frozenset(("uuid",)),
    sample=_sample(_SMI_FIELDS, uuid_label="uuid"),
)
