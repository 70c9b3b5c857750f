"""The readings of one series that the detector judges, taken from a snapshot."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import OUT_OF_MEMORY_BYTES
from vllm_headroom.derive.pages import count_finished, count_running, is_page_awake
from vllm_headroom.derive.run_identity import identify_run
from vllm_headroom.model import EngineProcess, Failure, Gpu, Snapshot
from vllm_headroom.vocabulary import Role


class Observation(Struct, frozen=True, kw_only=True):
    """One reading of a series, with the load and the run of the engine that it belongs to."""

    seconds: float
    """Monotonic time."""

    held_bytes: int | None
    """None where it is unknown now."""

    finished_total: float | None = None
    """The engine's count of finished requests; None where unknown."""
    running: float | None = None
    """The number of running requests; None where unknown."""

    run_id: str | None = None
    """Identifies the run of the engine; None where unknown."""

    neighbours: int | None = None
    """The number of processes on the device, the engine's included, where the memory of each is
    unknown; None where the engine's memory is known."""

    awake: bool | None = None
    """None where the page does not report it."""
    room_bytes: int | None = None
    """The memory that is left for this series; None where unknown."""

    bound_bytes: int = 0
    """The memory that all configured pools together may fill."""


def observe_page(snapshot: Snapshot) -> Observation:
    """Return the observation of a snapshot's engine, without any memory."""
    page = snapshot.page
    return Observation(
        seconds=snapshot.monotonic_seconds,
        held_bytes=None,
        finished_total=count_finished(page),
        running=count_running(page),
        run_id=identify_run(page),
        awake=is_page_awake(page),
    )


def observe_gpus(snapshot: Snapshot, gpus: tuple[Gpu, ...]) -> Iterator[tuple[Gpu, Observation]]:
    """Yield each GPU with its observation."""
    of_page = observe_page(snapshot)
    bound_bytes = sum(pool.size_bytes for pool in snapshot.pools if pool.role is None)
    for gpu in gpus:
        # Other processes matter only where the engine's own memory is unknown.
        neighbours = gpu.process_count if gpu.engine_bytes is None else None
        yield (
            gpu,
            replace(
                of_page,
                held_bytes=gpu.held_bytes,
                neighbours=neighbours,
                room_bytes=find_gpu_room(gpu),
                bound_bytes=bound_bytes,
            ),
        )


def find_gpu_room(gpu: Gpu) -> int | None:
    """Return the memory that is left for the engine on a GPU; None where unknown.

    That is the free memory. Where a layer between the engine and the driver limits the engine, it
    is no more than what the limit still allows.
    """
    if gpu.reading.memory is None:
        return None
    free_bytes = gpu.reading.memory.left_bytes
    granted_bytes = None if gpu.inside is None else gpu.inside.granted_bytes
    if granted_bytes is None or gpu.engine_bytes is None:
        return free_bytes
    return min(free_bytes, max(0, granted_bytes - gpu.engine_bytes))


def observe_host(snapshot: Snapshot) -> Iterator[tuple[Role, Observation]]:
    """Yield the observation of the host memory of each role that has a process.

    Nothing is yielded where the processes could not be read.
    """
    if isinstance(snapshot.processes, Failure):
        return
    room_bytes = None if snapshot.host is None else snapshot.host.room_bytes
    if room_bytes is not None:
        # The detector keeps this much of the room in reserve, but host memory can be used to the
        # end.
        room_bytes += OUT_OF_MEMORY_BYTES
    of_page = observe_page(snapshot)
    for role in Role:
        processes = [process for process in snapshot.processes if process.role is role]
        if not processes:
            continue
        yield (
            role,
            replace(
                of_page,
                run_id=_identify_processes(processes),
                held_bytes=sum(_count_held(process) for process in processes),
                room_bytes=room_bytes,
                bound_bytes=sum(pool.size_bytes for pool in snapshot.pools if pool.role is role),
            ),
        )


def _count_held(process: EngineProcess) -> int:
    """Return the host memory that a process holds.

    Mapped files do not count, because the kernel reclaims them before it kills a process.
    Swapped-out memory counts, because otherwise a leak would seem to end when swapping begins.
    """
    return process.rss_bytes - (process.file_bytes or 0) + (process.swap_bytes or 0)


def _identify_processes(processes: list[EngineProcess]) -> str:
    """Return the pids and start times of a role's processes, which identify its run."""
    # Sorted, because /proc has no order. Start times are multiples of a clock tick, 0.01 s.
    return ",".join(
        sorted(f"{process.pid}:{process.started_at_seconds:.2f}" for process in processes)
    )
