"""The schema of /snapshot.json in docs/ is made from the catalogue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from tests.assets.console import ROOT
from tests.conftest import Golden
from vllm_headroom.expose.snapshot import DOCUMENT_METRICS, LIST_LABELS, LIST_METRICS, STATE_LABEL, build_key
from vllm_headroom.model import Metric
from vllm_headroom.vocabulary import Level, Situation

NUMBER: Final = {"type": ["number", "null"]}
TEXT: Final = {"type": "string"}
MAYBE: Final = {"type": ["string", "null"]}


def form(metric: Metric, own: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of one metric's value; `own` are its labels beyond those of its list."""
    if not own:
        return NUMBER
    if metric.name.endswith("_info"):
        return {"type": ["object", "null"], "properties": dict.fromkeys(own, TEXT), "required": list(own)}
    if own == (STATE_LABEL,):
        return MAYBE
    values = TEXT if own[-1] == STATE_LABEL else {"type": "number"}
    return {"type": ["object", "null"], "additionalProperties": values}


def facts(metrics: Iterable[Metric], name: str | None, labels: tuple[str, ...]) -> dict[str, Any]:
    return {
        build_key(metric, name): {**form(metric, metric.labels[len(labels) :]), "description": metric.help}
        for metric in metrics
    }


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False}


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def schema() -> dict[str, Any]:
    """Return the schema of the whole document."""
    level = {"enum": list(Level)}
    curve = {"type": "array", "description": "pairs of seconds since the epoch and a value, null for a gap"}
    lists = {
        name: listed(closed({**dict.fromkeys(labels, TEXT), **facts(LIST_METRICS[name], name, labels)}))
        for name, labels in LIST_LABELS.items()
    }
    verdict = {"subject": TEXT, "level": level, "sentence": TEXT, "alert": MAYBE, "runbook": MAYBE}
    verdict |= {"situation": {"enum": [str(situation) for situation in Situation]}}
    history = {
        "step_seconds": {"type": "number"},
        "gpus": listed(closed({"uuid": TEXT, "free_bytes": curve, "free_at_peak_bytes": curve})),
        "host_free_bytes": curve,
        "running": curve,
        "kv_cache_used_ratio": curve,
        "events": listed(closed({"t": {"type": "number"}, "level": level, "text": TEXT})),
    }
    incident = {"t": {"type": "number"}, "what": TEXT, "reason": MAYBE, "sentence": MAYBE}
    incident |= {"file": TEXT, "command": TEXT}
    snapshot_properties = {
        "headroom_snapshot": {"const": 1},
        "version": TEXT,
        "t": {**NUMBER, "description": "seconds since the epoch"},
        "age_seconds": NUMBER,
        "level": level,
        "verdicts": listed(closed(verdict)),
        "problems": listed(closed(dict.fromkeys(("source", "reason", "message"), TEXT))),
        "last_incident": {**closed(incident), "type": ["object", "null"]},
        **facts(DOCUMENT_METRICS, None, ()),
        **lists,
        "history": closed(history),
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "/snapshot.json of vllm-headroom"}
    return {**head, "description": "null is what is not known, and never 0", **closed(snapshot_properties)}


def test_the_schema_is_that_of_the_code(golden: Golden) -> None:
    golden(ROOT / "docs" / "snapshot.schema.json", json.dumps(schema(), indent=1) + "\n")
