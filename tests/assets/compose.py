"""The compose file as it is written, and as Prometheus and Alertmanager find their files by it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "compose"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
PROFILES: Final = ("vllm", "demo")

_VARIABLE: Final = re.compile(r"\$\{\w+:-([^}]*)\}")


def started(profile: str) -> dict[str, dict[str, Any]]:
    """Return the services of a profile, those without one included."""
    return {name: service for name, service in SERVICES.items() if profile in service.get("profiles", [profile])}


def by_default(text: str) -> str:
    """Return a value as it is when no variable is set."""
    return _VARIABLE.sub(r"\1", text)


def reachable_names(profile: str) -> set[str]:
    """Return the host names by which the services of a profile find each other."""
    services = started(profile)
    aliases = (service.get("networks", {}).get("default", {}).get("aliases", ()) for service in services.values())
    return {*services, *(alias for names in aliases for alias in names)}


def mounts(service: str) -> Iterator[tuple[Path, Path]]:
    """Yield each file or folder of the repository that a service reads, and where."""
    for volume in SERVICES[service].get("volumes", ()):
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            yield (FOLDER / source).resolve(), Path(target)


def lay_out(service: str, root: Path) -> None:
    """Copy what a service reads to where it reads it, below `root`."""
    for source, target in mounts(service):
        place = root / target.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
