"""The engine's pod, by the names that kubectl takes."""

from typing import Annotated, Final

from msgspec import Meta, Struct

ObjectName = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
"""A name of Kubernetes (RFC 1123). Texts quote it in a command to paste, so it is nothing else."""

USUAL_CONTAINER: Final = "vllm"
"""The name of the engine's container in our manifests, in production-stack and in llm-d."""

ANY_LOG_COMMAND: Final = "kubectl logs --previous"
"""What shows the log of a container before its restart, where the pod is not known."""


class EnginePod(Struct, frozen=True, kw_only=True):
    """The container in which the engine runs."""

    namespace: ObjectName
    pod: ObjectName
    container: ObjectName

    @property
    def log_command(self) -> str:
        """The command that shows the engine's log before its last restart, ready to paste."""
        return f"{ANY_LOG_COMMAND} -n {self.namespace} {self.pod} -c {self.container}"
