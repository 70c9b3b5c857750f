"""A recording as text for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from vllm_headroom.commands.probe.answer import Answer, Cost, Stack
from vllm_headroom.commands.probe.record import Recorded
from vllm_headroom.model import ProbedProcess
from vllm_headroom.units import duration, size

SHOWN: Final = 3
"""Stacks of each kind and callers of each, of the many that --json has."""


def text(recorded: Recorded) -> Iterator[str]:
    """Yield for each process what it took and kept, by the stacks that took most; the process with most is first."""
    yield f"In {duration(recorded.seconds)}, what each process allocated and still holds:"
    for process, answer in sorted(recorded.answers, key=_most, reverse=True):
        yield ""
        yield from _process(f"{process.role} (pid {process.pid})", answer)


def _most(told: tuple[ProbedProcess, Answer | str | None]) -> int:
    stacks = (*told[1].host, *told[1].gpu) if isinstance(told[1], Answer) else ()
    return max((stack.n_bytes for stack in stacks), default=0)


def _process(name: str, answer: Answer | str | None) -> Iterator[str]:
    if not isinstance(answer, Answer):
        yield f"{name}: {'no answer' if answer is None else f'an answer that cannot be used: {answer}'}"
        return
    yield f"{name}, which cost {_cost(answer.cost)}:"
    if answer.note is not None:
        yield f"  {answer.note}"
    for kind, stacks in (("host", answer.host), ("GPU", answer.gpu)):
        for stack in stacks[:SHOWN]:
            yield from _stack(kind, stack)
    if not answer.host and not answer.gpu:
        yield "  nothing"


def _stack(kind: str, stack: Stack) -> Iterator[str]:
    line, *callers = stack.frames or ("nobody knows where",)
    yield f"  {size(stack.n_bytes):>10} {kind} memory, {stack.count} allocations  {line}"
    yield from (f"{'':>13}called from {caller}" for caller in callers[:SHOWN])


def _cost(cost: Cost) -> str:
    parts = (
        None if cost.pause_seconds is None else f"{cost.pause_seconds:.3f} s of standing still",
        None if cost.cpu_seconds is None else f"{cost.cpu_seconds:.3f} s of CPU",
        None if cost.memory_bytes is None else f"{size(cost.memory_bytes)} of host memory",
    )
    return ", ".join(part for part in parts if part) or "what it does not tell"


def document(recorded: Recorded) -> dict[str, Any]:
    """Return what --json prints; a process without a usable answer has null for what it did not say."""
    return {
        "folder": str(recorded.folder),
        "seconds": recorded.seconds,
        "processes": [_entry(process, answer) for process, answer in recorded.answers],
    }


def _entry(process: ProbedProcess, answer: Answer | str | None) -> dict[str, Any]:
    told = answer if isinstance(answer, Answer) else None
    return {
        "pid": process.pid,
        "role": process.role,
        "data_parallel_rank": process.data_parallel_rank,
        "problem": answer if isinstance(answer, str) else None if told else "no answer",
        "note": told and told.note,
        "cost": told
        and {
            "pause_seconds": told.cost.pause_seconds,
            "cpu_seconds": told.cost.cpu_seconds,
            "memory_bytes": told.cost.memory_bytes,
        },
        "host": told and [_listed(stack) for stack in told.host],
        "gpu": told and [_listed(stack) for stack in told.gpu],
    }


def _listed(stack: Stack) -> dict[str, Any]:
    return {"bytes": stack.n_bytes, "count": stack.count, "stack": list(stack.frames)}
