"""The exporters of the data, and the conversion of their series to a trace."""

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
from vllm_headroom.units import MIB
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.replay.prometheus.api import PrometheusApi, Series, TimeSpan

SeriesValue = tuple[Series, float]
"""A series and its value at the time of the sample."""

Side = list[dict[str, Any]]
"""One side of a sample: its GPUs, engines or processes."""


class Exporter(Struct, frozen=True, kw_only=True):
    """The series that one exporter provides for one side of a sample.

    A side is, for example, the GPUs.
    """

    side: str
    """The key of this side in a line of a trace: `gpus`, `engines` or `processes`."""

    lead: tuple[str, ...]
    """Metric names. At least one of these metrics exists if this exporter is scraped."""

    names: tuple[str, ...]
    """The names of all metrics that are read."""

    identity: frozenset[str]
    """The labels that the exporter itself writes; scrapes add further labels.

    Series with the same name and values for these labels describe one object.
    """

    sample: Callable[[Iterable[SeriesValue]], Side]
    """Builds this side of a sample from the values at the sample's time."""

    has_start_time: bool = False
    """Whether the engine itself is the exporter. The exporter's start time is then the engine's."""


_LATE_SCRAPES: Final = 1.5
"""The maximum age of a value, in scrape intervals. A late scrape is tolerated, but a missed scrape
leaves a gap.
"""

_START_TIME: Final = "process_start_time_seconds"
_MOST_VALUES: Final = 5
"""Our choice: the maximum number of label values that an error message lists."""


class Scraped(Struct, frozen=True, kw_only=True):
    """An exporter whose series are in the server's data."""

    kind: Exporter

    matchers: tuple[str, ...]
    """The operator's label matchers for the exporter's series."""

    lead: str
    """The name of the leading metric that was found."""

    interval_ms: int
    """The interval at which the exporter is scraped."""

    @property
    def window_ms(self) -> int:
        """Return the maximum age of a value from this source."""
        return round(self.interval_ms * _LATE_SCRAPES)


def build_selector(names: Sequence[str], matchers: Sequence[str]) -> str:
    """Build the PromQL selector for the series with these names and matchers."""
    return "{" + ",".join((f'__name__=~"{"|".join(names)}"', *matchers)) + "}"


