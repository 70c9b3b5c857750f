"""Read the names of this node's pods and containers from log file names."""

import os
import re
from pathlib import Path
from typing import Final

from msgspec import Struct

CONTAINER_LOGS: Final = Path("/var/log/containers")
"""The kubelet creates a link POD_NAMESPACE_CONTAINER-ID.log here for each container (kubelet:
`ContainerLogsDir`). Any user may list the folder. The logs that the links point to belong to root.
"""

POD_LOGS: Final = Path("/var/log/pods")
"""The kubelet creates a folder NAMESPACE_POD_UID here for each pod (kubelet: `DefaultPodLogsDir`).
A pod's folder contains a folder for each container. Only root can read the pods' parent folder
(mode 0750, seen in Kubernetes 1.34).
"""

_LINK: Final = re.compile(r"([a-z0-9.-]+)_([a-z0-9-]+)_([a-z0-9-]+)-([0-9a-f]{64})\.log")
_FOLDER: Final = re.compile(r"([a-z0-9-]+)_([a-z0-9.-]+)_([0-9a-f-]{32,36})")
"""Names in Kubernetes cannot contain an underscore."""


class ContainerName(Struct, frozen=True, kw_only=True):
    """The names of a container and its pod."""

    namespace: str
    pod: str
    container: str | None
    """The name of the container, or None if it is unknown."""


class PodFolder(Struct, frozen=True, kw_only=True):
    """The namespace and name of a pod, and the folder with its logs."""

    namespace: str
    pod: str
    folder: Path


class ContainerNames:
    """Finds the names of a container.

    If an ID is unknown, all names are listed again. `usual_container` is the usual name of an
    engine's container.
    """

    def __init__(
        self,
        usual_container: str,
        container_logs: Path = CONTAINER_LOGS,
        pod_logs: Path = POD_LOGS,
    ) -> None:
        self._usual_container = usual_container
        self._container_logs = container_logs
        self._pod_logs = pod_logs
        self._containers: dict[str, ContainerName] = {}
        self._folders: dict[str, PodFolder] = {}

    def find(self, pod_uid: str, container_id: str | None) -> ContainerName | None:
        """Return the names of a pod's container, or None if they cannot be found."""
        if container_id is not None:
            if container_id not in self._containers:
                self._containers = _list_containers(self._container_logs)
            name = self._containers.get(container_id)
            if name is not None:
                return name
        if pod_uid not in self._folders:
            self._folders = _list_folders(self._pod_logs)
        folder = self._folders.get(pod_uid)
        if folder is None:
            return None
        return ContainerName(
            namespace=folder.namespace,
            pod=folder.pod,
            container=_find_container(folder.folder, container_id, self._usual_container),
        )


def _list_containers(logs: Path) -> dict[str, ContainerName]:
    """Return each container's names, keyed by its ID.

    Returns {} if the log links cannot be listed.
    """
    matches = (_LINK.fullmatch(link) for link in _list_entries(logs))
    return {
        match[4]: ContainerName(namespace=match[2], pod=match[1], container=match[3])
        for match in matches
        if match is not None
    }


def _list_folders(logs: Path) -> dict[str, PodFolder]:
    """Return each pod's names, keyed by its UID.

    Returns {} if the folders cannot be listed.
    """
    matches = (_FOLDER.fullmatch(folder) for folder in _list_entries(logs))
    return {
        match[3]: PodFolder(namespace=match[1], pod=match[2], folder=logs / match[0])
        for match in matches
        if match is not None
    }


def _list_entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except OSError:
        return []


def _find_container(folder: Path, container_id: str | None, usual_name: str) -> str | None:
    """Return the name of a container in a pod's folder, or None if unknown.

    The result is the first of these that exists:
    - The pod's only container.
    - The container whose log links to a file with its ID (Docker).
    - The container with the usual name of an engine's container.
    """
    containers = _list_entries(folder)
    if len(containers) == 1:
        return containers[0]
    for container in containers:
        if container_id is not None and _has_log_of(folder / container, container_id):
            return container
    return usual_name if usual_name in containers else None


def _has_log_of(folder: Path, container_id: str) -> bool:
    """Return whether a log in the folder links to a file with this ID."""
    try:
        with os.scandir(folder) as entries:
            links = [Path(entry.path) for entry in entries if entry.is_symlink()]
        return any(container_id in str(link.readlink()) for link in links)
    except OSError:
        return False
