"""The kinds of history that tell the load of engines and the memory of their processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from prometheus_client.samples import Sample

from vllm_headroom import catalog
from vllm_headroom.commands.replay.prometheus.kinds import Kind, Side, Value
from vllm_headroom.model import Failure
from vllm_headroom.parse.engines import engine_page
from vllm_headroom.parse.profiles.vllm import VLLM

_VLLM_FACTS: Final = ("running", "waiting", "finished_total", "kv_used_ratio", "awake")
_OWN_FIELDS: Final = {
    catalog.ENGINE_RUNNING.name: "running",
    catalog.ENGINE_WAITING.name: "waiting",
    catalog.ENGINE_FINISHED.name: "finished_total",
    catalog.ENGINE_KV_USED.name: "kv_used_ratio",
    catalog.ENGINE_AWAKE.name: "awake",
}


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
    return [
        {
            "model_name": engine.model_name,
            "engine": engine.engine,
            **{fact: getattr(engine, fact) for fact in _VLLM_FACTS},
            "started_at": engine.started_at_seconds,
        }
        for engine in (() if isinstance(page, Failure) else page.engines)
    ]


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
    names=_vllm_names(*_VLLM_FACTS),
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