def read_series(api: PrometheusApi, source: Scraped, page: TimeSpan) -> list[Series]:
    """Return the source's series in the page's time span, without the labels that scrapes add.

    Raises BadInput if the series cannot be read or are ambiguous. The query uses `last_over_time`,
    which limits the age of a value. If a series ends without a staleness marker, a plain selector
    repeats the last value for five minutes. With a plain selector, the memory of a dead engine
    would look constant.
    """
    selector = build_selector(source.kind.names, source.matchers)
    series = api.query_range(_select_latest(selector, source.window_ms), page)
    if source.kind.has_start_time:
        lead_series = [one_series for one_series in series if one_series.name == source.lead]
        series += _read_start_times(api, source, page, lead_series)
    # A series that has ended keeps its last value until the maximum age is reached. The number of
    # steps is rounded up.
    overlap_steps = -(-source.window_ms // page.step_ms)
    return _merge_series(source.kind, series, overlap_steps)


def _select_latest(selected: str, window_ms: int) -> str:
    """Return a query for the newest value of each series within the window."""
    return f"last_over_time({selected}[{window_ms}ms])"


def _read_start_times(
    api: PrometheusApi, source: Scraped, page: TimeSpan, lead_series: Sequence[Series]
) -> list[Series]:
    """Return the start time of each engine process, with the labels of the engine's series.

    Any Prometheus target may export a series with this name. Therefore, only the engines' targets
    are queried. Returns an empty list if there are no engines.
    """
    if not lead_series:
        return []
    matchers: list[str] = []
    # The process series do not have the model's labels. Therefore, the match is by job and
    # instance.
    for label in ("job", "instance"):
        targets = sorted({series.labels.get(label, "") for series in lead_series})
        pattern = "|".join(map(re.escape, targets))
        matchers.append(f"{label}=~{json.dumps(pattern)}")
    selector = build_selector((_START_TIME,), matchers)
    start_series = api.query_range(_select_latest(selector, source.window_ms), page)
    return [
        replace(start, labels=lead.labels)
        for lead in lead_series
        for start in start_series
        # All series of a target have the target's labels. The series with the start time has no
        # other labels.
        if start.labels.items() <= lead.labels.items()
    ]


def _merge_series(kind: Exporter, all_series: Iterable[Series], overlap_steps: int) -> list[Series]:
    """Join consecutive series with the same identity; return one series per identity.

    An object has several series when a scrape label changes, for example because a pod was
    recreated. If two series overlap, the later one takes precedence. Series may overlap by up to
    `overlap_steps`, the maximum age of a value. Raises BadInput if two series overlap for longer,
    because such series belong to different objects.
    """
    groups: dict[tuple[str, ...], list[Series]] = {}
    for series in all_series:
        labels = sorted(item for item in series.labels.items() if item[0] in kind.identity)
        key = (series.name, *(text for item in labels for text in item))
        groups.setdefault(key, []).append(series)
    joined: list[Series] = []
    for group in groups.values():
        # The series are sorted by time, so that later values replace earlier ones.
        group.sort(key=lambda series: min(series.values, default=0))
        values: dict[int, float] = {}
        for series in group:
            if len(values.keys() & series.values.keys()) > overlap_steps:
                raise BadInput(_explain_ambiguity(kind, group))
            values |= series.values
        identity = _pick_identity(kind, group[0])
        joined.append(Series(name=group[0].name, labels=identity, values=values))
    return joined


def _pick_identity(kind: Exporter, series: Series) -> dict[str, str]:
    """Return those labels of a series that the exporter itself writes."""
    return {name: text for name, text in series.labels.items() if name in kind.identity}


def _explain_ambiguity(kind: Exporter, group: Sequence[Series]) -> str:
    """Return the error message for different objects with the same identity.

    The message names the scrape labels that differ, and the option that would select one of the
    series.
    """
    metric = group[0].name
    differing: dict[str, list[str]] = {}
    # Only the scrape labels differ, because the identity labels are the same.
    for name in sorted({name for series in group for name in series.labels} - kind.identity):
        texts = sorted({series.labels.get(name, "") for series in group})
        if len(texts) > 1:
            differing[name] = texts
    if not differing:
        return (
            f"{len(group)} series of {metric} do not differ in any label: query a single Prometheus"
        )
    shown = "; ".join(f"{name} is {_join_texts(texts)}" for name, texts in differing.items())
    identity = _pick_identity(kind, group[0])
    selector = ", ".join(f'{name}="{text}"' for name, text in identity.items())
    option = "--match-gpu" if kind.side == "gpus" else "--match-engine"
    name, texts = next(iter(differing.items()))
    choice = f"{option} '{name}=\"{texts[-1]}\"'"
    return (
        f"{len(group)} series of {metric}{{{selector}}} at once: choose one, as with {choice}"
        f" ({shown})"
    )


def _join_texts(texts: list[str]) -> str:
    joined = " or ".join(f'"{text}"' for text in texts[:_MOST_VALUES])
    if len(texts) > _MOST_VALUES:
        joined += f" and {len(texts) - _MOST_VALUES} more"
    return joined


_MEMORY_FACTS: Final = ("total", "used", "reserved", "engine", "other")


def _sample_gpus(
    fields: Mapping[str, str], uuid_label: str, unit_bytes: int, values: Iterable[SeriesValue]
) -> Side:
    """Return a trace entry for each device, sorted by UUID.

    If this project's exporter has attributed the devices, only the engine's devices are returned.
    `fields` maps a metric name to its fact. For a series with the label `holder`, the fact is that
    label's value. Values are in `unit_bytes`.
    """
    devices: dict[str, dict[str, float]] = {}
    is_engines_own: dict[str, bool] = {}
    for series, value in values:
        uuid = series.labels.get(uuid_label, "")
        if series.name == catalog.GPU_INFO.name:
            # For a while after a device's attribution changes, the device has two info series.
            is_attributed = bool(series.labels.get("attribution"))
            is_engines_own[uuid] = is_engines_own.get(uuid, False) or is_attributed
            continue
        facts = devices.setdefault(uuid, {})
        facts[series.labels.get("holder", fields[series.name])] = value
        index = series.labels.get("gpu", "")
        if index.isdecimal():
            facts["gpu"] = int(index)
    return [
        _build_device(uuid, facts, unit_bytes)
        for uuid, facts in sorted(devices.items())
        # If there is no attribution, all selected devices are returned.
        if is_engines_own.get(uuid, True)
    ]


def _build_device(uuid: str, facts: Mapping[str, float], unit_bytes: int) -> dict[str, Any]:
    """Build a trace entry for a device; unknown facts are None.

    If the total is not exported, it is used + free + reserved memory. Without reserved memory, the
    total is too low, but the free memory is still correct.
    """
    memory: dict[str, int] = {}
    for fact in (*_MEMORY_FACTS, "free"):
        if fact in facts:
            memory[fact] = round(facts[fact] * unit_bytes)
    if "used" in memory and "free" in memory:
        sum_bytes = memory["used"] + memory["free"] + memory.get("reserved", 0)
        memory.setdefault("total", sum_bytes)
    device: dict[str, Any] = {"gpu": int(facts["gpu"]) if "gpu" in facts else None, "uuid": uuid}
    for fact in _MEMORY_FACTS:
        device[fact] = memory.get(fact)
    return device


def _describe_gpus(fields: Mapping[str, str], *identity: str, unit_bytes: int = 1) -> Exporter:
    """Return an exporter of GPU metrics.

    `fields` maps each metric name to its fact; `identity` are the exporter's own labels.
    """
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
    unit_bytes=MIB,  # dcgm-exporter, default-counters.csv
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


_ENGINE_FACTS: Final = ("running", "waiting", "finished_total", "kv_used_ratio", "awake")
"""The facts that the detector and the picture need. No other facts are read, because each metric
puts load on the server.
"""

SUMMED_LABELS: Final = frozenset({"finished_reason", "is_streaming"})
"""Labels that split a counter into several series, which are summed."""

# For each metric of this project's exporter, the fact that it provides.
_OWN_FIELDS: Final = {
    reading.metric: field
    for field, reading in INPUTS.items()
    if reading.metric and field in _ENGINE_FACTS
}


def _sample_own(
    labels: Mapping[str, str], fields: Mapping[str, str], values: Iterable[SeriesValue]
) -> Side:
    """Return a trace entry for each engine or process of this project's exporter.

    `labels` maps each identifying label to a key of the entry. `fields` maps each metric name to a
    key.
    """
    entries: dict[tuple[str, ...], dict[str, Any]] = {}
    for series, value in values:
        key = tuple(series.labels.get(label, "") for label in labels)
        entry = entries.setdefault(key, dict(zip(labels.values(), key, strict=True)))
        field = fields[series.name]
        entry[field] = value > 0 if field == "awake" else value
    return [entries[key] for key in sorted(entries)]


def _sample_engines(profile: Profile, values: Iterable[SeriesValue]) -> Side:
    """Return a trace entry for each engine, as if read from the engine's page."""
    samples = [Sample(series.name, dict(series.labels), value) for series, value in values]
    page = build_page(profile, samples)
    if isinstance(page, Failure):
        return []
    return [build_engine_entry(engine) for engine in page.engines]


def _list_names(profile: Profile, *fields: str) -> tuple[str, ...]:
    """Return the names of the metrics whose values provide these fields.

    The names are in the order of the profile. A field that is read only from labels has no metric
    name.
    """
    families: dict[str, None] = {}
    for fact in profile.facts:
        if fact.field in fields and fact.label is None:
            families |= dict.fromkeys(fact.names)
    return tuple(prefix + family for prefix in profile.prefixes for family in families)


def _list_labels(profile: Profile) -> frozenset[str]:
    """Return the labels that the engine itself writes on its series; scrapes add further labels."""
    labels = {
        profile.model_label,
        profile.engine_label,
        *profile.repeat_labels,
        *profile.replica_labels,
    }
    # `where` has a label and a value, which together distinguish series with the same name.
    labels |= {fact.where[0] for fact in profile.facts if fact.where is not None}
    return frozenset(labels | SUMMED_LABELS) - {""}


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
        names=_list_names(profile, *_ENGINE_FACTS, "kv_used_tokens", "kv_capacity_tokens"),
        identity=_list_labels(profile),
        sample=partial(_sample_engines, profile),
        has_start_time=any(fact.field == "started_at_seconds" for fact in profile.facts),
    )
    for profile in PROFILES
    if _list_names(profile, "running")
)
"""The exporters of those engines whose metrics include the number of running requests. The detector
needs this number as the load.
"""
