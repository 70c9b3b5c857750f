"""Measures ticks in a separate process, with the parts of the real daemon: CPU time, all threads together.

Prints medians in seconds; `tick`, `parse` and `whole` are lists of one value per URL.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon import logs
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.scrape.proc.reader import Processes

WARM_UP: Final = 40
ROUNDS: Final = 400
ROUNDS_PER_PARSE: Final = 8


async def main(urls: list[str]) -> None:
    """Take turns between the URLs and between ticks and parsing, so that all of them see the same machine."""
    clock = SystemClock()
    gpus, processes = Nvml(monotonic=clock.monotonic), Processes(engine_port=8000, monotonic=clock.monotonic)
    engines = [PageReader(url=url, timeout_seconds=4) for url in urls]
    samplers = [_sampler(Sources(engine=engine, gpus=gpus, processes=processes.read), clock) for engine in engines]
    ticks: list[list[float]] = [[] for _ in urls]
    parses: list[list[float]] = [[] for _ in urls]
    wholes: list[list[float]] = [[] for _ in urls]
    for turn in range(WARM_UP + ROUNDS):
        for index, (engine, sampler) in enumerate(zip(engines, samplers, strict=True)):
            began = time.process_time()
            await sampler.tick()
            ticks[index].append(time.process_time() - began)
            if turn % ROUNDS_PER_PARSE == 0:
                page = await engine.fetch()
                assert isinstance(page, str), page
                parses[index].append(_cpu_seconds(parse_engines, page))
                wholes[index].append(_cpu_seconds(_whole, page))
    await gpus.close()
    for engine in engines:
        await engine.close()
    costs = {
        "tick": [median(values[WARM_UP:]) for values in ticks],
        "parse": [median(values) for values in parses],
        "whole": [median(values) for values in wholes],
    }
    sys.stdout.write(json.dumps(costs))


def _sampler(sources: Sources, clock: SystemClock) -> Sampler:
    return Sampler(
        sources=sources,
        parse=parse_engines,
        rules=TickRules(
            selection=Selection(everything=True), derivations=build_derivations(kv_bytes_per_token=131_072)
        ),
        clock=clock,
        gpu_timeout_seconds=GPU_TIMEOUT_SECONDS,
    )


def _whole(page: str) -> int:
    return sum(len(family.samples) for family in text_string_to_metric_families(page))


def _cpu_seconds(work: Callable[[str], object], page: str) -> float:
    began = time.process_time()
    work(page)
    return time.process_time() - began


if __name__ == "__main__":
    logs.configure("logfmt", "error")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1:]))
