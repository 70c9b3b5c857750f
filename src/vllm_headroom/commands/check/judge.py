"""Every limit that was given, judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_headroom.commands.check.absolute import costs, discrepancies, preemptions, restarts
from vllm_headroom.commands.check.judgement import COST, DISCREPANCY, GROWTH, HOST_LEAK, LEAK, Judgement, Unit
from vllm_headroom.commands.check.leaks import leak
from vllm_headroom.commands.check.options import Limits
from vllm_headroom.commands.check.parts import part_growths
from vllm_headroom.commands.check.record import Record, paired
from vllm_headroom.commands.check.relative import growths
from vllm_headroom.commands.verdict import Verdict


def judge(limits: Limits, record: Record, before: Record | None) -> Iterator[Judgement]:
    """Yield a judgement for each limit on each thing that it is on; on what is not in the trace it cannot be told."""
    yield restarts(record, before, limits.restarts)
    if limits.leak_bytes is not None:
        yield from _each(LEAK, _leaks(record, before, limits.leak_bytes))
    if limits.host_leak_bytes is not None:
        yield from _each(HOST_LEAK, _host_leaks(record, before, limits.host_leak_bytes))
    if limits.discrepancy_ratio is not None:
        yield from _each(DISCREPANCY, discrepancies(record, before, limits.discrepancy_ratio))
    if limits.bytes_per_request is not None:
        yield from _each(COST, costs(record, before, limits.bytes_per_request))
    if limits.preemptions is not None:
        yield preemptions(record, before, limits.preemptions)
    if limits.growth_ratio is not None and before is not None:
        yield from _each(GROWTH, growths(record, before, limits.growth_ratio))
        yield from part_growths(record, before, paired(record, before), limits.growth_ratio)


def _leaks(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    for uuid, old in paired(record, before):
        past = None if before is None or old is None else before.gpus[old]
        yield leak(LEAK, record, record.gpus[uuid], past, most)


def _host_leaks(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    for role, series in sorted(record.host.items()):
        yield leak(HOST_LEAK, record, series, None if before is None else before.host.get(role), most)


def _each(limit: str, judgements: Iterable[Judgement]) -> Iterator[Judgement]:
    found = tuple(judgements)
    yield from found or (_nothing(limit),)


def _nothing(limit: str) -> Judgement:
    what = "process of the engine's" if limit == HOST_LEAK else "GPU of the engine's"
    return Judgement(
        limit=limit,
        of="",
        verdict=Verdict.CANNOT_TELL,
        unit=Unit.BYTES,
        value=None,
        most=None,
        found="unknown",
        allowed="",
        why=f"the trace has no {what}",
    )
