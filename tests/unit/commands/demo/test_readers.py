from __future__ import annotations

import asyncio

import pytest

from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.model import Gpu, GpuReading, ProcessReadings
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import Attribution, Role
from vllm_headroom_tools.demo.run import SimulatedGpus, SimulatedProcesses
from vllm_headroom_tools.demo.world import TABLE, World

EPOCH_SECONDS = 1_790_000_000.0
TIMEOUT_SECONDS = 1.0


def device(gpus: SimulatedGpus) -> GpuReading:
    readings = asyncio.run(gpus.read(TIMEOUT_SECONDS))
    return readings.devices[0]


def processes(world: World) -> ProcessReadings:
    return asyncio.run(SimulatedProcesses(lambda: world, EPOCH_SECONDS).read(TIMEOUT_SECONDS))


def attributed(world: World, state: AttributionState | None = None) -> Gpu:
    readings = asyncio.run(SimulatedGpus(lambda: world).read(TIMEOUT_SECONDS))
    _, gpus = attribute(state or AttributionState(), readings, processes(world), Selection())
    return gpus[0]


def world_at(scenario: str, seconds: float) -> World:
    world = World(TABLE[scenario])
    world.advance(seconds)
    return world


def while_neighboured() -> World:
    world = World(TABLE["neighbour"])
    while world.neighbour_bytes < 1_000 * MIB:
        world.advance(world.seconds + 1)
    return world


def while_gone() -> World:
    world = World(TABLE["restart"])
    while world.has_processes:
        world.advance(world.seconds + 1)
    return world


def test_the_memory_parts_sum_to_the_whole() -> None:
    memory = device(SimulatedGpus(lambda: world_at("healthy", 60))).memory

    assert memory is not None
    assert memory.reserved_bytes is not None
    assert memory.total_bytes == 81_559 * MIB
    assert memory.used_bytes + memory.free_bytes + memory.reserved_bytes == memory.total_bytes


def test_the_peak_is_what_the_fast_samples_of_the_last_minute_saw() -> None:
    world = World(TABLE["restart"])
    gpus = SimulatedGpus(lambda: world)
    sampled_bytes = []
    while world.engine.number == 0:
        world.advance(world.seconds + 1)
        asyncio.run(gpus.sample_used(TIMEOUT_SECONDS))
        sampled_bytes.append(world.used_bytes)
    died = world.seconds
    world.advance(died + 55)
    within_the_minute = device(gpus)
    world.advance(died + 62)
    later = device(gpus)

    assert within_the_minute.memory is not None
    assert later.memory is not None
    assert within_the_minute.used_peak_bytes == max(sampled_bytes) > within_the_minute.memory.used_bytes
    assert later.used_peak_bytes == later.memory.used_bytes


@pytest.mark.parametrize("scenario", list(TABLE))
def test_the_gpu_is_the_engines_by_its_processes(scenario: str) -> None:
    world = world_at(scenario, 30)
    gpu = attributed(world)

    assert gpu.attribution is Attribution.PROCESS
    assert gpu.engine_bytes == world.engine_bytes


def test_an_engine_of_eight_gpus_is_on_all_of_them() -> None:
    world = world_at("leak", 30)
    readings = asyncio.run(SimulatedGpus(lambda: world, 8).read(TIMEOUT_SECONDS))
    _, gpus = attribute(AttributionState(), readings, processes(world), Selection())

    assert len({gpu.reading.uuid for gpu in gpus}) == 8
    assert [gpu.reading.index for gpu in gpus if gpu.engine_bytes == world.engine_bytes] == list(range(8))


def test_of_two_mig_instances_the_engine_has_one() -> None:
    world = world_at("mig", 30)
    readings = asyncio.run(SimulatedGpus(lambda: world).read(TIMEOUT_SECONDS))
    _, gpus = attribute(AttributionState(), readings, processes(world), Selection())

    assert [gpu.reading.uuid[:4] for gpu in gpus] == ["MIG-", "MIG-"]
    assert [gpu.attribution for gpu in gpus] == [Attribution.PROCESS, None]


def test_another_process_is_another_holder() -> None:
    world = while_neighboured()
    gpu = attributed(world)

    assert gpu.process_count == 2
    assert gpu.engine_bytes == world.engine_bytes
    assert gpu.other_bytes == world.neighbour_bytes


def test_the_engines_processes_have_roles_and_memory() -> None:
    world = world_at("healthy", 30)
    process_readings = processes(world)

    assert [process.role for process in process_readings.engine] == [Role.API_SERVER, Role.ENGINE_CORE, Role.WORKER]
    assert all(500 * MIB < process.rss_bytes < 10_000 * MIB for process in process_readings.engine)
    assert {process.started_at_seconds for process in process_readings.engine} == {
        EPOCH_SECONDS + world.engine.started_seconds
    }
    assert {process.pid for process in process_readings.engine} < process_readings.visible_pids
    assert process_readings.sees_host_pids


def test_while_the_engine_is_gone_it_has_no_process_and_no_memory() -> None:
    world = while_gone()
    reading = device(SimulatedGpus(lambda: world))

    assert processes(world).engine == ()
    assert reading.processes == ()
    assert reading.memory is not None
    assert reading.memory.used_bytes < 100 * MIB


def test_a_restarted_engine_has_new_processes_from_the_start_of_its_loading() -> None:
    world = while_gone()
    while not world.has_processes:
        world.advance(world.seconds + 1)
    loading = processes(world)

    assert not world.is_serving
    assert len(loading.engine) == 3
    assert not {process.pid for process in loading.engine} & processes(World(TABLE["restart"])).visible_pids - {1}
    assert attributed(world).engine_bytes == world.engine_bytes > 0
