"""The findings and the verdict on whether vLLM would start now."""

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from vllm_headroom.derive.pages import is_page_awake
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import EnginePage, Failure, GpuMemory, GpuReading, HostMemory
from vllm_headroom.units import GIB, format_gib
from vllm_headroom_tools import conclusion
from vllm_headroom_tools.conclusion import Conclusion, Report, find_worst
from vllm_headroom_tools.preflight import checks
from vllm_headroom_tools.preflight.checks import GpuChoice, Kind, MemoryRequest, Obstacle
from vllm_headroom_tools.preflight.look import Conditions, GpuOccupant


class GpuReport(Struct, frozen=True, kw_only=True):
    """The figures of a GPU that vLLM will use; an unknown figure is None."""

    reading: GpuReading
    requested_bytes: int | None
    highest_utilization_ratio: float | None

    holders: tuple[GpuOccupant, ...] | None
    """The processes on the GPU, or None if NVML does not list them."""

    unlisted_bytes: int | None
    """The memory in use that does not belong to any listed process.

    It belongs to processes that are not visible here. The driver may also not yet have freed an
    ended process's memory.
    """


class Clearance(Struct, frozen=True, kw_only=True):
    """The result of one reading of the machine, with the findings.

    A GOOD finding is a remark.
    """

    conditions: Conditions
    findings: tuple[Obstacle, ...]
    gpus: tuple[GpuReport, ...] = ()
    waited_seconds: float = 0.0

    @property
    def verdict(self) -> Conclusion:
        """Return whether vLLM would start; if there is an obstacle, unknown facts do not matter."""
        return find_worst(finding.verdict for finding in self.findings)

    @property
    def hindrances(self) -> tuple[Obstacle, ...]:
        """Return the findings that are not remarks: obstacles and unknown facts."""
        return tuple(finding for finding in self.findings if finding.verdict is not Conclusion.GOOD)

    @property
    def may_pass(self) -> bool:
        """Return whether there are hindrances and waiting may remove all of them."""
        return bool(self.hindrances) and all(finding.may_pass for finding in self.hindrances)

    @property
    def highest_utilization_ratio(self) -> float | None:
        """Return the highest gpu_memory_utilization that is certain to work on all GPUs now.

        Returns None if there are no GPUs, or if no value works on all GPUs.
        """
        ratios = []
        for gpu in self.gpus:
            if gpu.highest_utilization_ratio is None:
                return None
            ratios.append(gpu.highest_utilization_ratio)
        return min(ratios, default=None)


def judge_conditions(
    conditions: Conditions,
    request: MemoryRequest,
    choice: GpuChoice,
    ignored_kinds: Collection[Kind],
) -> Clearance:
    """Judge whether vLLM can start.

    If the GPUs cannot be read, that failure is the only finding. Findings of ignored kinds are kept
    as remarks.
    """
    if isinstance(conditions.readings, Failure):
        return Clearance(
            conditions=conditions, findings=(checks.report_failure(conditions.readings),)
        )
    devices, problems = checks.choose_gpus(conditions.readings.devices, choice)
    gpus = tuple(build_gpu_report(device, conditions, request) for device in devices)
    findings = list(problems)
    findings += checks.check_driver(conditions.readings.driver_version, conditions.cuda_major)
    for gpu in gpus:
        findings += _check_gpu(gpu, conditions, request)
    findings += checks.check_host_memory(conditions.host, request)
    findings += checks.check_offload_files(conditions.offload_sizes_bytes)
    # Identical GPUs and shared memory are needed only with several GPUs.
    if request.tensor_parallel_size > 1:
        findings += checks.check_identical(devices)
        findings += checks.check_nvlink(devices, conditions.faults)
        findings += checks.check_shared_memory(conditions.shm)
    # Each MIG instance reports the faults of its entire GPU, so the same fault may occur twice.
    unique_findings = dict.fromkeys(findings)
    return Clearance(
        conditions=conditions,
        findings=tuple(_ignore(finding, ignored_kinds) for finding in unique_findings),
        gpus=gpus,
    )


def _check_gpu(
    gpu: GpuReport, conditions: Conditions, request: MemoryRequest
) -> Iterator[Obstacle]:
    """Yield the findings on a GPU's memory.

    If the GPU can be read, also yields the findings on its faults.
    """
    device = gpu.reading
    yield from checks.check_memory(device, request, describe_holders(gpu), conditions.swap_bytes)
    if device.failure is None:
        faults_by_index = {faults.index: faults for faults in reversed(conditions.faults)}
        yield from checks.check_gpu_faults(device, faults_by_index.get(device.index))
        yield from checks.check_heat(device)


