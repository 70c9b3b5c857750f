"""The exporters that a history may come from, and their series as records of a trace."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.samples import Sample

from vllm_headroom import catalog
from vllm_headroom.model import INPUTS, Failure
from vllm_headroom.parse.engines import build_page
from vllm_headroom.parse.profile import Profile
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.trace.entries import build_engine_entry
from vllm_headroom_tools.replay.prometheus.api import PrometheusApi, Series, TimeSpan
from vllm_headroom_tools.trace import BadInput

Value = tuple[Series, float]
"""A series and its value at the time of the sample."""

Side = list[dict[str, Any]]


class Exporter(Struct, frozen=True, kw_only=True):
    """The series of one exporter for one side of a sample; `side` is its key in a trace's line.

    Wherever this exporter is scraped, one of the names `lead` exists; `names` are all that are read. Series that agree
    in name and in the labels of `identity` are one; other labels come from scrapes. `has_start_time` is whether the
    exporting process is the engine's.
    """

    side: str
    lead: tuple[str, ...]
    names: tuple[str, ...]
    identity: frozenset[str]
    sample: Callable[[Iterable[Value]], Side]
    has_start_time: bool = False


_MAY_BE_LATE: Final = 1.5
"""The highest age of a value, in scrape intervals: a late scrape is jitter, a missing one a gap."""

_START_TIME: Final = "process_start_time_seconds"
_MOST_VALUES: Final = 5


class Scraped(Struct, frozen=True, kw_only=True):
    """An exporter that was found: its matchers, the name of its lead and its scrape interval."""

    kind: Exporter
    matchers: tuple[str, ...]
    lead: str
    interval_ms: int

    @property
    def window_ms(self) -> int:
        """The highest age of a value of this source."""
        return round(self.interval_ms * _MAY_BE_LATE)


def build_selector(names: Sequence[str], matchers: Sequence[str]) -> str:
    """Build the PromQL selector of the series with these names and matchers."""
    return "{" + ",".join((f'__name__=~"{"|".join(names)}"', *matchers)) + "}"


def read_series(api: PrometheusApi, source: Scraped, page: TimeSpan) -> list[Series]:
    """Read the series of the source over the page, without the labels of their scrapes; raises BadInput.

    `last_over_time` bounds the age of a value. A plain selector repeats the last one for five minutes after a series
    without a staleness marker ends, so that the memory of a dead engine would seem level.
    """
    series = api.query_range(
        _select_latest(build_selector(source.kind.names, source.matchers), source.window_ms), page
    )
    if source.kind.has_start_time:
        series += _read_start_times(
            api, source, page, [each for each in series if each.name == source.lead]
        )
    handover = -(-source.window_ms // page.step_ms)
    return _merge_series(source.kind, series, handover)


def _select_latest(selected: str, window_ms: int) -> str:
    return f"last_over_time({selected}[{window_ms}ms])"


def _read_start_times(
    api: PrometheusApi, source: Scraped, page: TimeSpan, leads: Sequence[Series]
) -> list[Series]:
    """Read the start time of each engine's process; every target of Prometheus has that series."""
    targets = {
        label: sorted({each.labels.get(label, "") for each in leads})
        for label in ("job", "instance")
    }
    if not leads:
        return []
    matchers = [
        f"{label}=~{json.dumps('|'.join(map(re.escape, values)))}"
        for label, values in targets.items()
    ]
    found = api.query_range(
        _select_latest(build_selector((_START_TIME,), matchers), source.window_ms), page
    )
    return [
        replace(start, labels=lead.labels)
        for lead in leads
        for start in found
        if start.labels.items() <= lead.labels.items()  # a target's labels are on all its series
    ]


def _merge_series(kind: Exporter, found: Iterable[Series], handover: int) -> list[Series]:
    """Join the series of the same identity that follow each other, by the newest where they overlap.

    They may overlap for the highest age of a value; beyond it they are two different things that look the same.
    """
    groups: dict[tuple[str, ...], list[Series]] = {}
    for series in found:
        own = sorted(item for item in series.labels.items() if item[0] in kind.identity)
        groups.setdefault((series.name, *(text for item in own for text in item)), []).append(
            series
        )
    joined = []
    for group in groups.values():
        group.sort(key=lambda each: min(each.values, default=0))
        values: dict[int, float] = {}
        for series in group:
            if len(values.keys() & series.values.keys()) > handover:
                raise BadInput(_explain_ambiguity(kind, group))
            values |= series.values
        labels = {name: text for name, text in group[0].labels.items() if name in kind.identity}
        joined.append(Series(name=group[0].name, labels=labels, values=values))
    return joined


