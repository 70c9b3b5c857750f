"""The engine's pod, identified by the names that kubectl accepts."""

from typing import Annotated, Final

from msgspec import Meta, Struct

ObjectName = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
"""A Kubernetes name (RFC 1123). Nothing else is accepted, because the name becomes part of commands
that people paste.
"""

USUAL_CONTAINER: Final = "vllm"
"""The name of the engine's container in our manifests, in production-stack and in llm-d."""

ANY_LOG_COMMAND: Final = "kubectl logs --previous"
"""The command to show if the pod is unknown. The command prints a container's log from before its
last restart.
"""


class EnginePod(Struct, frozen=True, kw_only=True):
    """The container in which the engine runs."""

    namespace: ObjectName
    pod: ObjectName
    container: ObjectName

    @property
    def log_command(self) -> str:
        """Return the command that shows the engine's log from before its last restart."""
        return f"{ANY_LOG_COMMAND} -n {self.namespace} {self.pod} -c {self.container}"
