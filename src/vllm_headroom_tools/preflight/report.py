"""Would vLLM start now? All that was found, and the verdict."""

from collections.abc import Collection, Iterator
from itertools import zip_longest
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from vllm_headroom.derive.pages import is_page_awake
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import EnginePage, Failure, GpuReading
from vllm_headroom.units import GIB, format_gib
from vllm_headroom_tools import conclusion
from vllm_headroom_tools.conclusion import Conclusion, Report, find_worst
from vllm_headroom_tools.preflight import checks
from vllm_headroom_tools.preflight.checks import GpuChoice, Kind, MemoryRequest, Obstacle
from vllm_headroom_tools.preflight.look import Conditions, GpuOccupant


class GpuReport(Struct, frozen=True, kw_only=True):
    """One GPU that vLLM will use; None where it is not known.

    `holders` are its processes; `unlisted_bytes` are in use by none of them: by processes that cannot be seen from
    here, or by one that has ended and whose memory the driver has not taken back yet.
    """

    reading: GpuReading
    asked_bytes: int | None
    highest_utilization_ratio: float | None
    holders: tuple[GpuOccupant, ...] | None
    unlisted_bytes: int | None


class Clearance(Struct, frozen=True, kw_only=True):
    """What was seen and found; the findings with GOOD are remarks."""

    conditions: Conditions
    findings: tuple[Obstacle, ...]
    gpus: tuple[GpuReport, ...] = ()
    waited_seconds: float = 0.0

    @property
    def verdict(self) -> Conclusion:
        """Whether vLLM would start: one certain hindrance is enough, whatever else is not known."""
        return find_worst(finding.verdict for finding in self.findings)

    @property
    def hindrances(self) -> tuple[Obstacle, ...]:
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
        return (
            None
            if None in ratios
            else min((ratio for ratio in ratios if ratio is not None), default=None)
        )


def judge(
    conditions: Conditions, ask: MemoryRequest, wanted: GpuChoice, ignored: Collection[Kind]
) -> Clearance:
    """Judge whether vLLM can start; what is `ignored` remains as a remark."""
    if isinstance(conditions.readings, Failure):
        return Clearance(
            conditions=conditions, findings=(checks.report_failure(conditions.readings),)
        )
    devices, problems = checks.choose_gpus(conditions.readings.devices, wanted)
    gpus = tuple(build_gpu_report(device, conditions, ask) for device in devices)
    findings = [*problems]
    for gpu, device in zip(gpus, devices, strict=True):
        findings += checks.check_memory(device, ask, describe_holders(gpu), conditions.swap_bytes)
        if device.failure is None:
            found = next(
                (faults for faults in conditions.faults if faults.index == device.index), None
            )
            findings += checks.check_faults(device, found)
    findings += (
        *checks.check_host_memory(conditions.host, ask),
        *checks.check_left_files(conditions.left),
    )
    if ask.tensor_parallel_size > 1:
        findings += (*checks.check_identical(devices), *checks.check_shared_memory(conditions.shm))
    checked = tuple(
        replace(each, verdict=Conclusion.GOOD, text=f"{each.text} (ignored)")
        if each.kind in ignored
        else each
        for each in dict.fromkeys(findings)
    )
    return Clearance(conditions=conditions, findings=checked, gpus=gpus)


def describe_holders(gpu: GpuReport) -> str:
    """Return who has the memory of a GPU, as the end of a sentence; nothing where that is not known."""
    parts = [f"{held or 'an unknown share'} by {who}" for held, who in list_shares(gpu)]
    return f"; held: {', '.join(parts)}" if parts else ""


def list_shares(gpu: GpuReport) -> Iterator[tuple[str, str]]:
    """Yield how much of a GPU is held, nothing where that is not known, and by whom."""
    for holder in gpu.holders or ():
        who = f"pid {holder.pid}" if holder.name is None else f"{holder.name} (pid {holder.pid})"
        yield "" if holder.used_bytes is None else format_gib(holder.used_bytes), who
    if gpu.unlisted_bytes is not None and gpu.unlisted_bytes >= GIB // 20:
        yield format_gib(gpu.unlisted_bytes), "no process listed here"