def _explain_ambiguity(kind: Exporter, group: Sequence[Series]) -> str:
    names = sorted({name for series in group for name in series.labels} - kind.identity)
    values = {name: sorted({series.labels.get(name, "") for series in group}) for name in names}
    differing = {name: texts for name, texts in values.items() if len(texts) > 1}
    if not differing:
        return f"{len(group)} series of {group[0].name} do not differ in any label: query a single Prometheus"
    own = ", ".join(
        f'{name}="{text}"' for name, text in group[0].labels.items() if name in kind.identity
    )
    some = {
        name: " or ".join(f'"{text}"' for text in texts[:_MOST_VALUES])
        + (f" and {len(texts) - _MOST_VALUES} more" if len(texts) > _MOST_VALUES else "")
        for name, texts in differing.items()
    }
    shown = "; ".join(f"{name} is {texts}" for name, texts in some.items())
    name, texts = next(iter(differing.items()))
    option = "--match-gpu" if kind.side == "gpus" else "--match-engine"
    choice = f"{option} '{name}=\"{texts[-1]}\"'"
    return f"{len(group)} series of {group[0].name}{{{own}}} at once: choose one, as with {choice} ({shown})"


_MIB: Final = 2**20
_MEMORY_FACTS: Final = ("total", "used", "reserved", "engine", "other")


def _sample_gpus(
    fields: Mapping[str, str], uuid_label: str, unit_bytes: int, values: Iterable[Value]
) -> Side:
    """Return the devices, of this exporter those that it attributed to the engine; a holder is a field."""
    devices: dict[str, dict[str, float]] = {}
    ours: dict[str, bool] = {}
    for series, value in values:
        uuid, index = series.labels.get(uuid_label, ""), series.labels.get("gpu", "")
        if series.name == catalog.GPU_INFO.name:
            ours[uuid] = ours.get(uuid, False) or bool(series.labels.get("attribution"))
            continue
        facts = devices.setdefault(uuid, {})
        facts[series.labels.get("holder", fields[series.name])] = value
        if index.isdecimal():
            facts["gpu"] = int(index)
    known = ((uuid, facts) for uuid, facts in sorted(devices.items()) if ours.get(uuid, True))
    return [_build_device(uuid, facts, unit_bytes) for uuid, facts in known]


def _build_device(uuid: str, facts: Mapping[str, float], unit_bytes: int) -> dict[str, Any]:
    """Build a device of a trace; without a total, it is the sum of used, free and reserved.

    Where reserved is not exported either, the sum lacks it, and the room on the device is still right.
    """
    known = {
        fact: round(facts[fact] * unit_bytes) for fact in (*_MEMORY_FACTS, "free") if fact in facts
    }
    if "used" in known and "free" in known:
        known.setdefault("total", known["used"] + known["free"] + known.get("reserved", 0))
    device: dict[str, Any] = {"gpu": int(facts["gpu"]) if "gpu" in facts else None, "uuid": uuid}
    return device | {fact: known.get(fact) for fact in _MEMORY_FACTS}


def _describe_gpus(fields: Mapping[str, str], *identity: str, unit_bytes: int = 1) -> Exporter:
    """Return an exporter of GPUs with these fields by the names of its series."""
    uuid_label = next(label for label in identity if label.lower() == "uuid")
    return Exporter(
        side="gpus",
        lead=tuple(name for name, field in fields.items() if field == "used"),
        names=tuple(fields),
        identity=frozenset(identity),
        sample=partial(_sample_gpus, fields, uuid_label, unit_bytes),
    )


