"""Engines under other names at every look: names that have gone take no room that grows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.unit.daemon.test_sampler import Processes, Said
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.series import MOST_REMEMBERED
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.parse.engines import parse_engines

TICKS = 100
ENGINES = 10
LABELS = 'model_name="model-{step}-of-many",engine="{engine}"'
COUNTERS = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)


@dataclass
class Clock:
    """Five seconds a step."""

    step: int = 0

    def time(self) -> float:
        return 1_760_000_000.0 + self.monotonic()

    def monotonic(self) -> float:
        return 5.0 * self.step

    async def sleep_until(self, monotonic_seconds: float) -> None:
        raise NotImplementedError(monotonic_seconds)


def named(step: int) -> str:
    lines = []
    for engine in range(ENGINES):
        labels = LABELS.format(step=step, engine=engine)
        lines += [f"vllm:{name}{{{labels}}} {step}" for name in COUNTERS]
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="stop"}} {step}')
    return "".join(f"{line}\n" for line in lines)


def test_of_names_that_have_gone_a_few_are_remembered() -> None:
    sources, clock = Said(), Clock()
    subject = Sampler(
        sources=Sources(engine=sources, gpus=sources, processes=Processes(sources).read),
        parse=parse_engines,
        rules=TickRules(selection=Selection(), derivations=build_derivations()),
        clock=clock,
        gpu_timeout_seconds=2.0,
    )

    async def ticked() -> None:
        for clock.step in range(TICKS):
            sources.engine = named(clock.step)
            await subject.tick()

    asyncio.run(ticked())
    remembered = repr(subject.states)

    assert f"model-{TICKS - 1}-of-many" in remembered
    assert sum(f"model-{step}-of-many" in remembered for step in range(TICKS)) <= 1 + MOST_REMEMBERED / ENGINES
