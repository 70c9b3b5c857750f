"""A report, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

from msgspec.structs import asdict

from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.commands.preflight.finding import Finding
from vllm_headroom.commands.preflight.report import Clearance, GpuReport, shares
from vllm_headroom.model import Failure
from vllm_headroom.units import gib

SPOKEN: Final = {Conclusion.GOOD: "GO", Conclusion.NOT_GOOD: "NO GO", Conclusion.CANNOT_TELL: "CANNOT TELL"}


def text(report: Clearance) -> Iterator[str]:
    """Yield what a person reads."""
    for gpu in report.gpus:
        yield from _gpu(gpu)
    waited = f" after {report.waited_seconds:.0f} s" if report.waited_seconds >= 1 else ""
    yield f"{SPOKEN[report.verdict]}{waited}"
    for finding, after in zip_longest(report.findings, report.findings[1:]):
        yield _finding(finding)
        if finding.fix is not None and (after is None or after.fix != finding.fix):
            yield f"    {finding.fix}"
    highest = report.highest_utilization_ratio
    if highest is not None:
        yield f"The highest --gpu-memory-utilization that would work now is {highest:.2f}."


def _gpu(gpu: GpuReport) -> Iterator[str]:
    reading, memory = gpu.reading, gpu.reading.memory
    name = f"GPU {reading.index} ({reading.uuid or 'UUID not known'}) {reading.name}".rstrip()
    if memory is None or gpu.asked_bytes is None:
        yield f"{name}: memory not known"
        return
    free, usable = gib(memory.free_bytes), gib(memory.usable_bytes)
    yield f"{name}: {free} free of {usable}, vLLM asks for {gib(gpu.asked_bytes)}"
    yield from (f"  {held or '?':>10}  {who}" for held, who in shares(gpu))


def _finding(finding: Finding) -> str:
    unsure = "cannot tell: " if finding.verdict is Conclusion.CANNOT_TELL else ""
    note = "note: " if finding.verdict is Conclusion.GOOD else ""
    of = "" if finding.gpu is None else f"GPU {finding.gpu}: "
    return f"  {note}{unsure}{of}{finding.text}"


def document(report: Clearance) -> dict[str, Any]:
    """Return the same for scripts; bytes, ratios and seconds, null where unknown."""
    conditions = report.conditions
    return {
        "verdict": report.verdict,
        "highest_gpu_memory_utilization": report.highest_utilization_ratio,
        "waited_seconds": round(report.waited_seconds, 1),
        "driver_version": None if isinstance(conditions.readings, Failure) else conditions.readings.driver_version,
        "gpus": [_gpu_document(gpu) for gpu in report.gpus],
        "shm": conditions.shm and asdict(conditions.shm),
        "host": conditions.host
        and {"used_bytes": conditions.host.used_bytes, "limit_bytes": conditions.host.limit_bytes},
        "findings": [
            {name: value for name, value in asdict(finding).items() if name != "may_pass"}
            for finding in report.findings
        ],
    }


def _gpu_document(gpu: GpuReport) -> dict[str, Any]:
    reading, memory = gpu.reading, gpu.reading.memory
    return {
        "gpu": reading.index,
        "uuid": reading.uuid,
        "name": reading.name,
        "total_bytes": memory and memory.total_bytes,
        "reserved_bytes": memory and memory.reserved_bytes,
        "used_bytes": memory and memory.used_bytes,
        "free_bytes": memory and memory.free_bytes,
        "asked_bytes": gpu.asked_bytes,
        "highest_gpu_memory_utilization": gpu.highest_utilization_ratio,
        "processes": None if gpu.holders is None else [asdict(holder) for holder in gpu.holders],
        "unlisted_bytes": gpu.unlisted_bytes,
    }
