"""Find a process's owner from its cgroup: a pod's container or a systemd unit."""

import re
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.scrape.proc.files import read_start, split_kernel_lines

_POD: Final = re.compile(
    r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])"
)
"""A pod's folder in the cgroup tree. With the kubelet's cgroup driver `systemd`, the UID has
underscores. With `cgroupfs`, it has dashes. The UID of a static pod is a hash.
"""

_CONTAINER: Final = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
"""A container's ID as written by containerd, CRI-O and Docker."""

_NOT_A_SERVICE: Final = re.compile(r"init\.scope|session-.*|user@.*")
"""Units created by a login, which contain whatever the user runs."""


class Owner(Struct, frozen=True, kw_only=True):
    """The container in a pod, or the systemd unit, to which a process belongs."""

    key: str
    """Identifies a group of processes that see each other: `pod:UID`, or the cgroup's path."""
    pod_uid: str | None = None
    """The pod's UID with dashes, as in the API, or None outside a pod."""
    container_id: str | None = None
    """The container's ID. None outside a pod, or if the pod's cgroup does not show the ID."""
    unit: str | None = None
    """The systemd service or scope. None in a pod or if there is no unit."""


def read_owner(proc: Path, pid: int) -> Owner | None:
    """Return the owner of a process, or None if its cgroup cannot be read."""
    try:
        text = read_start(f"{proc}/{pid}/cgroup").decode(errors="replace")
    except OSError:
        return None
    return parse_owner(text)


def parse_owner(text: str) -> Owner | None:
    """Return the owner of a process whose cgroup file has this content.

    Each line of the text contains a hierarchy's number, controllers and path. In cgroup version 2,
    the number is 0. Returns None if no line of the text has this form.
    """
    paths: dict[str, str] = {}
    for line in split_kernel_lines(text):
        hierarchy, separator, following = line.partition(":")
        controllers, second_separator, path = following.partition(":")
        if not separator or not second_separator:
            continue
        paths["" if hierarchy == "0" else controllers] = path
        # In both cgroup versions, a pod's path names the pod and the container.
        pod = _POD.search(path)
        if pod is not None:
            uid = pod[1].replace("_", "-")
            container = _CONTAINER.search(path, pod.end())
            return Owner(
                key=f"pod:{uid}",
                pod_uid=uid,
                container_id=None if container is None else container[0],
            )
    if not paths:
        return None
    # In version 1, systemd has a separate hierarchy.
    path = paths.get("name=systemd") or paths.get("") or next(iter(paths.values()))
    return Owner(key=path, unit=_find_unit(path))


def _find_unit(path: str) -> str | None:
    """Return the innermost service or scope on a cgroup's path, or None."""
    for name in reversed(path.split("/")):
        if name.endswith((".service", ".scope")):
            return None if _NOT_A_SERVICE.fullmatch(name) else name
    return None
