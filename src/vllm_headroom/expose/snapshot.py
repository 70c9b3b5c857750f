"""Build `/snapshot.json`, the page that programs read, with keys from the catalogue."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec.structs import asdict

from vllm_headroom import catalog
from vllm_headroom.expose.answers import Response
from vllm_headroom.expose.view import CURVE_STEP_SECONDS, History, LastIncident, View
from vllm_headroom.model import Metric, Snapshot, Values, find_worst_level

STATE_LABEL: Final = "state"
"""The last label of a metric with one series per state. The current state's series has the value 1.
"""

LIST_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpus": catalog.GPU_LABELS,
    "engines": catalog.ENGINE_LABELS,
}
"""The labels that identify the entries of each list in the document."""

LIST_METRICS: Final = {
    name: tuple(metric for metric in catalog.METRICS if metric.labels[:2] == labels)
    for name, labels in LIST_LABELS.items()
}
"""The metrics of each list's entries."""

AT_THE_SCRAPE: Final = (
    catalog.BUILD_INFO,
    catalog.SAMPLE_AGE,
    catalog.LAST_INCIDENT,
    catalog.WEB_CONFIG_RELOAD,
    catalog.ENGINES,
)
"""Metrics whose names are not keys of the document. The document shows the first three as
`version`, `age_seconds` and `last_incident`.
"""

_UNLISTED_METRICS: Final = (
    metric for metric in catalog.METRICS if metric.labels[:2] not in LIST_LABELS.values()
)
DOCUMENT_METRICS: Final = tuple(
    metric for metric in _UNLISTED_METRICS if metric not in AT_THE_SCRAPE
)
"""The metrics at the top level of the document."""


def respond_snapshot(view: View) -> Response:
    """Return the document as a response. Unknown values are null, never 0."""
    body = json.dumps(build_document(view)).encode()
    return Response(status=200, body=body, content_type="application/json")


def build_document(view: View) -> dict[str, Any]:
    """Return the latest sample, its verdicts and the last day's curves, for JSON.

    Before the first sample, all values are None and all lists are empty.
    """
    snapshot = view.snapshot
    document: dict[str, Any] = {
        "headroom_snapshot": 1,
        "version": view.version,
        "t": None if snapshot is None else snapshot.time_seconds,
        "age_seconds": None if snapshot is None else view.age_seconds,
        "level": find_worst_level(view.shown_verdicts),
        "verdicts": [
            {**asdict(verdict), "runbook": view.find_runbook(verdict.alert)}
            for verdict in view.shown_verdicts
        ],
        "problems": [] if snapshot is None else _build_problems(snapshot),
        "last_incident": _build_incident(view.last_incident),
    }
    for metric in DOCUMENT_METRICS:
        document[build_key(metric, None)] = _read_fact(view.values, metric, ())
    for list_name in LIST_LABELS:
        document[list_name] = _build_list(view.values, list_name)
    document["history"] = _build_history(view.values, view.history)
    return document


def _build_problems(snapshot: Snapshot) -> list[dict[str, Any]]:
    return [
        {"source": failure.source, "reason": failure.reason, "message": failure.message}
        for failure in snapshot.failures
    ]


def _build_incident(incident: LastIncident | None) -> dict[str, Any] | None:
    """Return the last incident for JSON, or None if there is none."""
    if incident is None:
        return None
    return {
        "t": incident.seconds,
        "what": incident.kind,
        "reason": incident.reason,
        "sentence": incident.sentence,
        "file": incident.file,
        "command": incident.command,
    }


def _build_list(values: Values, list_name: str) -> list[dict[str, Any]]:
    """Return an entry for each GPU or engine with any of the list's metrics."""
    metrics = LIST_METRICS[list_name]
    entry_labels: dict[tuple[str, ...], None] = {}
    for metric in metrics:
        for labels in values.find_all(metric):
            # The first two labels name the GPU or engine. A dict preserves their order.
            entry_labels[labels[:2]] = None
    entries = []
    for labels in entry_labels:
        entry: dict[str, Any] = dict(zip(LIST_LABELS[list_name], labels, strict=True))
        for metric in metrics:
            entry[build_key(metric, list_name)] = _read_fact(values, metric, labels)
        entries.append(entry)
    return entries


def _build_history(values: Values, history: History) -> dict[str, Any]:
    """Return the curves of the last day and the newest events, for JSON."""

    def list_points(name: str) -> list[tuple[float, float | None]]:
        # JSON has no NaN, so minutes without a value are None.
        times, curve_values = history.read_curve(name)
        return list(zip(times, curve_values, strict=True))

    uuids = [labels[1] for labels in values.find_all(catalog.GPU_INFO)]
    return {
        "step_seconds": CURVE_STEP_SECONDS,
        "gpus": [
            {
                "uuid": uuid,
                "free_bytes": list_points(f"free {uuid}"),
                "free_at_peak_bytes": list_points(f"peak {uuid}"),
            }
            for uuid in uuids
        ],
        "host_free_bytes": list_points("host"),
        "running": list_points("running"),
        "kv_cache_used_ratio": list_points("kv_cache"),
        "events": [
            {"t": event.seconds, "level": event.level, "text": event.text}
            for event in history.events
        ],
    }


def build_key(metric: Metric, list_name: str | None) -> str:
    """Return a metric's key in a list.

    If `list_name` is None, returns the key at the top level. The key is the metric's name without
    `headroom_`. In a list, it is also without `gpu_` or `engine_`.
    """
    key = metric.name.removeprefix("headroom_")
    if list_name is None:
        return key
    return key.removeprefix(f"{list_name.removesuffix('s')}_")


def _read_fact(values: Values, metric: Metric, labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - any value of JSON
    """Return a metric's value for JSON; `labels` are the values of its first labels.

    Returns None if the metric has no series with these labels. The form of the result depends on
    the metric's labels other than `labels`:
    - none: the value;
    - labels of an info metric: an object with the label values, by label name;
    - only the state: the current state;
    - other labels and the state: an object of states, keyed by the other labels;
    - other labels: an object with the metric's value for each label value.
    """
    more_label_names = metric.labels[len(labels) :]
    if not more_label_names:
        return values.value(metric, *labels)
    # The keys are the labels that do not identify the entry.
    series = {
        series_labels[len(labels) :]: value
        for series_labels, value in values.find_all(metric).items()
        if series_labels[: len(labels)] == labels
    }
    if metric.name.endswith("_info"):
        return _read_info(more_label_names, series)
    if more_label_names[-1] == STATE_LABEL:
        states = {
            " ".join(more_labels[:-1]): more_labels[-1]
            for more_labels, value in series.items()
            if value
        }
        if more_label_names == (STATE_LABEL,):
            return states.get("")
        return states or None
    return {" ".join(more_labels): value for more_labels, value in series.items()} or None


def _read_info(
    label_names: tuple[str, ...], series: Iterable[tuple[str, ...]]
) -> dict[str, str] | None:
    """Return the first series' label values by label name.

    Returns None if there are no series.
    """
    for labels in series:
        return dict(zip(label_names, labels, strict=True))
    return None
