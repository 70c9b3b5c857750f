"""A recording as text for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from vllm_headroom.commands.probe.answer import Answer
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
    stacks = (*told[1]["host"], *told[1]["gpu"]) if isinstance(told[1], dict) else ()
    return max((stack["bytes"] for stack in stacks), default=0)


def _process(name: str, answer: Answer | str | None) -> Iterator[str]:
    if not isinstance(answer, dict):
        yield f"{name}: {'no answer' if answer is None else f'an answer that cannot be used: {answer}'}"
        return
    yield f"{name}, which cost {_cost(answer['cost'])}:"
    if answer["note"] is not None:
        yield f"  {answer['note']}"
    for kind, stacks in (("host", answer["host"]), ("GPU", answer["gpu"])):
        for stack in stacks[:SHOWN]:
            yield from _stack(kind, stack)
    if not answer["host"] and not answer["gpu"]:
        yield "  nothing"


def _stack(kind: str, stack: Mapping[str, Any]) -> Iterator[str]:
    line, *callers = stack["stack"] or ("nobody knows where",)
    yield f"  {size(stack['bytes']):>10} {kind} memory, {stack['count']} allocations  {line}"
    yield from (f"{'':>13}called from {caller}" for caller in callers[:SHOWN])


def _cost(cost: Mapping[str, Any]) -> str:
    pause, cpu, memory = cost["pause_seconds"], cost["cpu_seconds"], cost["memory_bytes"]
    parts = (
        None if pause is None else f"{pause:.3f} s of standing still",
        None if cpu is None else f"{cpu:.3f} s of CPU",
        None if memory is None else f"{size(memory)} of host memory",
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
    return {
        "pid": process.pid,
        "role": process.role,
        "data_parallel_rank": process.data_parallel_rank,
        "problem": None if isinstance(answer, dict) else answer or "no answer",
        **(answer if isinstance(answer, dict) else dict.fromkeys(("note", "cost", "host", "gpu"))),
    }
