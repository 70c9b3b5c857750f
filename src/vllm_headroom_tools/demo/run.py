"""The daemon, run against a simulated world whose clock runs faster than real time."""

import time
from collections.abc import Callable, Mapping
from math import exp
from typing import Final

from msgspec.structs import replace

from vllm_headroom.clock import Clock, SystemClock
from vllm_headroom.daemon import app
from vllm_headroom.daemon.parts import Parts
from vllm_headroom.log import Log
from vllm_headroom.model import (
    Cgroup,
    EngineOptions,
    EngineProcess,
    Failure,
    GpuMemory,
    GpuProcess,
    GpuReading,
    GpuReadings,
    HostReading,
    ProcessReadings,
)
from vllm_headroom.scrape.gpu_state import RecentPeak
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import Reason, Role, Source
from vllm_headroom_tools.demo.world import (
    BLOCK_TOKENS,
    CAPACITY_TOKENS,
    HOST_LIMIT_BYTES,
    KV_BLOCKS,
    MAX_RUNNING,
    OFFLOAD_GIB,
    RESERVED_BYTES,
    TOTAL_BYTES,
    Scenario,
    SimulatedRun,
    World,
)
from vllm_headroom_tools.settings import ModelSettings

MODEL_LABELS: Final = 'model_name="simulated-8b",engine="0"'
CACHE_CONFIG: Final = (
    f'engine="0",block_size="{BLOCK_TOKENS}",cache_dtype="auto",gpu_memory_utilization="0.92",'
    f'kv_cache_memory_bytes="None",kv_cache_size_tokens="{CAPACITY_TOKENS}",'
    f'num_gpu_blocks="{KV_BLOCKS}"'
)
ENGINE_DOWN: Final = Failure(
    source=Source.ENGINE, reason=Reason.UNREACHABLE, message="the simulated page does not answer"
)


PAGE_REFUSED: Final = Failure(
    source=Source.ENGINE,
    reason=Reason.UNAUTHORIZED,
    message="the simulated engine's page now needs a login, and none is configured",
)


class Simulated:
    """A source for the daemon that reads the simulated world.

    `now` advances the world to the current time and returns it. `epoch_seconds` is the demo's start
    time in seconds since the epoch.
    """

    def __init__(self, now: Callable[[], World], epoch_seconds: float = 0.0) -> None:
        self._now = now
        self._epoch_seconds = epoch_seconds
        self._peak = RecentPeak()

    async def close(self) -> None:
        """Do nothing: there is no connection and no driver."""


class SimulatedEngine(Simulated):
    """The engine's page."""

    async def fetch(self) -> str | Failure:
        """Return the page, or a Failure while the engine is down or loading."""
        world = self._now()
        if not world.is_serving:
            return ENGINE_DOWN
        if not world.has_page:
            return PAGE_REFUSED
        return render_engine_page(world.engine, self._epoch_seconds)


def render_engine_page(engine: SimulatedRun, epoch_seconds: float) -> str:
    """Return the engine's page in the Prometheus text format."""
    figures = {
        "num_requests_running": engine.running,
        "num_requests_waiting": engine.waiting,
        "kv_cache_usage_perc": engine.kv_used_ratio,
        "prefix_cache_queries_total": engine.prompt_tokens_total,
        "prefix_cache_hits_total": engine.prefix_hits_total,
        "num_preemptions_total": engine.preemptions_total,
        "prompt_tokens_total": engine.prompt_tokens_total,
        "generation_tokens_total": engine.generation_tokens_total,
        "request_success_total": engine.finished_total,
        "iteration_tokens_total_count": engine.steps_total,
    }
    is_awake = not engine.is_asleep
    lines = [f"vllm:{name}{{{MODEL_LABELS}}} {value}" for name, value in figures.items()]
    lines += [
        f'vllm:engine_sleep_state{{{MODEL_LABELS},sleep_state="awake"}} {int(is_awake)}',
        f"vllm:cache_config_info{{{CACHE_CONFIG}}} 1",
        f"process_start_time_seconds {epoch_seconds + engine.started_seconds}",
    ]
    return "".join(f"{line}\n" for line in lines)


