"""What kustomize makes of a folder."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

Document = dict[str, Any]

HERE: Final = Path(__file__).parent
REPOSITORY: Final = HERE.parents[2]
DEPLOY: Final = REPOSITORY / "deploy" / "kubernetes"
COMPONENTS: Final = DEPLOY / "components"
CASES: Final = tuple(sorted(path.parent for path in HERE.glob("*/kustomization.yaml")))

COMMAND: Final = next(
    (command for command in (("kubectl", "kustomize"), ("kustomize", "build")) if shutil.which(command[0])), None
)
needs_kustomize = pytest.mark.skipif(
    COMMAND is None, reason="neither kubectl nor kustomize is on the PATH: the manifests are not rendered"
)


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Return what kustomize reports about the folder, with the load restrictions that users have."""
    assert COMMAND is not None
    return subprocess.run([*COMMAND, str(folder)], capture_output=True, text=True, check=False, timeout=60)


@functools.cache
def rendered(folder: Path) -> str:
    """Return the folder's manifests."""
    built = build(folder)
    assert (built.returncode, built.stderr) == (0, "")
    return built.stdout


def documents(text: str) -> list[Document]:
    """Return the documents of a YAML text."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def kustomization(folder: Path, *, resource: Path | None = None, components: Iterable[Path]) -> Path:
    """Write into the folder what puts components onto a resource, if any, and return the folder."""
    content = {
        "resources": [] if resource is None else [os.path.relpath(resource, folder)],
        "components": [os.path.relpath(component, folder) for component in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def find(manifests: Iterable[Document], kind: str, name: str | None = None) -> Document:
    """Return the one document of the kind, and of the name where there are several."""
    (document,) = (
        manifest for manifest in manifests if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    )
    return document
