"""Reach the API server from inside a pod, as the pod's service account."""

import os
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct

from vllm_headroom.scrape.http.reader import PageReader

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the credentials of the pod's service account."""


class PodApi(Struct, frozen=True, kw_only=True):
    """This pod, and its cluster's API server."""

    reader: PageReader
    namespace: str
    name: str


def open_api(account: Path, timeout_seconds: float) -> PageReader | None:
    """Return a reader for this pod's API server, or None outside of a pod.

    Outside of a pod, an environment variable or the service account's token is missing.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not (host and port.isdigit() and (account / "token").is_file()):
        return None
    return PageReader(
        url=str(httpx.URL(scheme="https", host=host, port=int(port))),
        timeout_seconds=timeout_seconds,
        bearer_token_file=account / "token",
        ca_file=account / "ca.crt",
        headers={"Accept": "application/json"},
    )


def open_pod_api(account: Path, timeout_seconds: float) -> PodApi | None:
    """Return this pod and its API server, or None outside of a pod.

    Outside of a pod, a service account file or an environment variable is missing.
    """
    name = os.environ.get("POD_NAME", "")
    try:
        namespace = (account / "namespace").read_text().strip()
    except OSError:
        namespace = ""
    reader = open_api(account, timeout_seconds)
    if reader is None or not name or not namespace:
        return None
    return PodApi(reader=reader, namespace=namespace, name=name)