def build_gpu_report(device: GpuReading, conditions: Conditions, ask: MemoryRequest) -> GpuReport:
    """Return what is known of a GPU for this request."""
    memory, holders, unlisted = device.memory, conditions.holders.get(device.uuid), None
    known = [holder.used_bytes for holder in holders or () if holder.used_bytes is not None]
    if (
        memory is not None
        and memory.reserved_bytes is not None
        and holders is not None
        and len(known) == len(holders)
    ):
        unlisted = max(0, memory.used_bytes - sum(known))
    return GpuReport(
        reading=device,
        asked_bytes=None if memory is None else checks.compute_asked_bytes(ask, memory),
        highest_utilization_ratio=None
        if memory is None
        else checks.compute_highest_utilization(ask, memory),
        holders=holders,
        unlisted_bytes=unlisted,
    )


def build_report(found: Clearance) -> Report:
    """Return the report; bytes, ratios and seconds, null where unknown."""
    waited = f" after {found.waited_seconds:.0f} s" if found.waited_seconds >= 1 else ""
    words = {
        Conclusion.GOOD: "GO",
        Conclusion.NOT_GOOD: "NO GO",
        Conclusion.CANNOT_TELL: "CANNOT TELL",
    }
    headline = f"{words[found.verdict]}{waited}"
    first = next((each for each in found.findings if each.verdict is found.verdict), None)
    return Report(
        verdict=found.verdict,
        headline=headline if first is None else f"{headline}: {first.sentence}",
        findings=[
            conclusion.Finding(
                each.kind, each.verdict, each.sentence, (each.fix,) if each.fix else ()
            )
            for each in found.findings
        ],
        data=_build_data(found),
        lines=_render_text(found, headline),
    )


def _render_text(report: Clearance, headline: str) -> Iterator[str]:
    for gpu in report.gpus:
        yield from _format_gpu(gpu)
    yield headline
    unsure = (
        "" if report.verdict is Conclusion.CANNOT_TELL else "cannot tell: "
    )  # the headline has the words
    marks = {Conclusion.GOOD: "note: ", Conclusion.CANNOT_TELL: unsure, Conclusion.NOT_GOOD: ""}
    for finding, after in zip_longest(report.findings, report.findings[1:]):
        yield f"  {marks[finding.verdict]}{finding.sentence}"
        if finding.fix is not None and (after is None or after.fix != finding.fix):
            yield f"    {finding.fix}"
    highest = report.highest_utilization_ratio
    if highest is not None:
        yield f"The highest --gpu-memory-utilization that would work now is {highest:.2f}."


def _format_gpu(gpu: GpuReport) -> Iterator[str]:
    reading, memory = gpu.reading, gpu.reading.memory
    name = f"GPU {reading.index} ({reading.uuid or 'UUID not known'}) {reading.name}".rstrip()
    if memory is None or gpu.asked_bytes is None:
        yield f"{name}: memory not known"
        return
    free, usable = format_gib(memory.free_bytes), format_gib(memory.usable_bytes)
    yield f"{name}: {free} free of {usable}, vLLM requests {format_gib(gpu.asked_bytes)}"
    yield from (f"  {held or '?':>10}  {who}" for held, who in list_shares(gpu))


def _build_data(report: Clearance) -> dict[str, Any]:
    readings, host = report.conditions.readings, report.conditions.host
    return {
        "highest_gpu_memory_utilization": report.highest_utilization_ratio,
        "waited_seconds": round(report.waited_seconds, 1),
        "driver_version": None if isinstance(readings, Failure) else readings.driver_version,
        "gpus": [
            {
                "gpu": gpu.reading.index,
                "uuid": gpu.reading.uuid,
                "name": gpu.reading.name,
                "total_bytes": gpu.reading.memory and gpu.reading.memory.total_bytes,
                "reserved_bytes": gpu.reading.memory and gpu.reading.memory.reserved_bytes,
                "used_bytes": gpu.reading.memory and gpu.reading.memory.used_bytes,
                "free_bytes": gpu.reading.memory and gpu.reading.memory.free_bytes,
                "asked_bytes": gpu.asked_bytes,
                "highest_gpu_memory_utilization": gpu.highest_utilization_ratio,
                "processes": None
                if gpu.holders is None
                else [asdict(holder) for holder in gpu.holders],
                "unlisted_bytes": gpu.unlisted_bytes,
            }
            for gpu in report.gpus
        ],
        "shm": report.conditions.shm and asdict(report.conditions.shm),
        "host": host and {"used_bytes": host.used_bytes, "limit_bytes": host.limit_bytes},
        "findings": [
            {name: value for name, value in asdict(finding).items() if name != "may_pass"}
            for finding in report.findings
        ],
    }


