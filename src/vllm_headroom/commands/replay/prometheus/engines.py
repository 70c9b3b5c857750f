"""The kinds of history that tell the load of engines and the memory of their processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from typing import Any, Final

from prometheus_client.samples import Sample

from vllm_headroom import catalog
from vllm_headroom.commands.replay.prometheus.join import Kind, Side, Value
from vllm_headroom.model import EngineReading, Failure
from vllm_headroom.parse.engines import engine_page
from vllm_headroom.parse.profile import Profile
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.trace.entries import engine_entry

_FACTS: Final = ("running", "waiting", "finished_total", "kv_used_ratio", "awake")
"""What the detector and the picture look at: every series more is a series more to ask the server for."""

PARTS: Final = frozenset({"finished_reason", "is_streaming"})
"""Labels of counters whose series are parts of one amount."""

_OWN_FIELDS: Final = {each.metadata["metric"]: each.name for each in fields(EngineReading) if each.name in _FACTS}


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


def _processes(values: Iterable[Value]) -> Side:
    return [{"role": series.labels.get("process"), "rss": round(value)} for series, value in values]


def _names(profile: Profile, *fields: str) -> tuple[str, ...]:
    wanted = [fact for fact in profile.facts if fact.field in fields and fact.label is None]
    families = dict.fromkeys(family for fact in wanted for family in fact.names)
    return tuple(prefix + family for prefix in profile.prefixes for family in families)


def _labels(profile: Profile) -> frozenset[str]:
    """Return the labels that tell an engine's own series apart, and not only their scrapes."""
    chosen = {fact.where[0] for fact in profile.facts if fact.where is not None}
    named = {profile.model_label, profile.engine_label, *profile.repeat_labels, *profile.replica_labels}
    return frozenset(named | chosen | PARTS) - {""}


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
ENGINES: Final = tuple(
    Kind(
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