def _ignore(finding: Obstacle, ignored_kinds: Collection[Kind]) -> Obstacle:
    """Turn a finding of an ignored kind into a remark; return any other finding unchanged."""
    if finding.kind not in ignored_kinds:
        return finding
    return replace(finding, verdict=Conclusion.GOOD, text=f"{finding.text} (ignored)")


MIN_UNLISTED_BYTES: Final = GIB // 20
"""Our choice: a smaller amount of unlisted memory is not reported."""


def describe_holders(gpu: GpuReport) -> str:
    """Return a sentence ending that names the holders of a GPU's memory.

    Returns "" if the holders are unknown.
    """
    parts = [f"{size or 'an unknown share'} by {holder}" for size, holder in list_shares(gpu)]
    return f"; held: {', '.join(parts)}" if parts else ""


def list_shares(gpu: GpuReport) -> Iterator[tuple[str, str]]:
    """Yield the share and name of each holder of a GPU's memory.

    An unknown share is empty.
    """
    for holder in gpu.holders or ():
        name = f"pid {holder.pid}"
        if holder.name is not None:
            name = f"{holder.name} (pid {holder.pid})"
        size = "" if holder.used_bytes is None else format_gib(holder.used_bytes)
        yield size, name
    if gpu.unlisted_bytes is not None and gpu.unlisted_bytes >= MIN_UNLISTED_BYTES:
        yield format_gib(gpu.unlisted_bytes), "no process listed here"


def build_gpu_report(
    device: GpuReading, conditions: Conditions, request: MemoryRequest
) -> GpuReport:
    """Return the figures of a GPU for this request.

    If the GPU's memory is unknown, all figures are None. If no share fits, the highest utilization
    is None.
    """
    holders = conditions.holders.get(device.uuid)
    memory = device.memory
    requested_bytes = None
    highest_ratio = None
    if memory is not None:
        requested_bytes = checks.compute_requested_bytes(request, memory)
        highest_ratio = checks.compute_highest_utilization(request, memory)
    return GpuReport(
        reading=device,
        requested_bytes=requested_bytes,
        highest_utilization_ratio=highest_ratio,
        holders=holders,
        unlisted_bytes=_count_unlisted_bytes(memory, holders),
    )


def _count_unlisted_bytes(
    memory: GpuMemory | None, holders: tuple[GpuOccupant, ...] | None
) -> int | None:
    """Return the bytes in use that are not accounted for by the holders.

    Returns None if the GPU's memory, the holders or a holder's memory is unknown.
    """
    if memory is None or memory.reserved_bytes is None or holders is None:
        return None
    sizes_bytes = [holder.used_bytes for holder in holders if holder.used_bytes is not None]
    if len(sizes_bytes) < len(holders):
        return None
    return max(0, memory.used_bytes - sum(sizes_bytes))


VERDICT_WORDS: Final = {
    Conclusion.GOOD: "GO",
    Conclusion.NOT_GOOD: "NO GO",
    Conclusion.CANNOT_TELL: "CANNOT TELL",
}


def build_report(clearance: Clearance) -> Report:
    """Return the report; its headline is the first finding that determines the verdict."""
    headline = VERDICT_WORDS[clearance.verdict]
    if clearance.waited_seconds >= 1:
        headline = f"{headline} after {clearance.waited_seconds:.0f} s"
    decisive = next(
        (finding for finding in clearance.findings if finding.verdict is clearance.verdict), None
    )
    findings = []
    for finding in clearance.findings:
        fix = (finding.fix,) if finding.fix else ()
        findings.append(conclusion.Finding(finding.kind, finding.verdict, finding.sentence, fix))
    return Report(
        verdict=clearance.verdict,
        headline=headline if decisive is None else f"{headline}: {decisive.sentence}",
        findings=findings,
        data=_build_data(clearance),
        lines=_render_text(clearance, headline),
    )


