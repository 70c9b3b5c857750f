"""The data of a doctor check, and the lines that fix what is missing."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct
from msgspec.structs import asdict

from vllm_headroom.config import AUTO
from vllm_headroom.daemon.parts import build_page_reader
from vllm_headroom.derive.configured import complete_page
from vllm_headroom.model import EnginePage, Failure, TokenBytes
from vllm_headroom.scrape.http.failures import hide_secrets
from vllm_headroom.scrape.proc.served_model import ServedModel
from vllm_headroom.vocabulary import Reason, Role
from vllm_headroom_tools.look import (
    LOOK_SECONDS,
    Machine,
    fetch_engines,
    fetch_once,
    survey_machine,
)
from vllm_headroom_tools.openai import parse_server_version
from vllm_headroom_tools.settings import ModelSettings


class Status(StrEnum):
    """The state of a check.

    UNKNOWN means that the check could not be performed. The result is neither OK nor MISSING.
    """

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"


class Fix(Struct, frozen=True, kw_only=True):
    """One way to fix a problem: the lines to add, and where.

    If a check has several fixes, they are alternatives.
    """

    where: str
    lines: tuple[str, ...]


class Check(Struct, frozen=True):
    """The result of one check."""

    state: Status
    text: str
    """What was found or is missing. If the check is unknown or does not apply, this is the reason.
    """
    details: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    """The series that the daemon cannot export until the problem is fixed. A name that ends in `*`
    covers all series with that prefix.
    """
    fixes: tuple[Fix, ...] = ()


POD: Final = "in the pod's spec"
COMPOSE: Final = "in the sidecar's compose service"
NODE: Final = "on the node"
VLLM: Final = "in vLLM's arguments"

CLAIM: Final = "resources: {claims: [{name: gpu}]}"


def count_roles(roles: Iterable[Role]) -> str:
    """Return the number of processes per role as text, such as "1 api_server, 2 worker"."""
    counts = Counter(str(role) for role in roles)
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))


def put(where: str, *lines: str) -> Fix:
    """Return the fix that adds these lines in the place `where`."""
    return Fix(where=where, lines=lines)


def fix_setting(*lines: str) -> Fix:
    """Return the fix that sets a setting of the daemon."""
    return put("in the sidecar's environment", *lines)


SEE_THE_GPUS: Final = (
    put(
        POD,
        "runtimeClassName: nvidia",
        "containers:  # initContainers, where the sidecar is a native one",
        "- name: headroom",
        "  env:",
        "  - {name: NVIDIA_VISIBLE_DEVICES, value: all}",
        "  - {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}",
    ),
    put("in both containers, where the pod has the GPUs by a DRA claim, here named gpu", CLAIM),
    put(
        "in the pod's metadata, where the GPU Operator runs its NRI plugin",
        "annotations: {nvidia.cdi.k8s.io/container.headroom: nvidia.com/gpu=all}",
    ),
    put(
        COMPOSE,
        "runtime: nvidia",
        "environment: {NVIDIA_VISIBLE_DEVICES: all, NVIDIA_DRIVER_CAPABILITIES: utility}",
    ),
    put(
        "on a machine without containers, once NVIDIA's driver is installed, this works",
        "nvidia-smi -L",
    ),
)
SEE_THE_PROCESSES: Final = (
    put(POD, "shareProcessNamespace: true"),
    put(
        f"{COMPOSE} and in vLLM's, beside a service that only sleeps (deploy/compose)",
        'pid: "service:processes"',
    ),
)
SEE_HOST_PIDS: Final = put(POD, "hostPID: true")
NEWER_DRIVER: Final = put(NODE, "# NVIDIA driver 565.57.01 or newer")
KERNEL_LOG: Final = put(NODE, "dmesg --ctime | grep -e NVRM -e Xid -e amdgpu")
SEE_AMDS_CARDS: Final = put(
    "on a machine with AMD's cards, once their driver amdgpu is loaded, this works, in a container"
    " too",
    "cat /sys/class/drm/card*/device/mem_info_vram_total",
)
ASK_KFD: Final = (
    put(COMPOSE, "devices: [/dev/kfd, /dev/dri]"),
    put("in both containers, where the pod has AMD's cards by a DRA claim, here named gpu", CLAIM),
)
TRACE_THEM: Final = (
    put(
        "in the pod's spec, beside shareProcessNamespace: true, where vLLM runs as root",
        "containers:  # initContainers, where the sidecar is a native one",
        "- name: headroom",
        "  securityContext: {runAsUser: 0, runAsNonRoot: false, capabilities: {drop: [ALL], add:"
        " [SYS_PTRACE]}}",
    ),
    put(COMPOSE, 'user: "0"', "cap_add: [SYS_PTRACE]"),
)
NEW_CONTAINER: Final = (
    put(
        "in Kubernetes nothing: after this time the daemon exits, and the kubelet restarts its"
        " container",
        "HEADROOM_GPU_FATAL_GRACE_SECONDS=60",
    ),
    put("with compose", "docker compose up --detach --force-recreate headroom"),
)
SAY_WHICH_PORT: Final = (
    put(VLLM, "--port 8001  # another for each server"),
    fix_setting("HEADROOM_ENGINE_URL=http://127.0.0.1:8001/metrics"),
)

NVML: Final[dict[Reason, tuple[Fix, ...]]] = {
    Reason.LIBRARY_MISSING: (*SEE_THE_GPUS, SEE_AMDS_CARDS),
    Reason.NO_DEVICES: (*SEE_THE_GPUS, SEE_AMDS_CARDS),
    Reason.NO_PERMISSION: SEE_THE_GPUS,
    Reason.DRIVER_MISSING: (
        put(POD, 'nodeSelector: {nvidia.com/gpu.present: "true"}'),
        put(NODE, "modprobe nvidia"),
        SEE_AMDS_CARDS,
    ),
    Reason.VERSION_MISMATCH: NEW_CONTAINER,
    Reason.UNKNOWN: (*NEW_CONTAINER, KERNEL_LOG),
}
"""The fixes for a failure of NVML as a whole, keyed by reason. For any other reason, the cause is
in the kernel log.
"""


def find_engine_fixes(reason: Reason, elsewhere: Fix) -> tuple[Fix, ...]:
    """Return the fixes for a page that cannot be read.

    `elsewhere` is the fix that changes the address of the page.
    """
    match reason:
        case Reason.TIMEOUT:
            slower = ("HEADROOM_ENGINE_TIMEOUT_SECONDS=10", "HEADROOM_SAMPLE_INTERVAL_SECONDS=10")
            return fix_setting(*slower), elsewhere
        case Reason.TLS:
            return fix_setting("HEADROOM_ENGINE_CA_FILE=/path/to/ca.pem"), elsewhere
        case Reason.UNAUTHORIZED | Reason.CREDENTIALS:
            return (fix_setting("HEADROOM_ENGINE_BEARER_TOKEN_FILE=/path/to/token"),)
        case Reason.TOO_LARGE:
            return fix_setting("HEADROOM_ENGINE_MAX_PAGE_BYTES=32MiB"), elsewhere
        case _:
            return (elsewhere,)


VERSION_SECONDS: Final = 1.0
"""The time limit for reading the engine's version and model. The checks also work without these."""


