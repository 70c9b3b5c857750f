"""A single reading of the GPUs, their processes and /dev/shm, made with the daemon's readers."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.attribution import (
    FATE_TEXTS,
    are_pids_reliable,
    find_fate,
    is_process_memory_reliable,
)
from vllm_headroom.derive.host_memory import ContainerState, update_container
from vllm_headroom.model import Failure, GpuReadings, HostMemory, ProcessReadings, Shm
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.nvml.device import GpuFaults
from vllm_headroom.scrape.proc.files import read_entry, read_own_pid
from vllm_headroom.scrape.proc.host import read_host, read_shm
from vllm_headroom.scrape.proc.names import name_program
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.worker import Worker

PROCESSES_SECONDS: Final = 2.0

ENDED: Final = "a process that has ended"
"""The name shown for a process that NVML still lists although it has ended. It is missing from the
machine's /proc or is a zombie. The driver has not yet freed the memory of such a process.
"""


class GpuOccupant(Struct, frozen=True, kw_only=True):
    """A process on a GPU.

    `name` and `used_bytes` are None if they cannot be read from this container.
    """

    pid: int
    name: str | None
    used_bytes: int | None


class Conditions(Struct, frozen=True, kw_only=True):
    """The state of the machine at one reading: GPUs, processes, host memory and /dev/shm."""

    readings: GpuReadings | Failure
    faults: tuple[GpuFaults, ...]
    """The faults of the GPUs that answered in time."""

    holders: Mapping[str, tuple[GpuOccupant, ...]]
    """The processes on each GPU, by UUID. A GPU is absent if NVML does not list its processes."""

    shm: Shm | None
    """The size of /dev/shm, or None if it does not exist."""

    offload_sizes_bytes: Mapping[str, int] = {}
    """The sizes of the files from KV cache offloading in /dev/shm, by path.

    The mapping is empty while any vLLM process is visible. This process may be using the files.
    """

    host: HostMemory | None = None
    """The memory of this program's container, or None if it is unknown."""

    swap_bytes: int | None = None
    """The machine's swap, including zram, or None if it is unknown."""

    cuda_major: int | None = None
    """The major version of CUDA installed with vLLM in this environment, or None."""

    vllm_version: str | None = None
    """The version of vLLM in this environment, or None if it is not installed."""

    engine_pids: frozenset[int] = frozenset()
    """The pids of the engine on the configured port. The set is empty if they are not visible."""


async def read_conditions(
    gpus: Gpus, processes: Processes, *, proc: Path, shm: Path, timeout_seconds: float
) -> Conditions:
    """Read the machine once.

    A part that cannot be read is a Failure, None or empty. The GPUs are read twice, and each
    reading may take up to `timeout_seconds`.
    """
    readings = await gpus.read(timeout_seconds)
    if isinstance(readings, Failure):
        return Conditions(readings=readings, faults=(), holders={}, shm=read_shm(shm))
    # The faults are read separately, because they need several NVML calls per GPU.
    faults = await gpus.read_faults(timeout_seconds)
    listed = await processes.read(PROCESSES_SECONDS)
    holders = await _find_holders(readings, listed, proc)
    conditions = Conditions(
        readings=readings,
        faults=faults,
        holders=holders,
        shm=read_shm(shm),
        host=_read_container(proc),
        cuda_major=find_cuda_major(),
        vllm_version=find_vllm_version(),
    )
    if isinstance(listed, Failure):
        return conditions
    # Any visible vLLM may be using the files.
    has_engine = bool(listed.engine or listed.neighbours)
    machine = listed.host.machine
    return replace(
        conditions,
        offload_sizes_bytes={} if has_engine else _find_offload_files(shm),
        swap_bytes=None if machine is None else machine.swap_bytes,
        engine_pids=frozenset(process.pid for process in listed.engine),
    )


CUDA_PACKAGES: Final = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
"""The CUDA packages that torch installs. The first is for CUDA 13 and newer, the second is for
older versions.
"""


def find_cuda_major() -> int | None:
    """Return the major version of CUDA installed with this program.

    Returns None if CUDA is not installed.
    """
    for package in CUDA_PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        major = version.partition(".")[0]
        return int(major) if major.isdecimal() else None
    return None


def find_vllm_version() -> str | None:
    """Return the version of vLLM installed with this program, or None if there is none."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def _read_container(proc: Path) -> HostMemory | None:
    """Return the memory of this process's container, or None if it is unknown."""
    try:
        own_host = read_host(proc, read_own_pid(proc))
    except (OSError, ValueError):
        return None
    own = ProcessReadings(engine=(), visible_pids=frozenset(), sees_host_pids=False, host=own_host)
    _, host = update_container(ContainerState(), own, limit_bytes=None)
    return host


def _find_offload_files(shm: Path) -> dict[str, int]:
    """Return the sizes of vLLM's offload files in /dev/shm, by path."""
    sizes_bytes = {}
    for file in sorted(shm.glob("vllm_offload_*")):
        with suppress(OSError):
            sizes_bytes[str(file)] = file.stat().st_size
    return sizes_bytes


async def _find_holders(
    readings: GpuReadings, listed: ProcessReadings | Failure, proc: Path
) -> dict[str, tuple[GpuOccupant, ...]]:
    """Return the processes on each GPU, by UUID.

    A GPU is absent if NVML does not list its processes. In a container, the driver's pids and sizes
    may not be valid. If they are invalid, the names and sizes are None.
    """
    names: dict[int, str] = {}
    if not isinstance(listed, Failure) and are_pids_reliable(readings, listed):
        names = await _name_processes(readings, listed, proc)
    is_memory_reliable = is_process_memory_reliable(readings, listed)
    holders = {}
    for device in readings.devices:
        if device.processes is None:
            continue
        holders[device.uuid] = tuple(
            GpuOccupant(
                pid=process.pid,
                name=names.get(process.pid),
                used_bytes=process.used_bytes if is_memory_reliable else None,
            )
            for process in device.processes
        )
    return holders


async def _name_processes(
    readings: GpuReadings, listed: ProcessReadings, proc: Path
) -> dict[int, str]:
    """Return the names of the processes on the GPUs, by pid.

    The name of a process that has ended is ENDED. A process without a readable name is absent.
    """
    pids: set[int] = set()
    for device in readings.devices:
        pids.update(process.pid for process in device.processes or ())
    # Nothing can be read about processes that are not visible here.
    visible_pids = pids & listed.visible_pids
    worker = Worker[dict[int, str]]("names")
    try:
        names = await worker.call(lambda: _read_names(proc, visible_pids), PROCESSES_SECONDS)
    except OSError:  # If a process hangs in the driver, reading its command line would also hang.
        names = {}
    finally:
        worker.stop()
    for pid in pids:
        fate = find_fate(pid, listed, frozenset())
        if fate is None:
            continue
        name = names.get(pid)
        names[pid] = f"{name}, {FATE_TEXTS[fate]}" if name else ENDED
    return names


def _read_names(proc: Path, pids: Iterable[int]) -> dict[int, str]:
    """Return the names of the processes that are still running, by pid."""
    names = {}
    for pid in pids:
        entry = read_entry(proc, pid)
        if entry is not None:
            names[pid] = name_program(entry.command)
    return names
