"""The straight line, over sources that return what they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from tests.logs import capture_logs
from tests.samples import engine, failure, page, values
from vllm_headroom import catalog
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.gates import Gate, Guardrail
from vllm_headroom.derive.tick import Derivation, TickRules, build_derivations, make_stateless
from vllm_headroom.model import (
    EnginePage,
    Failure,
    GpuMemory,
    GpuReading,
    GpuReadings,
    ProcessReadings,
    Sample,
    Snapshot,
)
from vllm_headroom.vocabulary import Source

MEMORY = GpuMemory(total_bytes=1000, used_bytes=900, free_bytes=100, reserved_bytes=None)


@dataclass
class Said:
    """All three sources; each says what its field says."""

    engine: str | Failure = "1"
    gpus: GpuReadings | Failure = field(
        default_factory=lambda: GpuReadings(
            driver_version="580.00",
            devices=tuple(GpuReading(index=index, uuid=f"GPU-{index}", name="H100", memory=MEMORY) for index in (0, 1)),
        )
    )
    processes: ProcessReadings | Failure = field(
        default_factory=lambda: ProcessReadings(engine=(), visible_pids=frozenset(), sees_host_pids=True)
    )
    asked: list[EnginePage | Failure] = field(default_factory=list)

    async def fetch(self) -> str | Failure:
        return self.engine

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        assert timeout_seconds == 2.0
        return self.gpus

    async def sample_used(self, timeout_seconds: float) -> dict[str, int]:
        raise AssertionError(timeout_seconds)

    async def close(self) -> None:
        raise AssertionError


@dataclass
class Processes:
    sources: Said

    async def read(self, timeout_seconds: float, page: EnginePage | Failure) -> ProcessReadings | Failure:
        assert timeout_seconds == 2.0
        self.sources.asked.append(page)
        return self.sources.processes


def parsed(text: str) -> EnginePage | Failure:
    return page(engine(running=float(text)), inputs=(("requests_running", True),))


def sampler(
    sources: Said,
    *extra_derivations: Derivation[Any],
    selection: Selection | None = None,
    parse: Callable[[str], EnginePage | Failure] = parsed,
    recall: Callable[[Snapshot], Awaitable[Mapping[str, Any]]] | None = None,
    gate_ready_seconds: float | None = None,
    read_guardrail: Callable[[], Guardrail] | None = None,
) -> Sampler:
    return Sampler(
        sources=Sources(engine=sources, gpus=sources, processes=Processes(sources).read),
        parse=parse,
        rules=TickRules(
            selection=selection or Selection(),
            derivations=(*build_derivations(), *extra_derivations),
            gate_ready_seconds=gate_ready_seconds,
            read_guardrail=read_guardrail,
        ),
        clock=SystemClock(),
        gpu_timeout_seconds=2.0,
        recall=recall,
    )


def ticked(sampler: Sampler) -> tuple[Sample, ...]:
    asyncio.run(sampler.tick())
    assert sampler.published is not None
    return sampler.published.samples


def events(sources: Said, change: Callable[[], None], selection: Selection | None = None) -> list[str]:
    """Return what is logged for a change between the second and the fourth of five ticks, without the first tick's."""
    subject = sampler(sources, selection=selection)
    ticked(subject)
    with capture_logs() as lines:
        ticked(subject)
        change()
        for _ in range(3):
            ticked(subject)
    return [str(line["event"]) for line in lines]


def test_nothing_is_published_before_the_first_tick() -> None:
    assert sampler(Said()).published is None


def test_a_tick_publishes_what_the_sources_say() -> None:
    samples = ticked(sampler(Said(engine="3")))

    assert values(samples, catalog.ENGINE_RUNNING) == {("m", "0"): 3.0}
    assert len(values(samples, catalog.GPU_MEMORY_USED)) == 2


@pytest.mark.parametrize("side", ["engine", "gpus", "processes"])
def test_a_failed_source_costs_its_own_series_and_is_logged_once(side: str) -> None:
    source = {"engine": Source.ENGINE, "gpus": Source.NVML, "processes": Source.PROCESS}[side]
    log_lines = Said()

    down = ["engine is down"] if side == "engine" else []
    assert events(log_lines, lambda: setattr(log_lines, side, failure(source))) == ["source failed", *down]
    samples = ticked(sampler(log_lines))

    assert values(samples, catalog.SOURCE_UP)[(str(source),)] == 0.0
    assert bool(values(samples, catalog.ENGINE_RUNNING)) == (side != "engine")
    assert bool(values(samples, catalog.GPU_MEMORY_USED)) == (side != "gpus")


def test_a_page_that_cannot_be_parsed_is_a_failed_source() -> None:
    samples = ticked(sampler(Said(), parse=lambda _: failure(Source.ENGINE)))

    assert values(samples, catalog.SOURCE_UP)[("engine",)] == 0.0