def _render_text(clearance: Clearance, headline: str) -> Iterator[str]:
    """Yield the report's lines: the GPUs, the verdict, and each finding with its fix."""
    for gpu in clearance.gpus:
        yield from _format_gpu(gpu)
    yield headline
    marks = {
        Conclusion.GOOD: "note: ",
        Conclusion.CANNOT_TELL: "cannot tell: ",
        Conclusion.NOT_GOOD: "",
    }
    if clearance.verdict is Conclusion.CANNOT_TELL:
        marks[Conclusion.CANNOT_TELL] = ""  # the headline contains these words
    for finding, next_finding in zip_longest(clearance.findings, clearance.findings[1:]):
        yield f"  {marks[finding.verdict]}{finding.sentence}"
        # A fix that several findings share is shown once, after the last of them.
        is_repeated = next_finding is not None and next_finding.fix == finding.fix
        if finding.fix is not None and not is_repeated:
            yield f"    {finding.fix}"
    highest_ratio = clearance.highest_utilization_ratio
    if highest_ratio is not None:
        yield f"The highest --gpu-memory-utilization that would work now is {highest_ratio:.2f}."


def _format_gpu(gpu: GpuReport) -> Iterator[str]:
    """Yield the lines about a GPU: its free memory, vLLM's request and the holders."""
    reading = gpu.reading
    memory = reading.memory
    name = f"GPU {reading.index} ({reading.uuid or 'UUID not known'}) {reading.name}".rstrip()
    if memory is None or gpu.requested_bytes is None:
        yield f"{name}: memory not known"
        return
    free = format_gib(memory.free_bytes)
    usable = format_gib(memory.usable_bytes)
    yield f"{name}: {free} free of {usable}, vLLM requests {format_gib(gpu.requested_bytes)}"
    for size, holder in list_shares(gpu):
        yield f"  {size or '?':>10}  {holder}"


def _build_data(clearance: Clearance) -> dict[str, Any]:
    """Return the data for the JSON document."""
    readings = clearance.conditions.readings
    shm = clearance.conditions.shm
    host = clearance.conditions.host
    findings = []
    for finding in clearance.findings:
        values = asdict(finding)
        # The field is omitted, because only this command judges whether waiting could help.
        del values["may_pass"]
        findings.append(values)
    return {
        "highest_gpu_memory_utilization": clearance.highest_utilization_ratio,
        "waited_seconds": round(clearance.waited_seconds, 1),
        "driver_version": None if isinstance(readings, Failure) else readings.driver_version,
        "gpus": [_build_gpu_data(gpu) for gpu in clearance.gpus],
        "shm": shm and asdict(shm),
        "host": host and {"used_bytes": host.used_bytes, "limit_bytes": host.limit_bytes},
        "findings": findings,
    }


def _build_gpu_data(gpu: GpuReport) -> dict[str, Any]:
    """Return one GPU for the JSON document.

    If its memory is not known, some fields are null.
    """
    memory = gpu.reading.memory
    holders = None
    if gpu.holders is not None:
        holders = [asdict(holder) for holder in gpu.holders]
    return {
        "gpu": gpu.reading.index,
        "uuid": gpu.reading.uuid,
        "name": gpu.reading.name,
        "total_bytes": memory and memory.total_bytes,
        "reserved_bytes": memory and memory.reserved_bytes,
        "used_bytes": memory and memory.used_bytes,
        "free_bytes": memory and memory.free_bytes,
        "asked_bytes": gpu.requested_bytes,
        "highest_gpu_memory_utilization": gpu.highest_utilization_ratio,
        "processes": holders,
        "unlisted_bytes": gpu.unlisted_bytes,
    }


SEE_PROCESSES: Final = (
    "run it where the engine runs: in its pod with shareProcessNamespace: true, or on the host"
)


def judge_wake(
    conditions: Conditions, page: EnginePage | Failure, given_request: MemoryRequest
) -> Clearance:
    """Judge whether a sleeping engine could wake up in the free memory of its GPUs.

    `given_request` is the request that the operator set. An awake engine's memory differs from its
    share by up to two GiB. Activations vary, and the share does not include CUDA graphs.
    """
    if isinstance(conditions.readings, Failure):
        return Clearance(
            conditions=conditions, findings=(checks.report_failure(conditions.readings),)
        )
    request = _find_request(page, given_request)
    gpus = []
    for device in conditions.readings.devices:
        gpu = build_gpu_report(device, conditions, request or given_request)
        # A wake-up does not involve GPUs on which the engine holds no memory.
        pids = {holder.pid for holder in gpu.holders or ()}
        if pids & conditions.engine_pids:
            # The highest working utilization applies to a start, not to a wake-up.
            gpus.append(replace(gpu, highest_utilization_ratio=None))
    return Clearance(
        conditions=conditions,
        findings=_check_wake(conditions, page, request, gpus),
        gpus=() if request is None else tuple(gpus),
    )


