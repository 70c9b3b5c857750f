"""A report on a recording: for each process, the stacks with the most memory."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from vllm_headroom.units import MIB, format_duration, format_size
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.probe.record import NO_ANSWER

MIN_SHOWN_BYTES: Final = MIB
"""Our choice: smaller growth of a mapping is not reported."""

MAX_SHOWN: Final = 3
"""Our choice: how many stacks of each kind the text shows, and callers per stack. --json contains
more.
"""


def report_recorded(recorded: Mapping[str, Any]) -> Report:
    """Return the report on a recording.

    The exit status is always 0. The verdict is "cannot tell" if any process has no usable answer.
    """
    processes = recorded["processes"]
    findings = list_problems(processes)
    answered = len(processes) - len(findings)
    return Report(
        verdict=find_worst(finding.verdict for finding in findings),
        headline=f"{answered} of {len(processes)} processes recorded what they allocated and still"
        " hold.",
        findings=findings,
        data=recorded,
        lines=render_recording(recorded),
        exit_status=0,
    )


def list_problems(processes: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Return a finding for each process without a usable answer."""
    return [
        Finding(name_process(process), Conclusion.CANNOT_TELL, process["problem"])
        for process in processes
        if process["problem"] is not None
    ]


def render_recording(recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about each process, starting with the process with the largest stack."""
    duration = format_duration(recorded["seconds"])
    yield f"In {duration}, what each process allocated and still holds:"
    for process in sorted(recorded["processes"], key=_measure_largest_stack, reverse=True):
        yield ""
        yield from _format_process(process)
    problem = recorded.get("no_native")
    if problem is not None:
        yield ""
        yield f"No native stacks: {problem}"


def _measure_largest_stack(process: Mapping[str, Any]) -> int:
    """Return the size of a process's largest stack in bytes.

    Returns 0 if there are no stacks.
    """
    stacks = (*(process["host"] or ()), *(process["gpu"] or ()))
    return max((stack["bytes"] for stack in stacks), default=0)


def name_process(process: Mapping[str, Any]) -> str:
    """Return a process's role and pid."""
    return f"{process['role']} (pid {process['pid']})"


def _format_process(process: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a process: its largest stacks, or why there are none."""
    name = name_process(process)
    problem = process["problem"]
    if problem == NO_ANSWER:
        yield f"{name}: {problem}"
        return
    if problem is not None:
        yield f"{name}: an answer that cannot be used: {problem}"
        return
    yield f"{name}, which cost {_format_cost(process['cost'])}:"
    if process["note"] is not None:
        yield f"  {process['note']}"
    yield from _format_stacks("host", process["host"])
    yield from _format_stacks("GPU", process["gpu"])
    if not process["host"] and not process["gpu"]:
        yield "  nothing"
    yield from _format_native(process)


def _format_cost(cost: Mapping[str, Any]) -> str:
    """Describe what a recording cost its process, without unknown figures."""
    parts = []
    if cost["pause_seconds"] is not None:
        parts.append(f"{cost['pause_seconds']:.3f} s of pause")
    if cost["cpu_seconds"] is not None:
        parts.append(f"{cost['cpu_seconds']:.3f} s of CPU")
    if cost["memory_bytes"] is not None:
        parts.append(f"{format_size(cost['memory_bytes'])} of host memory")
    return ", ".join(parts) or "an unknown amount"


def _format_stacks(kind: str, stacks: list[dict[str, Any]]) -> Iterator[str]:
    for stack in stacks[:MAX_SHOWN]:
        line, *callers = stack["stack"] or ("at an unknown place",)
        size = format_size(stack["bytes"])
        yield f"  {size:>10} {kind} memory, {stack['count']} allocations  {line}"
        yield from _format_callers(callers)


def _format_native(process: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about native memory: mappings that grew, and stacks from perf."""
    growth = list((process.get("mappings") or {}).items())
    for kind, size_bytes in growth[:MAX_SHOWN]:
        if size_bytes >= MIN_SHOWN_BYTES:
            size = format_size(size_bytes)
            account = "by the kernel's account of its mappings"
            yield f"  {size:>10} more resident in {kind}, {account}"
    for stack in (process.get("native") or ())[:MAX_SHOWN]:
        line, *callers = stack["stack"]
        yield f"  {stack['faults']:>10,} first uses of a page  {line}"
        yield from _format_callers(callers)


def _format_callers(callers: list[str]) -> Iterator[str]:
    for caller in callers[:MAX_SHOWN]:
        yield f"{'':>13}called from {caller}"