UUID: Final = "GPU-00000000-0000-4000-8000-000000000000"
MIG_UUID: Final = "MIG-{}0000000-0000-5000-8000-000000000000"
MEMORY_PAGE_BYTES: Final = 4_096
RESIDENT_MIB: Final[tuple[tuple[Role, int], ...]] = (
    (Role.API_SERVER, 1_090),
    (Role.ENGINE_CORE, 2_410),
    (Role.WORKER, 5_560),
)
"""The engine's processes by ascending pid, with their resident memory when serving begins."""

FIRST_NEIGHBOUR_PID: Final = 90_000
"""Neighbours have higher pids than any process of the engine."""

IDLE_WATTS: Final = 70.0


class SimulatedGpus(Simulated):
    """The simulated GPUs; the engine uses `count` identical GPUs.

    In the MIG scenario, the devices are two instances of one GPU. The engine uses the first
    instance.
    """

    def __init__(self, now: Callable[[], World], count: int = 1) -> None:
        super().__init__(now)
        self._count = count

    async def read(
        self,
        timeout_seconds: float,  # noqa: ARG002 - it never takes long
    ) -> GpuReadings:
        """Return a reading of each GPU or, with MIG, of both instances.

        The second instance is empty.
        """
        world = self._look()
        used_bytes = world.used_bytes
        power_watts = IDLE_WATTS
        if world.active_requests:
            # A busy GPU draws at least 300 W. At the maximum number of requests, it draws 680 W.
            power_watts += 230.0 + 380.0 * min(1.0, world.active_requests / MAX_RUNNING)
        free_bytes = TOTAL_BYTES - RESERVED_BYTES
        memory = GpuMemory(
            total_bytes=TOTAL_BYTES,
            used_bytes=used_bytes,
            free_bytes=free_bytes - used_bytes,
            reserved_bytes=RESERVED_BYTES,
        )
        device = GpuReading(
            index=0,
            uuid=UUID,
            name="Simulated H100 80GB",
            memory=memory,
            used_peak_bytes=self._peak.highest_bytes(world.seconds),
            utilization_ratio=world.active_requests / (world.active_requests + 8.0),
            temperature_celsius=float(round(31.0 + 0.06 * (power_watts - IDLE_WATTS))),
            power_watts=round(power_watts, 1),
            processes=tuple(_list_gpu_processes(world)),
        )
        devices = [
            replace(device, index=index, uuid=uuid)
            for index, uuid in enumerate(self._list_uuids(world))
        ]
        if world.has_mig:
            empty = replace(memory, used_bytes=0, free_bytes=free_bytes)
            devices.append(
                replace(
                    device, uuid=MIG_UUID.format(2), memory=empty, used_peak_bytes=0, processes=()
                )
            )
        return GpuReadings(driver_version="580.00", devices=tuple(devices))

    async def sample_used(
        self,
        timeout_seconds: float,  # noqa: ARG002 - it never takes long
    ) -> Mapping[str, int]:
        """Return the memory in use by UUID.

        The memory in use is included in the peak of the last 60 s.
        """
        world = self._look()
        return dict.fromkeys(self._list_uuids(world), world.used_bytes)

    def _list_uuids(self, world: World) -> list[str]:
        """Return the UUIDs of the GPUs or MIG instance that the engine uses."""
        if world.has_mig:
            return [MIG_UUID.format(1)]
        return [f"{UUID[:-2]}{index:02}" for index in range(self._count)]

    def _look(self) -> World:
        """Return the world at the current time.

        The world's memory in use is added to the peak.
        """
        world = self._now()
        self._peak.add(world.seconds, world.used_bytes)
        return world


class SimulatedProcesses(Simulated):
    """The engine's processes."""

    async def read(
        self,
        timeout_seconds: float,  # noqa: ARG002 - it never takes long
        page: object = None,  # noqa: ARG002 - the world knows its engine
    ) -> ProcessReadings:
        """Return all visible pids and, unless the engine is down, the engine's processes."""
        world = self._now()
        engine = world.engine
        served_seconds = max(0.0, world.seconds - engine.serving_seconds)
        # A healthy engine's resident memory also grows at first, but ever more slowly.
        grown_mib = 45.0 * (1.0 - exp(-served_seconds / 900.0))
        processes = tuple(
            EngineProcess(
                pid=engine.first_pid + place,
                role=role,
                rss_bytes=_count_resident_bytes(world, role, mib + grown_mib),
                started_at_seconds=self._epoch_seconds + engine.started_seconds,
            )
            for place, (role, mib) in enumerate(RESIDENT_MIB)
            if world.has_processes
        )
        pids = {1}
        pids.update(process.pid for process in processes)
        pids.update(process.pid for process in _list_gpu_processes(world))
        host = HostReading()
        if world.has_host_limit:
            used_bytes = sum(process.rss_bytes or 0 for process in processes)
            host = HostReading(cgroup=_build_cgroup(world, used_bytes))
        options = EngineOptions(kv_offloading_size=OFFLOAD_GIB) if world.has_offload else None
        return ProcessReadings(
            engine=processes,
            visible_pids=frozenset(pids),
            sees_host_pids=True,
            host=host,
            options=options,
        )


