"""What the daemon says of each scenario, over hours of simulated time without waiting."""

from __future__ import annotations

import asyncio

import pytest

from tests.samples import values
from vllm_headroom import catalog
from vllm_headroom.daemon.sampler import Sampler, Sources
from vllm_headroom.derive import build_derivations
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.model import Sample
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom_tools.demo.run import SimulatedEngine, SimulatedGpus, SimulatedProcesses
from vllm_headroom_tools.demo.world import TABLE, World

EPOCH = 1_760_000_000.0
INTERVAL = 15.0


class Simulated:
    """A world on a clock that is moved by hand."""

    def __init__(self, scenario: str) -> None:
        self.seconds = 0.0
        self.world = World(TABLE[scenario])

    def now(self) -> World:
        self.world.advance(self.seconds)
        return self.world

    def time(self) -> float:
        return EPOCH + self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep_until(self, monotonic_seconds: float) -> None:
        raise AssertionError(monotonic_seconds)


def played(scenario: str, hours: float) -> list[tuple[Sample, ...]]:
    async def play() -> list[tuple[Sample, ...]]:
        simulated = Simulated(scenario)
        sampler = Sampler(
            sources=Sources(
                engine=SimulatedEngine(simulated.now, EPOCH),
                gpus=SimulatedGpus(simulated.now),
                processes=SimulatedProcesses(simulated.now, EPOCH).read,
            ),
            parse=parse_engines,
            selection=Selection(),
            derivations=build_derivations(),
            clock=simulated,
            gpu_timeout_seconds=1.0,
        )
        pages = []
        while simulated.seconds < hours * 3600:
            await sampler.tick()
            assert sampler.published is not None
            pages.append(sampler.published.samples)
            simulated.seconds += INTERVAL
        return pages

    return asyncio.run(play())


def states(samples: tuple[Sample, ...]) -> set[str]:
    return {
        labels[-1]
        for metric in (catalog.LEAK_STATE, catalog.HOST_LEAK_STATE)
        for labels, value in values(samples, metric).items()
        if value == 1.0
    }


@pytest.mark.parametrize("scenario", ["healthy", "burst", "neighbour", "restart"])
def test_what_does_not_leak_is_never_called_a_leak(scenario: str) -> None:
    seen = set().union(*(states(samples) for samples in played(scenario, 8)))

    assert "leaking" not in seen
    assert "growing" not in seen
    assert "stable" in seen


def test_the_leak_is_found_with_its_rate_and_the_time_left() -> None:
    pages = played("leak", 2)

    first = next(samples for samples in pages if "leaking" in states(samples))
    (per_request,) = values(first, catalog.LEAK_PER_REQUEST).values()
    (left,) = values(first, catalog.TIME_TO_OOM).values()
    assert per_request == pytest.approx(12_800, rel=0.15)
    assert 3600 < left < 86_400