OWN_GPUS: Final = _describe_gpus(
    {
        catalog.GPU_MEMORY_TOTAL.name: "total",
        catalog.GPU_MEMORY_USED.name: "used",
        catalog.GPU_MEMORY_RESERVED.name: "reserved",
        catalog.GPU_MEMORY_HELD.name: "held",
        catalog.GPU_INFO.name: "info",
    },
    *("gpu", "uuid", "holder", "attribution"),
)
DCGM_GPUS: Final = _describe_gpus(
    {
        "DCGM_FI_DEV_FB_USED": "used",
        "DCGM_FI_DEV_FB_FREE": "free",
        "DCGM_FI_DEV_FB_RESERVED": "reserved",
    },
    *("gpu", "UUID"),
    unit_bytes=_MIB,  # dcgm-exporter, default-counters.csv
)
SMI_GPUS: Final = _describe_gpus(
    {
        "nvidia_smi_memory_used_bytes": "used",
        "nvidia_smi_memory_total_bytes": "total",
        "nvidia_smi_memory_reserved_bytes": "reserved",
        "nvidia_smi_index": "gpu",
    },
    "uuid",
)


_FACTS: Final = ("running", "waiting", "finished_total", "kv_used_ratio", "awake")
"""The inputs of the detector and the picture; each further series costs the server a query."""

PARTS: Final = frozenset({"finished_reason", "is_streaming"})
"""Labels of counters whose series add up."""

_OWN_FIELDS: Final = {
    each.metric: field for field, each in INPUTS.items() if each.metric and field in _FACTS
}


def _sample_own(
    labels: Mapping[str, str], fields: Mapping[str, str], values: Iterable[Value]
) -> Side:
    """Return the engines or processes: of each series, the fields by its labels, and one by its name."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for series, value in values:
        key, field = tuple(series.labels.get(label, "") for label in labels), fields[series.name]
        entry = found.setdefault(key, dict(zip(labels.values(), key, strict=True)))
        entry[field] = value > 0 if field == "awake" else value
    return [found[key] for key in sorted(found)]


def _sample_engines(profile: Profile, values: Iterable[Value]) -> Side:
    page = build_page(
        profile, [Sample(series.name, dict(series.labels), value) for series, value in values]
    )
    return (
        [] if isinstance(page, Failure) else [build_engine_entry(engine) for engine in page.engines]
    )


def _list_names(profile: Profile, *fields: str) -> tuple[str, ...]:
    wanted = [fact for fact in profile.facts if fact.field in fields and fact.label is None]
    families = dict.fromkeys(family for fact in wanted for family in fact.names)
    return tuple(prefix + family for prefix in profile.prefixes for family in families)


def _list_labels(profile: Profile) -> frozenset[str]:
    """Return the labels that distinguish an engine's series, not only their scrapes."""
    chosen = {fact.where[0] for fact in profile.facts if fact.where is not None}
    named = {
        profile.model_label,
        profile.engine_label,
        *profile.repeat_labels,
        *profile.replica_labels,
    }
    return frozenset(named | chosen | PARTS) - {""}


OWN_ENGINES: Final = Exporter(
    side="engines",
    lead=(catalog.ENGINE_RUNNING.name,),
    names=tuple(_OWN_FIELDS),
    identity=frozenset(catalog.ENGINE_LABELS),
    sample=partial(_sample_own, {"model_name": "model_name", "engine": "engine"}, _OWN_FIELDS),
)
OWN_PROCESSES: Final = Exporter(
    side="processes",
    lead=(catalog.HOST_MEMORY.name,),
    names=(catalog.HOST_MEMORY.name, catalog.HOST_SWAP.name),
    identity=frozenset(catalog.HOST_MEMORY.labels),
    sample=partial(
        _sample_own,
        {"process": "role"},
        {catalog.HOST_MEMORY.name: "rss", catalog.HOST_SWAP.name: "swap"},
    ),
)
ENGINES: Final = tuple(
    Exporter(
        side="engines",
        lead=_list_names(profile, "running"),
        names=_list_names(profile, *_FACTS, "kv_used_tokens", "kv_capacity_tokens"),
        identity=_list_labels(profile),
        sample=partial(_sample_engines, profile),
        has_start_time=any(fact.field == "started_at_seconds" for fact in profile.facts),
    )
    for profile in PROFILES
    if _list_names(profile, "running")
)
"""Every engine that exports its running requests; the detector needs a load."""
