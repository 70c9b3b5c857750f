"""Read this pod's names from the environment."""

import os
from typing import Final

import msgspec

from vllm_headroom.model import USUAL_CONTAINER, EnginePod

CONTAINER_VARIABLE: Final = "HEADROOM_ENGINE_CONTAINER"
"""The setting that names the engine's container, because the downward API cannot name it."""


def read_engine_pod(container: str | None = None) -> EnginePod | None:
    """Return the engine's pod as named by the downward API.

    If `container` is None, the container's name is taken from the environment. Returns None outside
    of a pod, or if a name is not valid in Kubernetes.
    """
    names = {
        "namespace": os.environ.get("POD_NAMESPACE"),
        "pod": os.environ.get("POD_NAME"),
        "container": container or os.environ.get(CONTAINER_VARIABLE) or USUAL_CONTAINER,
    }
    try:
        return msgspec.convert(names, EnginePod)
    except msgspec.ValidationError:
        return None
