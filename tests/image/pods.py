"""Pods of Kubernetes without a cluster, which podman runs."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.image.containers import FOLDER, IMAGE, Container, containers

COMPONENTS: Final = Path(__file__).parents[2] / "deploy" / "kubernetes" / "components"


def sidecar() -> dict[str, Any]:
    """Return the sidecar's container as it is shipped, but for what podman 4 cannot do.

    It probes by curl inside the container, and gives ports only to a network that other containers share.
    """
    patch = yaml.safe_load((COMPONENTS / "sidecar-plain" / "patch.yaml").read_text(encoding="utf-8"))
    (spec,) = (change["value"] for change in patch if change["path"].endswith("/containers/-"))
    return {name: value for name, value in spec.items() if name not in {"livenessProbe", "ports"}}


def sharing() -> dict[str, Any]:
    """Return what the shipped component adds to the pod itself."""
    patch = yaml.safe_load((COMPONENTS / "pod" / "patch.yaml").read_text(encoding="utf-8"))
    spec: dict[str, Any] = patch["spec"]["template"]["spec"]
    return spec


def container_spec(
    spec: Mapping[str, Any], environment: Mapping[str, str], mounts: Mapping[Path, Path]
) -> dict[str, Any]:
    """Return `spec` with the image under test, more variables and files of this machine to read."""
    variables = [{"name": name, "value": value} for name, value in environment.items()]
    places = [{"name": _volume(here), "mountPath": str(there), "readOnly": True} for here, there in mounts.items()]
    own = {"env": [], "volumeMounts": [], **spec}
    return {**own, "image": IMAGE, "env": own["env"] + variables, "volumeMounts": own["volumeMounts"] + places}


@contextlib.contextmanager
def pod(folder: Path, specs: list[dict[str, Any]], *files: Path) -> Iterator[dict[str, Container]]:
    """Run a pod with a separate network and yield its containers by name; remove it at the end.

    `files` are all that its containers read of this machine; `folder` is for its manifest.
    """
    if "podman" not in (FOLDER / "containers").read_text():
        pytest.skip("a pod needs podman, and a Docker engine is used here")
    name = f"headroom-{uuid.uuid4().hex[:8]}"
    volumes = [{"name": _volume(path), "hostPath": {"path": str(path)}} for path in files]
    spec = sharing()
    spec |= {"containers": specs, "volumes": [*spec["volumes"], *volumes]}
    manifest = folder / "pod.json"
    manifest.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}))
    try:
        containers("play", "kube", "--network=none", str(manifest))
        yield {each["name"]: Container(f"{name}-{each['name']}") for each in specs}
    finally:
        with contextlib.suppress(AssertionError):  # it may not have begun
            containers("play", "kube", "--down", str(manifest))


def _volume(path: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "-", path.name.lower())
