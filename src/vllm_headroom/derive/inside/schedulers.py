"""What does the scheduler of each engine know that its page does not say?"""

from __future__ import annotations

from dataclasses import replace

from vllm_headroom.derive.page_facts import named
from vllm_headroom.derive.readings import engine_labels
from vllm_headroom.model import EnginePage, EngineReading, Failure, ProbedProcess, ProbeReadings, SchedulerReading


def schedulers(page: EnginePage, processes: tuple[ProbedProcess, ...]) -> dict[tuple[str, str], SchedulerReading]:
    """Return the scheduler of each engine of the page, by its labels.

    An engine is its data-parallel rank; one engine and one scheduler belong together whatever they are called.
    """
    cores = [(each.data_parallel_rank, each.scheduler) for each in processes if each.scheduler is not None]
    engines = named(page)
    if len(engines) == len(cores) == 1:
        return {engine_labels(engines[0]): cores[0][1]}
    by_rank = {str(rank): scheduler for rank, scheduler in cores if rank is not None}
    return {engine_labels(engine): by_rank[engine.engine] for engine in engines if engine.engine in by_rank}


def with_steps(page: EnginePage | Failure, probe: ProbeReadings | Failure | None) -> EnginePage | Failure:
    """Return the page with the steps that each engine's core has done; of a core that fell silent, its last word."""
    if isinstance(page, Failure) or not isinstance(probe, ProbeReadings):
        return page
    known = schedulers(page, probe.present + probe.silent)
    return replace(page, engines=tuple(_stepped(engine, known.get(engine_labels(engine))) for engine in page.engines))


def _stepped(engine: EngineReading, scheduler: SchedulerReading | None) -> EngineReading:
    if scheduler is None or scheduler.steps_total is None:
        return engine
    return replace(engine, steps_total=float(scheduler.steps_total))