def test_a_derivation_that_raises_costs_its_own_series_and_says_so_once() -> None:
    faulty = [True]

    def divide(snapshot: Snapshot) -> tuple[Sample, ...]:
        if faulty[0]:
            raise ZeroDivisionError
        return (Sample(catalog.ENGINE_RUNNING, ("divided", str(snapshot.time_seconds)), 1.0),)

    subject = sampler(Said(), make_stateless("divide", divide))
    with capture_logs() as lines:
        samples_before = ticked(subject)
        ticked(subject)
        faulty[0] = False
        samples_after = ticked(subject)
        ticked(subject)

    assert len(samples_after) == len(samples_before) + 1
    assert [line["event"] for line in lines if "derivation" in line] == [
        "derivation failed, its series are absent",
        "derivation works again",
    ]


def test_a_derivation_that_raised_starts_over() -> None:
    faulty: list[bool] = []

    def count(state: int, _snapshot: Snapshot) -> tuple[int, tuple[Sample, ...]]:
        if faulty:
            raise ZeroDivisionError
        return state + 1, (Sample(catalog.ENGINE_RUNNING, ("count", "0"), float(state + 1)),)

    subject = sampler(Said(), Derivation(name="count", initial=0, step=count))
    counts_before = [values(ticked(subject), catalog.ENGINE_RUNNING)[("count", "0")] for _ in range(2)]
    faulty.append(True)
    ticked(subject)
    faulty.clear()

    assert counts_before == [1.0, 2.0]
    assert values(ticked(subject), catalog.ENGINE_RUNNING)[("count", "0")] == 1.0


def test_recalled_states_are_there_for_the_same_tick_and_kept() -> None:
    class Recall:
        saved_states: ClassVar = {"count": 41}

        async def __call__(self, snapshot: Snapshot) -> dict[str, int]:
            assert not isinstance(snapshot.engines, Failure)
            saved_states, Recall.saved_states = Recall.saved_states, {}
            return saved_states

    counting = Derivation(
        name="count",
        initial=0,
        step=lambda state, _: (state + 1, (Sample(catalog.ENGINE_RUNNING, ("count", "0"), float(state + 1)),)),
    )
    subject = sampler(Said(), counting, recall=Recall())

    assert values(ticked(subject), catalog.ENGINE_RUNNING)[("count", "0")] == 42.0
    assert values(ticked(subject), catalog.ENGINE_RUNNING)[("count", "0")] == 43.0
    assert subject.states["count"] == 43


def test_what_is_judged_last_is_among_the_values_that_the_page_and_the_snapshot_show() -> None:
    subject = sampler(Said(engine="1"), gate_ready_seconds=60.0)

    assert values(ticked(subject), catalog.GATE_OPEN) == {("ready",): 1.0}
    assert subject.latest is not None
    assert subject.latest.values.value(catalog.GATE_OPEN, "ready") == 1.0
    assert subject.latest.values.value(catalog.ENGINE_RUNNING, "m", "0") == 1.0
    situation = subject.latest.verdicts[0].situation
    assert subject.latest.values.state(catalog.SITUATION) == situation


def test_a_fault_of_the_guardrail_opens_the_gate_and_costs_no_other_series() -> None:
    def read_guardrail() -> Guardrail:
        raise RuntimeError

    subject = sampler(Said(engine="1"), gate_ready_seconds=60.0, read_guardrail=read_guardrail)
    with capture_logs() as lines:
        samples = ticked(subject)

    assert [line["derivation"] for line in lines if line["event"].startswith("derivation failed")] == ["gate"]
    assert not values(samples, catalog.GATE_OPEN)
    assert values(samples, catalog.ENGINE_RUNNING)
    assert values(samples, catalog.SITUATION)
    assert subject.latest is not None
    assert subject.latest.gate == Gate()


def test_a_selection_that_nothing_visible_fits_is_named() -> None:
    with capture_logs() as lines:
        ticked(sampler(Said(), selection=Selection(listed=("gpu-1", "7"))))

    (line,) = (line for line in lines if "HEADROOM_GPUS" in line["event"])
    assert line["missing"] == "7"
    assert line["visible"] == "0=GPU-0 1=GPU-1"


def test_without_a_way_to_tell_whose_gpu_it_is_the_log_says_what_to_set() -> None:
    with capture_logs() as lines:
        ticked(sampler(Said()))

    (line,) = (line for line in lines if line["event"] == "no GPU attributed to the engine")
    assert "HEADROOM_GPUS" in line["problem"]
    assert line["visible"] == 2


def test_a_page_that_stops_offering_anything_is_logged_once() -> None:
    offered = [True]

    def parse(text: str) -> EnginePage:
        return page(engine(running=float(text)), inputs=(("requests_running", offered[0]),))

    subject = sampler(Said(), parse=parse)
    ticked(subject)
    offered[0] = False
    with capture_logs() as lines:
        ticked(subject)
        ticked(subject)

    assert [line["event"] for line in lines] == ["engine's inputs missing"]
