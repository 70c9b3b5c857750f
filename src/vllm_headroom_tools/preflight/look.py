"""One look at the GPUs, their processes and /dev/shm, through the daemon's own readers."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.attribution import (
    FATE_TEXTS,
    are_pids_true,
    find_fate,
    is_process_memory_true,
)
from vllm_headroom.derive.host_memory import ContainerState, update_container
from vllm_headroom.model import Failure, GpuReadings, HostMemory, ProcessReadings, Shm
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.nvml.device import GpuFaults
from vllm_headroom.scrape.proc.files import read_entry, read_own_pid
from vllm_headroom.scrape.proc.host import read_host, read_shm
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.worker import Worker

PROCESSES_SECONDS: Final = 2.0
ENDED: Final = "a process that has ended"
"""NVML lists it, and in the machine's /proc it is not or is a zombie: the driver has not taken its memory back yet."""


class GpuOccupant(Struct, frozen=True, kw_only=True):
    """A process on a GPU; `name` and `used_bytes` are None where they cannot be known from here."""

    pid: int
    name: str | None
    used_bytes: int | None


class Conditions(Struct, frozen=True, kw_only=True):
    """What was seen; `holders` are the processes on each GPU by UUID, absent where NVML does not list them.

    `shm` is None where there is no /dev/shm, `host` where nothing is known of the container that this runs in.
    `left` are the files in it of a tier of a KV cache, and their sizes, while no vLLM is visible. `swap_bytes` is the
    machine's swap, zram included, `engine_pids` are those of the engine that was looked for.
    """

    readings: GpuReadings | Failure
    faults: tuple[GpuFaults, ...]
    holders: Mapping[str, tuple[GpuOccupant, ...]]
    shm: Shm | None
    left: Mapping[str, int] = {}
    host: HostMemory | None = None
    swap_bytes: int | None = None
    engine_pids: frozenset[int] = frozenset()


async def look(
    gpus: Gpus, processes: Processes, *, proc: Path, shm: Path, timeout_seconds: float
) -> Conditions:
    """Look once; takes no longer than `timeout_seconds` for each reading of the GPUs, and does not raise."""
    readings = await gpus.read(timeout_seconds)
    if isinstance(readings, Failure):
        return Conditions(readings=readings, faults=(), holders={}, shm=read_shm(shm))
    faults = await gpus.read_faults(timeout_seconds)
    listed, host = await processes.read(PROCESSES_SECONDS), None
    with suppress(OSError, ValueError):
        here = read_host(proc, read_own_pid(proc))
        alone = ProcessReadings(
            engine=(), visible_pids=frozenset(), sees_host_pids=False, host=here
        )
        host = update_container(ContainerState(), alone, limit_bytes=None)[1]
    holders = await _find_holders(readings, listed, proc)
    found = Conditions(
        readings=readings, faults=faults, holders=holders, shm=read_shm(shm), host=host
    )
    if isinstance(listed, Failure):
        return found
    return replace(
        found,
        left={} if listed.engine or listed.neighbours else _find_left(shm),
        swap_bytes=listed.host.machine and listed.host.machine.swap_bytes,
        engine_pids=frozenset(process.pid for process in listed.engine),
    )


def _find_left(shm: Path) -> dict[str, int]:
    """Return the files that offloading of a KV cache makes in /dev/shm, and their sizes."""
    found = {}
    for file in sorted(shm.glob("vllm_offload_*")):
        with suppress(OSError):
            found[str(file)] = file.stat().st_size
    return found


async def _find_holders(
    readings: GpuReadings, listed: ProcessReadings | Failure, proc: Path
) -> dict[str, tuple[GpuOccupant, ...]]:
    names: dict[int, str] = {}
    listed_on_gpus = [process for device in readings.devices for process in device.processes or ()]
    if not isinstance(listed, Failure) and are_pids_true(readings, listed):
        pids, worker = {process.pid for process in listed_on_gpus}, Worker[dict[int, str]]("names")
        try:
            names = await worker.call(
                lambda: _read_names(proc, pids & listed.visible_pids), PROCESSES_SECONDS
            )
        except OSError:  # a process stuck in the driver does not let its name be read
            names = {}
        finally:
            worker.stop()
        for pid in pids:
            fate = find_fate(pid, listed, frozenset())
            if fate is not None:
                names[pid] = f"{names[pid]}, {FATE_TEXTS[fate]}" if names.get(pid) else ENDED
    memory_is_true = is_process_memory_true(readings, listed)
    return {
        device.uuid: tuple(
            GpuOccupant(
                pid=each.pid,
                name=names.get(each.pid),
                used_bytes=each.used_bytes if memory_is_true else None,
            )
            for each in device.processes
        )
        for device in readings.devices
        if device.processes is not None
    }


def _read_names(proc: Path, pids: Iterable[int]) -> dict[int, str]:
    found = ((pid, read_entry(proc, pid)) for pid in pids)
    return {pid: name_process(each.command) for pid, each in found if each is not None}


def name_process(command: tuple[str, ...]) -> str:
    """Return a process's program and, of an interpreter, the script or module; never its arguments."""
    program = command[0].rpartition("/")[2] or command[0]
    if not program.startswith("python") or len(command) == 1:
        return program
    script = command[2] if command[1] == "-m" and len(command) > 2 else command[1]  # noqa: PLR2004 - `python -m NAME`
    is_text = command[1] in ("-c", "-")  # a program's text is no name and may hold a secret
    return (
        program if is_text or script.startswith("-") else f"{program} {script.rpartition('/')[2]}"
    )
