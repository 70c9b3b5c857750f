"""Build `/snapshot.json`, the page for programs, with the catalogue's keys."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec.structs import asdict

from vllm_headroom import catalog
from vllm_headroom.expose.answers import Response
from vllm_headroom.expose.view import CURVE_STEP_SECONDS, View
from vllm_headroom.model import Metric, Values, find_worst

STATE_LABEL: Final = "state"
LIST_LABELS: Final[Mapping[str, tuple[str, ...]]] = {"gpus": catalog.GPU, "engines": catalog.ENGINE}
"""The lists of the document, by the labels that identify their entries."""

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
)
"""On the metrics page only: `version`, `age_seconds` and `last_incident` contain the first three."""

_OTHERS: Final = (
    metric for metric in catalog.METRICS if metric.labels[:2] not in LIST_LABELS.values()
)
DOCUMENT_METRICS: Final = tuple(metric for metric in _OTHERS if metric not in AT_THE_SCRAPE)


def respond_snapshot(view: View) -> Response:
    """Return the document; unknown is null, never 0."""
    return Response(
        status=200, body=json.dumps(build_document(view)).encode(), content_type="application/json"
    )


def build_document(view: View) -> dict[str, Any]:
    """Return the last sample with its verdicts, and the day's curves."""
    values, snapshot, history, last = view.values, view.snapshot, view.history, view.last_incident
    incident = {} if last is None else asdict(last)
    return {
        "headroom_snapshot": 1,
        "version": view.version,
        "t": None if snapshot is None else snapshot.time_seconds,
        "age_seconds": None if snapshot is None else view.age_seconds,
        "level": find_worst(view.shown_verdicts),
        "verdicts": [
            {**asdict(each), "runbook": view.find_runbook(each.alert)}
            for each in view.shown_verdicts
        ],
        "problems": [] if snapshot is None else [asdict(each) for each in snapshot.failures],
        "last_incident": None
        if last is None
        else {"t": incident.pop("seconds"), **incident, "command": last.command},
        **_collect_facts(values, DOCUMENT_METRICS, ()),
        **{
            name: [
                {
                    **dict(zip(labels, each, strict=True)),
                    **_collect_facts(values, LIST_METRICS[name], each, name),
                }
                for each in dict.fromkeys(
                    each[:2] for metric in LIST_METRICS[name] for each in values.find_all(metric)
                )
            ]
            for name, labels in LIST_LABELS.items()
        },
        "history": {
            "step_seconds": CURVE_STEP_SECONDS,
            "gpus": [
                {
                    "uuid": labels[1],
                    "free_bytes": list(zip(*history.read_curve(f"free {labels[1]}"), strict=True)),
                    "free_at_peak_bytes": list(
                        zip(*history.read_curve(f"peak {labels[1]}"), strict=True)
                    ),
                }
                for labels in values.find_all(catalog.GPU_INFO)
            ],
            "host_free_bytes": list(zip(*history.read_curve("host"), strict=True)),
            "running": list(zip(*history.read_curve("running"), strict=True)),
            "events": [
                {"t": event.seconds, "level": event.level, "text": event.text}
                for event in history.events
            ],
        },
    }


def build_key(metric: Metric, name: str | None) -> str:
    """Return a metric's key in the entries of a list, or in the document: its name without the common prefix."""
    return metric.name.removeprefix("headroom_").removeprefix(
        f"{name.removesuffix('s')}_" if name else ""
    )


def _collect_facts(
    values: Values, metrics: Iterable[Metric], labels: tuple[str, ...], name: str | None = None
) -> dict[str, Any]:
    """Return each metric's value, or values by additional labels; of states the current one, of infos the labels."""
    return {build_key(metric, name): _read_fact(values, metric, labels) for metric in metrics}


def _read_fact(values: Values, metric: Metric, labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - any value of JSON
    own = metric.labels[len(labels) :]
    if not own:
        return values.value(metric, *labels)
    found = {
        each[len(labels) :]: value
        for each, value in values.find_all(metric).items()
        if each[: len(labels)] == labels
    }
    if metric.name.endswith("_info"):
        return next((dict(zip(own, each, strict=True)) for each in found), None)
    if own[-1] == STATE_LABEL:
        held = {" ".join(each[:-1]): each[-1] for each, value in found.items() if value}
        return held or None if own[:-1] else held.get("")
    return {" ".join(each): value for each, value in found.items()} or None