def _check_wake(
    conditions: Conditions,
    page: EnginePage | Failure,
    request: MemoryRequest | None,
    gpus: Sequence[GpuReport],
) -> tuple[Obstacle, ...]:
    """Return a finding for each GPU of a sleeping engine.

    There is only one finding if the engine is awake, or if its state or GPUs are unknown.
    """
    if isinstance(page, Failure):
        return (_report_unknown_engine(page.message),)
    is_awake = is_page_awake(page)
    if is_awake is None:
        text = "the engine does not report whether it sleeps: vLLM does since 0.11.1"
        return (_report_unknown_engine(text),)
    if is_awake:
        return (_report_awake(conditions.host),)
    if not gpus:
        text = "none of its processes is seen on a visible GPU"
        return (_report_unknown_engine(text, SEE_PROCESSES),)
    if request is None:
        text = "what it holds while it is awake is not known"
        fix = (
            "set it with --gpu-memory-utilization or --bytes; a sidecar that saw the engine awake"
            " exports it"
        )
        return (_report_unknown_engine(text, fix),)
    return tuple(_check_gpu_wake(gpu, request, conditions.engine_pids) for gpu in gpus)


def _report_unknown_engine(text: str, fix: str | None = None) -> Obstacle:
    return Obstacle(Kind.ENGINE, Conclusion.CANNOT_TELL, text, fix)


def _report_awake(host: HostMemory | None) -> Obstacle:
    """Return a remark that no engine is asleep.

    The remark gives the host memory that a sleep could use.
    """
    text = "the engine is awake: there is nothing to wake"
    if host is not None and host.limit_bytes is not None and host.room_bytes is not None:
        text += (
            "; sleep level 1 would put its weights into host memory, of which"
            f" {format_gib(host.room_bytes)} of {format_gib(host.limit_bytes)} are left"
        )
    return Obstacle(Kind.ENGINE, Conclusion.GOOD, text)


def _find_request(page: EnginePage | Failure, given_request: MemoryRequest) -> MemoryRequest | None:
    """Return the engine's memory request, from the options or else from its page.

    Without options, returns None if the engines' shares differ. Also returns None if their KV cache
    size was set in bytes. If there is no page, the request is taken from the options alone.
    """
    is_given = (
        given_request.utilization_ratio is not None or given_request.bytes_per_gpu is not None
    )
    if isinstance(page, Failure) or is_given:
        return given_request
    # If the KV cache has a fixed size, vLLM ignores the share on its page.
    if any(engine.kv_cache_memory_bytes for engine in page.engines):
        return None
    # If the shares differ, it is unknown which one applies to the sleeping engine.
    ratios = {engine.gpu_memory_utilization_ratio for engine in page.engines}
    if len(ratios) != 1:
        return None
    (ratio,) = ratios
    return None if ratio is None else replace(given_request, utilization_ratio=ratio)


def _check_gpu_wake(
    gpu: GpuReport, request: MemoryRequest, engine_pids: frozenset[int]
) -> Obstacle:
    """Compare a GPU's free memory with the need of a sleeping engine.

    The verdict is "cannot tell" if the GPU's or the engine's memory is unknown.
    """
    memory = gpu.reading.memory
    index = gpu.reading.index
    held_bytes = sum_known(
        holder.used_bytes for holder in gpu.holders or () if holder.pid in engine_pids
    )
    if memory is None or held_bytes is None:
        text = "what the engine holds of it cannot be seen from here"
        return Obstacle(Kind.ENGINE, Conclusion.CANNOT_TELL, text, SEE_PROCESSES, gpu=index)
    # Memory that the sleeping engine still holds does not need to be free.
    wake_bytes = max(0, checks.compute_requested_bytes(request, memory) - held_bytes)
    text = (
        f"the engine sleeps and holds {format_gib(held_bytes)}; to wake takes about"
        f" {format_gib(wake_bytes)}, and"
    )
    free = f"{format_gib(memory.free_bytes)} are free"
    if wake_bytes <= memory.free_bytes:
        return Obstacle(Kind.ENGINE, Conclusion.GOOD, f"{text} {free}", gpu=index)
    missing = f"{format_gib(wake_bytes - memory.free_bytes)} are missing{describe_holders(gpu)}"
    fix = (
        "stop or move what else is there first: a vLLM that wakes without room fails with an"
        " out-of-memory"
    )
    return Obstacle(
        Kind.MEMORY,
        Conclusion.NOT_GOOD,
        f"{text} only {free}: {missing}",
        fix,
        gpu=index,
        may_pass=True,
    )
