"""The kinds of history that tell the memory of GPUs, the load of engines and the memory of their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from prometheus_client.samples import Sample

from vllm_headroom import catalog
from vllm_headroom.commands.replay.prometheus.join import Exporter, Side, Value
from vllm_headroom.model import INPUTS, Failure
from vllm_headroom.parse.engines import engine_page
from vllm_headroom.parse.profile import Profile
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.trace.entries import engine_entry

_MIB: Final = 2**20
_MEMORY_FACTS: Final = ("total", "used", "reserved", "engine", "other")


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
    known = {fact: round(facts[fact] * unit_bytes) for fact in (*_MEMORY_FACTS, "free") if fact in facts}
    if "used" in known and "free" in known:
        known.setdefault("total", known["used"] + known["free"] + known.get("reserved", 0))
    index = facts.get("gpu")
    device: dict[str, Any] = {"gpu": None if index is None else int(index), "uuid": uuid}
    return device | {fact: known.get(fact) for fact in _MEMORY_FACTS}


_OWN_MEMORY_FIELDS: Final = {
    catalog.GPU_MEMORY_TOTAL.name: "total",
    catalog.GPU_MEMORY_USED.name: "used",
    catalog.GPU_MEMORY_RESERVED.name: "reserved",
    catalog.GPU_MEMORY_HELD.name: "held",
}
_own_memory: Final = _sample(_OWN_MEMORY_FIELDS, uuid_label="uuid")
OWN_GPUS: Final = Exporter(
    side="gpus",
    lead=(catalog.GPU_MEMORY_USED.name,),
    names=(*_OWN_MEMORY_FIELDS, catalog.GPU_INFO.name),
    identity=frozenset(("gpu", "uuid", "holder", "attribution")),
    sample=_own_sample,
)
_DCGM_FIELDS: Final = {
    "DCGM_FI_DEV_FB_USED": "used",
    "DCGM_FI_DEV_FB_FREE": "free",
    "DCGM_FI_DEV_FB_RESERVED": "reserved",
}
DCGM_GPUS: Final = Exporter(
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
SMI_GPUS: Final = Exporter(
    side="gpus",
    lead=("nvidia_smi_memory_used_bytes",),
    names=tuple(_SMI_FIELDS),
    identity=frozenset(("uuid",)),
    sample=_sample(_SMI_FIELDS, uuid_label="uuid"),
)


_FACTS: Final = ("running", "waiting", "finished_total", "kv_used_ratio", "awake")
"""What the detector and the picture look at: every series more is a series more to ask the server for."""

PARTS: Final = frozenset({"finished_reason", "is_streaming"})
"""Labels of counters whose series are parts of one amount."""

_OWN_FIELDS: Final = {each.metric: field for field, each in INPUTS.items() if each.metric and field in _FACTS}


def _own(values: Iterable[Value]) -> Side:
    engines: dict[tuple[str, str], dict[str, Any]] = {}
    for series, value in values:
        key = (series.labels.get("model_name", ""), series.labels.get("engine", "0"))
        field = _OWN_FIELDS[series.name]
        engines.setdefault(key, {})[field] = value > 0 if field == "awake" else value
    return [{"model_name": model, "engine": rank, **facts} for (model, rank), facts in sorted(engines.items())]


def _read(profile: Profile, values: Iterable[Value]) -> Side:
    """Read the series as the daemon reads the engine's page."""
    page = engine_page(profile, [Sample(series.name, dict(series.labels), value) for series, value in values])
    return [] if isinstance(page, Failure) else [engine_entry(engine) for engine in page.engines]


def _names(profile: Profile, *fields: str) -> tuple[str, ...]:
    wanted = [fact for fact in profile.facts if fact.field in fields and fact.label is None]
    families = dict.fromkeys(family for fact in wanted for family in fact.names)
    return tuple(prefix + family for prefix in profile.prefixes for family in families)


def _labels(profile: Profile) -> frozenset[str]:
    """Return the labels that tell an engine's own series apart, and not only their scrapes."""
    chosen = {fact.where[0] for fact in profile.facts if fact.where is not None}
    named = {profile.model_label, profile.engine_label, *profile.repeat_labels, *profile.replica_labels}
    return frozenset(named | chosen | PARTS) - {""}


OWN_ENGINES: Final = Exporter(
    side="engines",
    lead=(catalog.ENGINE_RUNNING.name,),
    names=tuple(_OWN_FIELDS),
    identity=frozenset(catalog.ENGINE),
    sample=_own,
)
OWN_PROCESSES: Final = Exporter(
    side="processes",
    lead=(catalog.HOST_MEMORY.name,),
    names=(catalog.HOST_MEMORY.name,),
    identity=frozenset(catalog.HOST_MEMORY.labels),
    sample=lambda values: [{"role": each.labels.get("process"), "rss": round(value)} for each, value in values],
)
ENGINES: Final = tuple(
    Exporter(
        side="engines",
        lead=_names(profile, "running"),
        names=_names(profile, *_FACTS, "kv_used_tokens", "kv_capacity_tokens"),
        identity=_labels(profile),
        sample=partial(_read, profile),
        has_start_time=any(fact.field == "started_at_seconds" for fact in profile.facts),
    )
    for profile in PROFILES
    if _names(profile, "running")
)
"""Every engine that tells how many requests run; without that the detector has no load to look at."""
