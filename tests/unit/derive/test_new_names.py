"""What is remembered of GPUs whose names are new at every reading, as MIG instances that are made again and again."""

from __future__ import annotations

import re
from typing import Final

from tests.samples import engine, failure, gpu, page, probed, snapshot
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.derive.series import MOST_REMEMBERED
from vllm_headroom.derive.tick import build_derivations
from vllm_headroom.model import AllocatorReading, Inside, ProbeReadings, Snapshot
from vllm_headroom.vocabulary import Source

GIB: Final = 2**30
READINGS: Final = 4 * MOST_REMEMBERED


def looked(reading: int, *, awake: bool) -> Snapshot:
    """Return a look at one GPU that stays and one that nobody has seen before."""
    inside = Inside(allocated_bytes=50 * GIB, reserved_bytes=55 * GIB)
    gpus = tuple(
        gpu(uuid=uuid, index=index, total=80 * GIB, used=(60 if awake else 20) * GIB, inside=inside)
        for index, uuid in enumerate(("MIG-stays", f"MIG-{reading}"))
    )
    engine_reading = engine(running=4.0, finished_total=2000.0 + reading, awake=awake, started_at_seconds=1.0)
    writes = probed(devices=tuple(AllocatorReading(uuid=gpu.reading.uuid, retries=1, ooms=0) for gpu in gpus))
    probe = ProbeReadings(present=(writes,))
    return snapshot(
        at=5.0 * reading, engines=page(engine_reading), gpus=gpus, processes=failure(Source.PROCESS), probe=probe
    )


def test_of_gpus_whose_names_are_new_at_every_reading_a_bounded_number_is_remembered() -> None:
    states = {derivation.name: derivation.initial for derivation in build_derivations()}
    memory = EngineMemory()
    for reading in range(READINGS):
        memory, tick_snapshot = update_engine(memory, looked(reading, awake=reading < READINGS // 2))
        for derivation in build_derivations():
            states[derivation.name], _ = derivation.step(states[derivation.name], tick_snapshot)

    names = {name: set(re.findall(r"MIG-\w+", repr(state), re.IGNORECASE)) for name, state in states.items()}
    names["memory"] = set(re.findall(r"MIG-\w+", repr(memory)))
    assert {name: len(remembered) for name, remembered in names.items() if len(remembered) > MOST_REMEMBERED + 2} == {}
    keeping_names = {name for name, remembered in names.items() if {"MIG-stays", "mig-stays"} & remembered}
    assert keeping_names >= {"leak", "baseline", "allocator", "memory"}, "what stays is not forgotten with the rest"