class Survey(Machine, frozen=True, kw_only=True):
    """A single reading of the machine and the engine."""

    url: httpx.URL
    """The configured URL of the engine's page, without user and password."""
    page: EnginePage | Failure
    version: str | None
    """The version that the server reports, or None if it does not report one."""
    daemon_waits_seconds: float
    """The daemon's timeout for the page; the doctor's may be shorter."""
    host_limit_bytes: int | None = None
    """The configured limit for vLLM's host memory, or None if no limit is set."""
    token_bytes: TokenBytes | None = None
    """Computes the bytes per token for the engine's model. The value is None if the model is not
    visible.
    """

    @property
    def served_port(self) -> int | None:
        """Return the port in the command line of the local engine.

        Returns None if no port is known, or if there are several.
        """
        ports = () if isinstance(self.processes, Failure) else self.processes.ports
        if len(ports) != 1:
            return None
        return min(ports)


async def survey_engine(settings: ModelSettings, proc: Path, sys: Path) -> Survey:
    """Read the engine's page, the GPUs and the processes once, as the daemon does.

    A source that cannot be read is replaced by a Failure in the result.
    """
    url = httpx.URL(settings.engine_url)
    # The value below is the daemon's own timeout. The doctor never waits longer than the daemon.
    daemon_waits = min(settings.engine_timeout_seconds, settings.sample_interval_seconds)
    reader = build_page_reader(settings, str(url), timeout_seconds=min(daemon_waits, LOOK_SECONDS))
    profile = None if settings.engine_profile == AUTO else settings.engine_profile
    page = asyncio.create_task(fetch_engines(reader, profile))
    version_reader = build_page_reader(
        settings, str(url.join("version")), timeout_seconds=VERSION_SECONDS
    )
    machine, version_page = await asyncio.gather(
        survey_machine(settings, page, proc, sys), fetch_once(version_reader)
    )
    options = None
    token_bytes = None
    # If no model is configured, the processes show which model is served.
    if not isinstance(machine.processes, Failure):
        options = machine.processes.options
        parse_model = settings.model_reader.parse
        if parse_model is not None:
            token_bytes = await ServedModel(parse_model, proc, monotonic=time.monotonic).wait(
                machine.processes, VERSION_SECONDS
            )
    return Survey(
        **asdict(machine),
        url=hide_secrets(url),
        page=complete_page(await page, None, options, token_bytes),
        version=parse_server_version(version_page) if isinstance(version_page, str) else None,
        daemon_waits_seconds=daemon_waits,
        host_limit_bytes=settings.host_memory_limit_bytes,
        token_bytes=token_bytes,
    )
