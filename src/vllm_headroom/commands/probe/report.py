"""A recording as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from vllm_headroom.commands.probe.record import NO_ANSWER
from vllm_headroom.units import duration, size

Found = Mapping[str, Any]
"""A part of what --json prints."""

SHOWN: Final = 3
"""Stacks of each kind and callers of each, of the many that --json has."""


def text(recorded: Found) -> Iterator[str]:
    """Yield for each process what it took and kept, by the stacks that took most; the process with most is first."""
    yield f"In {duration(recorded['seconds'])}, what each process allocated and still holds:"
    for process in sorted(recorded["processes"], key=_most, reverse=True):
        yield ""
        yield from _process(process)


def _most(process: Found) -> int:
    return max((stack["bytes"] for stack in (*(process["host"] or ()), *(process["gpu"] or ()))), default=0)


def _process(process: Found) -> Iterator[str]:
    name, problem = f"{process['role']} (pid {process['pid']})", process["problem"]
    if problem is not None:
        yield f"{name}: {problem if problem == NO_ANSWER else f'an answer that cannot be used: {problem}'}"
        return
    yield f"{name}, which cost {_cost(process['cost'])}:"
    if process["note"] is not None:
        yield f"  {process['note']}"
    for kind, stacks in (("host", process["host"]), ("GPU", process["gpu"])):
        for stack in stacks[:SHOWN]:
            yield from _stack(kind, stack)
    if not process["host"] and not process["gpu"]:
        yield "  nothing"


def _stack(kind: str, stack: Found) -> Iterator[str]:
    line, *callers = stack["stack"] or ("nobody knows where",)
    yield f"  {size(stack['bytes']):>10} {kind} memory, {stack['count']} allocations  {line}"
    yield from (f"{'':>13}called from {caller}" for caller in callers[:SHOWN])


def _cost(cost: Found) -> str:
    pause, cpu, memory = cost["pause_seconds"], cost["cpu_seconds"], cost["memory_bytes"]
    parts = (
        None if pause is None else f"{pause:.3f} s of standing still",
        None if cpu is None else f"{cpu:.3f} s of CPU",
        None if memory is None else f"{size(memory)} of host memory",
    )
    return ", ".join(part for part in parts if part) or "what it does not tell"
