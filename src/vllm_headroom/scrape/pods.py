"""Read the names of the pods of this node from the folders of their logs."""

import os
import re
from pathlib import Path
from typing import Final

from msgspec import Struct

POD_LOGS: Final = Path("/var/log/pods")
"""Where every kubelet has a folder NAMESPACE_POD_UID for each pod of its node, and below that a
folder for each container (kubelet: `DefaultPodLogsDir`)."""

_FOLDER: Final = re.compile(r"([a-z0-9-]+)_([a-z0-9.-]+)_([0-9a-f-]{32,36})")
"""Names of Kubernetes have no underscore."""


class PodName(Struct, frozen=True, kw_only=True):
    """The names of a pod, and the folder of its logs."""

    namespace: str
    pod: str
    folder: Path


class PodNames:
    """Finds the names of a pod by its UID; the folders are read again for a UID that is new."""

    def __init__(self, logs: Path = POD_LOGS) -> None:
        self._logs = logs
        self._names: dict[str, PodName] = {}

    def find(self, uid: str) -> PodName | None:
        """Return the names of a pod; None where its folder is not visible."""
        if uid not in self._names:
            self._names = _list_names(self._logs)
        return self._names.get(uid)


def _list_names(logs: Path) -> dict[str, PodName]:
    """Return the names of each pod by its UID; empty where the folders cannot be read."""
    try:
        folders = os.listdir(logs)  # noqa: PTH208 - names, not paths
    except OSError:
        return {}
    names = {}
    for folder in folders:
        match = _FOLDER.fullmatch(folder)
        if match is not None:
            names[match[3]] = PodName(namespace=match[1], pod=match[2], folder=logs / folder)
    return names


def find_container(name: PodName, container_id: str | None, usual_name: str) -> str | None:
    """Return the name of a container in a pod; None where it cannot be known.

    It is the pod's only container, else the one whose log is a link to a file with the container's
    ID, as Docker has it, else the one with the usual name of the engine's container.
    """
    try:
        containers = sorted(os.listdir(name.folder))  # noqa: PTH208 - names, not paths
    except OSError:
        return None
    if len(containers) == 1:
        return containers[0]
    for container in containers:
        if container_id is not None and _has_log_of(name.folder / container, container_id):
            return container
    return usual_name if usual_name in containers else None


def _has_log_of(folder: Path, container_id: str) -> bool:
    """Return whether a log in the folder is a link to a file with the container's ID."""
    try:
        with os.scandir(folder) as entries:
            links = [Path(entry.path) for entry in entries if entry.is_symlink()]
        return any(container_id in str(link.readlink()) for link in links)
    except OSError:
        return False