SEE_IT: Final = (
    "run it where the engine runs: in its pod with shareProcessNamespace: true, or on the host"
)


def judge_wake(conditions: Conditions, page: EnginePage | Failure, ask: MemoryRequest) -> Clearance:
    """Return whether each GPU has free what the engine gave back for its sleep; `ask` is what the operator set.

    What it held is its share of the GPU within a GiB or two: activations come and go, and graphs lie beside it.
    """
    if isinstance(conditions.readings, Failure):
        return Clearance(
            conditions=conditions, findings=(checks.report_failure(conditions.readings),)
        )
    request = _find_request(page, ask)
    reports = (
        build_gpu_report(device, conditions, request or ask)
        for device in conditions.readings.devices
    )
    gpus = tuple(
        gpu for gpu in reports if {each.pid for each in gpu.holders or ()} & conditions.engine_pids
    )
    shown = (
        ()
        if request is None
        else tuple(replace(gpu, highest_utilization_ratio=None) for gpu in gpus)
    )
    return Clearance(
        conditions=conditions, findings=_check_wake(conditions, page, request, gpus), gpus=shown
    )


def _check_wake(
    conditions: Conditions,
    page: EnginePage | Failure,
    request: MemoryRequest | None,
    gpus: tuple[GpuReport, ...],
) -> tuple[Obstacle, ...]:
    fix = None
    if isinstance(page, Failure):
        text = page.message
    elif (is_awake := is_page_awake(page)) is None:
        text = "the engine does not report whether it sleeps: vLLM does since 0.11.1"
    elif is_awake:
        text, host = "the engine is awake: there is nothing to wake", conditions.host
        if host is not None and host.limit_bytes is not None and host.room_bytes is not None:
            left = f"{format_gib(host.room_bytes)} of {format_gib(host.limit_bytes)} are left"
            text += f"; sleep level 1 would put its weights into host memory, of which {left}"
        return (Obstacle(Kind.ENGINE, Conclusion.GOOD, text),)
    elif not gpus:
        text, fix = "none of its processes is seen on a visible GPU", SEE_IT
    elif request is None:
        text = "what it holds while it is awake is not known"
        fix = "set it with --gpu-memory-utilization or --bytes; a sidecar that saw the engine awake exports it"
    else:
        return tuple(_check_gpu_wake(gpu, request, conditions.engine_pids) for gpu in gpus)
    return (Obstacle(Kind.ENGINE, Conclusion.CANNOT_TELL, text, fix),)


def _find_request(page: EnginePage | Failure, ask: MemoryRequest) -> MemoryRequest | None:
    """Return what the engine takes by the options, else by its page; None where neither has it."""
    plain = MemoryRequest(utilization_ratio=None, tensor_parallel_size=ask.tensor_parallel_size)
    if isinstance(page, Failure) or ask != plain:
        return ask
    shares = {engine.gpu_memory_utilization_ratio for engine in page.engines}
    in_bytes = any(engine.kv_cache_memory_bytes for engine in page.engines)
    share = shares.pop() if len(shares) == 1 else None
    return None if in_bytes or share is None else replace(ask, utilization_ratio=share)


def _check_gpu_wake(
    gpu: GpuReport, request: MemoryRequest, engine_pids: frozenset[int]
) -> Obstacle:
    memory, index = gpu.reading.memory, gpu.reading.index
    held = sum_known(each.used_bytes for each in gpu.holders or () if each.pid in engine_pids)
    if memory is None or held is None:
        text = "what the engine holds of it cannot be seen from here"
        return Obstacle(Kind.ENGINE, Conclusion.CANNOT_TELL, text, SEE_IT, gpu=index)
    to_wake = max(0, checks.compute_asked_bytes(request, memory) - held)
    text = f"the engine sleeps and holds {format_gib(held)}; to wake takes about {format_gib(to_wake)}, and"
    free = f"{format_gib(memory.free_bytes)} are free"
    if to_wake <= memory.free_bytes:
        return Obstacle(Kind.ENGINE, Conclusion.GOOD, f"{text} {free}", gpu=index)
    missing = f"{format_gib(to_wake - memory.free_bytes)} are missing{describe_holders(gpu)}"
    fix = "stop or move what else is there first: a vLLM that wakes without room fails with an out-of-memory"
    return Obstacle(
        Kind.MEMORY,
        Conclusion.NOT_GOOD,
        f"{text} only {free}: {missing}",
        fix,
        gpu=index,
        may_pass=True,
    )