def _build_cgroup(world: World, used_bytes: int) -> Cgroup:
    """Return the cgroup of the engine's container, with its limit and its processes' memory."""
    return Cgroup(
        identity="simulated",
        used_bytes=used_bytes,
        cache_bytes=0,
        limit_bytes=HOST_LIMIT_BYTES,
        oom_kills=world.oom_kills,
    )


def _count_resident_bytes(world: World, role: Role, healthy_mib: float) -> int:
    """Return a process's resident memory in whole pages.

    The engine core holds the leaked memory. The worker holds the offloaded KV cache.
    """
    resident_bytes = healthy_mib * MIB
    if role is Role.ENGINE_CORE:
        resident_bytes += world.engine.leaked_host_bytes
    if role is Role.WORKER:
        resident_bytes += world.engine.offloaded_bytes
    return int(resident_bytes) // MEMORY_PAGE_BYTES * MEMORY_PAGE_BYTES


def _list_gpu_processes(world: World) -> list[GpuProcess]:
    """Return the processes on the GPU: the engine's worker and any neighbour."""
    processes = []
    if world.has_processes:
        worker = [role for role, _ in RESIDENT_MIB].index(Role.WORKER)
        processes.append(
            GpuProcess(pid=world.engine.first_pid + worker, used_bytes=world.engine_bytes)
        )
    if world.neighbour_bytes:
        processes.append(
            GpuProcess(
                pid=FIRST_NEIGHBOUR_PID + world.neighbours.number,
                used_bytes=world.neighbour_bytes,
            )
        )
    return processes


def find_process_name(pid: int) -> str | None:
    """Return the name of a simulated neighbour, or None for any other process."""
    if pid < FIRST_NEIGHBOUR_PID:
        return None
    return f"python3 train.py (pid {pid}, pod research/train-0)"


class ScaledClock(SystemClock):
    """A clock that starts at the machine's time and runs `speed` times as fast."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._began_seconds = time.monotonic()
        self._ahead_seconds = time.time() - self._began_seconds

    def time(self) -> float:
        """Return simulated seconds since the epoch."""
        return self._ahead_seconds + self.monotonic()

    def monotonic(self) -> float:
        """Return simulated seconds since an arbitrary time; they never decrease."""
        return self._began_seconds + (time.monotonic() - self._began_seconds) * self.speed


log = Log(__name__)
SIMULATED: Final = "everything here is simulated, no GPU and no vLLM is read"


def bind_world(world: World, clock: Clock) -> Callable[[], World]:
    """Return a function that advances the world to the current time and returns it.

    The world's time starts at this call.
    """
    began = clock.monotonic()

    def now() -> World:
        world.advance(clock.monotonic() - began)
        return world

    return now


def build_parts(
    scenario: Scenario, clock: Clock, speed: float, gpus: int = 1, seed: int = 0
) -> Parts:
    """Build the daemon's sources for a scenario that begins now, on `gpus` GPUs."""
    epoch_seconds = clock.time()
    now = bind_world(World(scenario, seed), clock)
    return Parts(
        engine=SimulatedEngine(now, epoch_seconds),
        gpus=SimulatedGpus(now, gpus),
        processes=SimulatedProcesses(now, epoch_seconds).read,
        clock=clock,
        find_process_name=find_process_name,
        notice=f"simulated: scenario {scenario.name} at {speed:g}\N{MULTIPLICATION SIGN}",
    )


async def run(settings: ModelSettings, *, scenario: Scenario, speed: float, gpus: int) -> int:
    """Run a scenario on `gpus` GPUs until a signal arrives.

    Returns the daemon's exit status.
    """
    log.warning(SIMULATED, scenario=scenario.name, speed=speed)
    parts = build_parts(scenario, ScaledClock(speed), speed, gpus)
    return await app.run(parts, settings, settings.model_reader)
