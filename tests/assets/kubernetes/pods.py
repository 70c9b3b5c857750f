"""The pods that a manifest describes, also inside a custom resource."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Pod = tuple[dict[str, str], dict[str, Any]]


def pods(value: Any) -> Iterator[Pod]:
    """Yield labels and specification of every pod that is described anywhere in a document."""
    if isinstance(value, list):
        for item in value:
            yield from pods(item)
    elif isinstance(value, dict):
        yield from described(value)
        for item in value.values():
            yield from pods(item)


def described(document: dict[str, Any]) -> Iterator[Pod]:
    """Yield the pods that this object itself describes."""
    for key in ("template", "leaderTemplate", "workerTemplate"):
        if "containers" in document.get(key, {}).get("spec", {}):  # a StormService's template describes roles
            yield document[key].get("metadata", {}).get("labels", {}), document[key]["spec"]
    if "predictor" in document:  # KServe puts the container of the model into the pod
        predictor = dict(document["predictor"])
        model = {"name": "model", "image": "any", "resources": predictor.pop("model")["resources"]}
        yield predictor.pop("labels"), predictor | {"containers": [model]}
