"""What the page shows, for programs: `/snapshot.json`, whose keys are those of the catalogue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec.structs import asdict

from vllm_headroom import catalog
from vllm_headroom.expose.answers import Response
from vllm_headroom.expose.drawing import Curve
from vllm_headroom.expose.view import STEP_SECONDS, Incident, View
from vllm_headroom.model import Metric, Values, worst

FORMAT: Final = 1
STATE: Final = "state"
PREFIX: Final = "headroom_"
MANY: Final[Mapping[str, tuple[str, ...]]] = {"gpus": catalog.GPU, "engines": catalog.ENGINE}
"""The lists of the document, by the labels that tell their entries apart."""

OWN: Final = {"gpus": "gpu_", "engines": "engine_"}
INFO: Final = "_info"
AT_THE_SCRAPE: Final = (catalog.BUILD_INFO, catalog.SAMPLE_AGE, catalog.LAST_INCIDENT)
"""Of the page of metrics only: `version`, `age_seconds` and `last_incident` say the same."""


def snapshot_json(view: View) -> Response:
    """Return the document: null is what is not known, never 0."""
    return Response(status=200, body=json.dumps(document(view)).encode(), content_type="application/json")


def document(view: View) -> dict[str, Any]:
    """Return what was seen last, with what is to be said of it and the day's curves."""
    values = view.values
    return {
        "headroom_snapshot": FORMAT,
        "version": view.version,
        "t": None if view.snapshot is None else view.snapshot.time_seconds,
        "age_seconds": None if view.snapshot is None else view.age_seconds,
        "level": worst(view.said),
        "verdicts": [{**asdict(each), "runbook": view.runbook(each.alert)} for each in view.said],
        "problems": [] if view.snapshot is None else [asdict(each) for each in view.snapshot.failures],
        "last_incident": _incident(view.last_incident),
        **_facts(values, WHOLE, ()),
        **{name: _entries(values, name, labels) for name, labels in MANY.items()},
        "history": _history(view),
    }


def _list_of(metric: Metric) -> str | None:
    return next((name for name, labels in MANY.items() if metric.labels[:2] == labels), None)


WHOLE: Final = tuple(metric for metric in catalog.METRICS if _list_of(metric) is None and metric not in AT_THE_SCRAPE)


def of_list(name: str) -> tuple[Metric, ...]:
    """Return the metrics that the entries of a list have."""
    return tuple(metric for metric in catalog.METRICS if _list_of(metric) == name)


def key(metric: Metric, name: str | None) -> str:
    """Return a metric's key in the entries of a list, or in the document itself: its name less what its kin share."""
    return metric.name.removeprefix(PREFIX).removeprefix(OWN.get(name or "", ""))


def _entries(values: Values, name: str, labels: tuple[str, ...]) -> list[dict[str, Any]]:
    found = {each[:2]: None for metric in of_list(name) for each in values.of(metric)}
    return [{**dict(zip(labels, each, strict=True)), **_facts(values, of_list(name), each, name)} for each in found]


def _facts(
    values: Values, metrics: Iterable[Metric], labels: tuple[str, ...], name: str | None = None
) -> dict[str, Any]:
    """Return each metric's value; with a label of its own, the values by that label.

    Of a metric by states it is the one that holds, and of one that only informs, the labels themselves.
    """
    return {key(metric, name): _fact(values, metric, labels) for metric in metrics}


def _fact(values: Values, metric: Metric, labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - any value of JSON
    own = metric.labels[len(labels) :]
    if not own:
        return values.value(metric, *labels)
    found = {each[len(labels) :]: value for each, value in values.of(metric).items() if each[: len(labels)] == labels}
    if metric.name.endswith(INFO):
        return next((dict(zip(own, each, strict=True)) for each in found), None)
    if own[-1] == STATE:
        return _states(found, own)
    return {" ".join(each): value for each, value in found.items()} or None


def _states(found: Mapping[tuple[str, ...], float], own: tuple[str, ...]) -> Any:  # noqa: ANN401 - any value of JSON
    held = {" ".join(each[:-1]): each[-1] for each, value in found.items() if value}
    return held or None if own[:-1] else held.get("")


def _incident(incident: Incident | None) -> dict[str, Any] | None:
    if incident is None:
        return None
    told = asdict(incident)
    return {"t": told.pop("seconds"), **told, "command": incident.command}


def _history(view: View) -> dict[str, Any]:
    history, uuids = view.history, [labels[1] for labels in view.values.of(catalog.GPU_INFO)]
    return {
        "step_seconds": STEP_SECONDS,
        "gpus": [
            {
                "uuid": uuid,
                "free_bytes": _points(history.free(uuid)),
                "free_at_peak_bytes": _points(history.free_at_peak(uuid)),
            }
            for uuid in uuids
        ],
        "running": _points(history.running()),
        "events": [{"t": event.seconds, "level": event.level, "text": event.text} for event in history.events],
    }


def _points(curve: Curve) -> list[tuple[float, float | None]]:
    return list(zip(*curve, strict=True))
