"""Every limit that was given, judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from vllm_headroom.commands.check.absolute import costs, discrepancies, preemptions, restarts
from vllm_headroom.commands.check.judgement import (
    COST,
    DISCREPANCY,
    GROWTH,
    HOST_LEAK,
    LEAK,
    PREEMPTIONS,
    RESTARTS,
    Judgement,
    Unit,
)
from vllm_headroom.commands.check.leaks import gpu_leaks, host_leaks
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.check.relative import growths
from vllm_headroom.commands.verdict import Verdict

Judge = Callable[[Record, Record | None, float], Iterator[Judgement]]
"""Takes the trace, the baseline and the limit; yields a judgement for each thing that the limit is on."""

JUDGES: Final[dict[str, tuple[str, Judge]]] = {
    "max_restarts": (RESTARTS, restarts),
    "max_leak_per_thousand_requests": (LEAK, gpu_leaks),
    "max_host_leak_per_thousand_requests": (HOST_LEAK, host_leaks),
    "max_discrepancy": (DISCREPANCY, discrepancies),
    "max_bytes_per_request": (COST, costs),
    "max_preemptions_per_thousand_requests": (PREEMPTIONS, preemptions),
    "max_growth_over_baseline": (GROWTH, growths),
}
"""Who judges the limit that an option sets, in the order in which they are told."""


def judge(limits: Mapping[str, float], record: Record, before: Record | None) -> Iterator[Judgement]:
    """Yield the judgements on each limit, which is by its option; on what is not in the trace it cannot be told."""
    for option, most in limits.items():
        name, judged = JUDGES[option]
        yield from tuple(judged(record, before, most)) or (_nothing(name),)


def _nothing(limit: str) -> Judgement:
    what = "process of the engine's" if limit == HOST_LEAK else "GPU of the engine's"
    return Judgement(limit=limit, verdict=Verdict.CANNOT_TELL, unit=Unit.BYTES, why=f"the trace has no {what}")
