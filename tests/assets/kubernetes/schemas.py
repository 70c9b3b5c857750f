"""What Kubernetes and the operators' own types report about a manifest; a field that they do not know is a fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest
from jsonschema import Draft7Validator

from tests.assets.kubernetes.rendering import HERE, Document

CRDS: Final[Mapping[str, Any]] = {
    schema["definitions"][schema["$ref"].rpartition("/")[2]]["properties"]["kind"]["const"]: schema
    for schema in (json.loads(path.read_text()) for path in sorted((HERE / "crds").glob("*.json")))
}

DRA_SINCE: Final = (1, 34)
"""resource.k8s.io/v1 is in Kubernetes from here on."""


def versions() -> tuple[str, ...]:
    """Return the oldest version that has native sidecars, the first with DRA, and the newest there is a schema of."""
    return ("1.29", "1.34", ".".join(_validator().latest_version().split(".")[:2]))


def faults(document: Document, version: str) -> list[str]:
    """Return what is wrong with the document in this version of Kubernetes."""
    if document["kind"] in CRDS:
        return [
            f"{error.json_path}: {error.message}"
            for error in Draft7Validator(CRDS[document["kind"]]).iter_errors(document)
        ]
    validator = _validator()
    try:
        validator.validate(document, version, strict=True)
    except (validator.ValidationError, validator.SchemaNotFoundError) as error:
        where = ".".join(str(step) for step in getattr(error, "path", ()))
        return [f"{document['kind']} in {version}: {where}: {error.message}"]
    return []


def uses_dra(document: Document) -> bool:
    """Return whether a document is of DRA or claims what it hands out."""
    return document["apiVersion"].startswith("resource.k8s.io/") or "resourceClaims" in json.dumps(document)


def _validator() -> Any:
    return pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
