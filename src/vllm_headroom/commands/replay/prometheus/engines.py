"""The kinds of history that tell the load of engines and the memory of their processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final

from prometheus_client.samples import Sample

from vllm_headroom import catalog
from vllm_headroom.commands.replay.prometheus.join import Kind, Side, Value
from vllm_headroom.model import EngineReading, Failure
from vllm_headroom.parse.engines import engine_page
from vllm_headroom.parse.profiles.vllm import VLLM
from vllm_headroom.trace.entries import engine_entry

_FACTS: Final = ("running", "waiting", "finished_total", "kv_used_ratio", "awake")
"""What the detector and the picture look at: every series more is a series more to ask the server for."""

_OWN_FIELDS: Final = {each.metadata["metric"]: each.name for each in fields(EngineReading) if each.name in _FACTS}


def _own(values: Iterable[Value]) -> Side:
    engines: dict[tuple[str, str], dict[str, Any]] = {}
    for series, value in values:
        key = (series.labels.get("model_name", ""), series.labels.get("engine", "0"))
        field = _OWN_FIELDS[series.name]
        engines.setdefault(key, {})[field] = value > 0 if field == "awake" else value
    return [{"model_name": model, "engine": rank, **facts} for (model, rank), facts in sorted(engines.items())]


def _vllm(values: Iterable[Value]) -> Side:
    """Read the series as the daemon reads vLLM's page."""
    page = engine_page(VLLM, [Sample(series.name, dict(series.labels), value) for series, value in values])
    return [] if isinstance(page, Failure) else [engine_entry(engine) for engine in page.engines]


def _processes(values: Iterable[Value]) -> Side:
    return [{"role": series.labels.get("process"), "rss": round(value)} for series, value in values]


def _vllm_names(*fields: str) -> tuple[str, ...]:
    families = [family for fact in VLLM.facts if fact.field in fields for family in fact.families]
    return tuple(prefix + family for prefix in VLLM.prefixes for family in families)


OWN_ENGINES: Final = Kind(
    side="engines",
    lead=(catalog.ENGINE_RUNNING.name,),
    names=tuple(_OWN_FIELDS),
    identity=frozenset(catalog.ENGINE),
    sample=_own,
)
OWN_PROCESSES: Final = Kind(
    side="processes",
    lead=(catalog.HOST_MEMORY.name,),
    names=(catalog.HOST_MEMORY.name,),
    identity=frozenset(catalog.HOST_MEMORY.labels),
    sample=_processes,
)
VLLM_ENGINES: Final = Kind(
    side="engines",
    lead=_vllm_names("running"),
    names=_vllm_names(*_FACTS),
    identity=frozenset(
        (
            VLLM.model_label,
            VLLM.engine_label,
            *VLLM.repeat_labels,
            *VLLM.replica_labels,
            "finished_reason",
            "sleep_state",
        )
    ),
    sample=_vllm,
    has_start_time=True,
)
