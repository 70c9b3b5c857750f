"""Would vLLM start now? All that was found, and the verdict."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.commands.conclusion import Conclusion, worst
from vllm_headroom.commands.preflight import checks
from vllm_headroom.commands.preflight.budget import Ask, asked_bytes, highest_utilization
from vllm_headroom.commands.preflight.choice import Wanted, choose, identical
from vllm_headroom.commands.preflight.finding import Finding, Kind
from vllm_headroom.commands.preflight.look import Conditions, Holder
from vllm_headroom.model import Failure, GpuMemory, GpuReading
from vllm_headroom.units import GIB, gib

WORTH_A_WORD_BYTES: Final = GIB // 20


class GpuReport(Struct, frozen=True, kw_only=True):
    """One GPU that vLLM will use; None where it is not known.

    `holders` are its processes; `unlisted_bytes` are in use by none of them: by processes that cannot be seen from
    here, or by one that has ended and whose memory the driver has not taken back yet.
    """

    reading: GpuReading
    asked_bytes: int | None
    highest_utilization_ratio: float | None
    holders: tuple[Holder, ...] | None
    unlisted_bytes: int | None


class Clearance(Struct, frozen=True, kw_only=True):
    """What was seen and found; the findings with GOOD are remarks."""

    conditions: Conditions
    findings: tuple[Finding, ...]
    gpus: tuple[GpuReport, ...] = ()
    waited_seconds: float = 0.0

    @property
    def verdict(self) -> Conclusion:
        """Whether vLLM would start: one certain hindrance is enough, whatever else cannot be told."""
        return worst(finding.verdict for finding in self.findings)

    @property
    def hindrances(self) -> tuple[Finding, ...]:
        """What is in the way of a go."""
        return tuple(finding for finding in self.findings if finding.verdict is not Conclusion.GOOD)

    @property
    def may_pass(self) -> bool:
        """Whether waiting may turn this into a go."""
        return bool(self.hindrances) and all(finding.may_pass for finding in self.hindrances)

    @property
    def highest_utilization_ratio(self) -> float | None:
        """The highest gpu_memory_utilization that would surely work now on all of the GPUs; None where none would."""
        ratios = [gpu.highest_utilization_ratio for gpu in self.gpus]
        return None if None in ratios else min((ratio for ratio in ratios if ratio is not None), default=None)


def judge(conditions: Conditions, ask: Ask, wanted: Wanted, ignored: Collection[Kind]) -> Clearance:
    """Return what speaks against starting vLLM; what is `ignored` remains as a remark."""
    if isinstance(conditions.readings, Failure):
        return Clearance(conditions=conditions, findings=(checks.failure_of(conditions.readings),))
    devices, found = choose(conditions.readings.devices, wanted)
    gpus = tuple(gpu_report(device, conditions, ask) for device in devices)
    findings = [*found, *(finding for gpu in gpus for finding in _findings(gpu, conditions, ask))]
    findings += checks.host_memory(conditions.host, ask)
    if ask.tensor_parallel_size > 1:
        findings += (*identical(devices), *checks.shared_memory(conditions.shm))
    told = tuple(
        replace(each, verdict=Conclusion.GOOD, text=f"{each.text} (ignored)") if each.kind in ignored else each
        for each in dict.fromkeys(findings)
    )
    return Clearance(conditions=conditions, findings=told, gpus=gpus)


def held_by(gpu: GpuReport) -> str:
    """Return who has the memory of a GPU, as the end of a sentence; nothing where that is not known."""
    told = [f"{held or 'an unknown share'} by {who}" for held, who in shares(gpu)]
    return f"; held: {', '.join(told)}" if told else ""


def shares(gpu: GpuReport) -> Iterator[tuple[str, str]]:
    """Yield how much of a GPU is held, nothing where that is not known, and by whom."""
    for holder in gpu.holders or ():
        who = f"pid {holder.pid}" if holder.name is None else f"{holder.name} (pid {holder.pid})"
        yield "" if holder.used_bytes is None else gib(holder.used_bytes), who
    if gpu.unlisted_bytes is not None and gpu.unlisted_bytes >= WORTH_A_WORD_BYTES:
        yield gib(gpu.unlisted_bytes), "no process listed here"


def gpu_report(device: GpuReading, conditions: Conditions, ask: Ask) -> GpuReport:
    """Return what is known of a GPU that is asked for so much."""
    memory, holders = device.memory, conditions.holders.get(device.uuid)
    return GpuReport(
        reading=device,
        asked_bytes=None if memory is None else asked_bytes(ask, memory),
        highest_utilization_ratio=None if memory is None else highest_utilization(ask, memory),
        holders=holders,
        unlisted_bytes=None if memory is None else _unlisted(memory, holders),
    )


def _unlisted(memory: GpuMemory, holders: tuple[Holder, ...] | None) -> int | None:
    known = [holder.used_bytes for holder in holders or () if holder.used_bytes is not None]
    if holders is None or len(known) < len(holders) or memory.reserved_bytes is None:
        return None
    return max(0, memory.used_bytes - sum(known))


def _findings(gpu: GpuReport, conditions: Conditions, ask: Ask) -> Iterator[Finding]:
    yield from checks.memory(gpu.reading, ask, held_by(gpu))
    yield from checks.swap(gpu.reading, conditions.swap_bytes)
    if gpu.reading.failure is None:
        told = [faults for faults in conditions.faults if faults.index == gpu.reading.index]
        yield from checks.faults(told[0]) if told else (checks.unanswered(gpu.reading),)
