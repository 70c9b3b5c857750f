"""Build human-readable names of processes from the program, the pid, and the pod or unit."""

from collections.abc import Callable
from pathlib import Path

from vllm_headroom.scrape.pods import ContainerNames
from vllm_headroom.scrape.proc.owners import read_owner
from vllm_headroom.scrape.proc.servers import CommandLine


def name_program(command: CommandLine) -> str:
    """Return the program in a command line and, for Python, also the script or module.

    Other arguments are never returned, because they may be secret.
    """
    program = command[0].rpartition("/")[2] or command[0]
    arguments = command[1:]
    if not program.startswith("python") or not arguments:
        return program
    script = arguments[0]
    if script in ("-c", "-"):  # Inline code is not a name, and may contain a secret.
        return program
    if script == "-m" and len(arguments) > 1:
        script = arguments[1]
    if script.startswith("-"):
        return program
    return f"{program} {script.rpartition('/')[2]}"


class ProcessNames:
    """Names processes by their command line and their cgroup.

    `find_command` returns a process's command line as last read. `find_command` returns None if the
    process is not visible. This class does not read command lines itself, because the read would
    hang for a process that is stuck in a driver.
    """

    def __init__(
        self,
        find_command: Callable[[int], CommandLine | None],
        containers: ContainerNames,
        proc: Path = Path("/proc"),
    ) -> None:
        self._find_command = find_command
        self._containers = containers
        self._proc = proc

    def find(self, pid: int) -> str | None:
        """Return the name of a process, or None if it is not visible.

        Example: "python3 train.py (pid 4711, pod team/train-0)".
        """
        command = self._find_command(pid)
        if command is None:
            return None
        details = [f"pid {pid}"]
        owner = read_owner(self._proc, pid)
        if owner is not None and owner.pod_uid is not None:
            container = self._containers.find(owner.pod_uid, owner.container_id)
            pod = f"with the UID {owner.pod_uid}"
            if container is not None:
                pod = f"{container.namespace}/{container.pod}"
            details.append(f"pod {pod}")
        elif owner is not None and owner.unit is not None:
            details.append(f"unit {owner.unit}")
        return f"{name_program(command)} ({', '.join(details)})"
