"""Could the engine that sleeps there wake now?"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.commands.preflight import checks
from vllm_headroom.commands.preflight.budget import Ask, asked_bytes
from vllm_headroom.commands.preflight.finding import Finding, Kind
from vllm_headroom.commands.preflight.look import Conditions
from vllm_headroom.commands.preflight.report import Clearance, GpuReport, gpu_report, held_by
from vllm_headroom.derive.page_facts import awake, together
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.units import gib

UNTOLD: Final = "the engine does not say whether it sleeps: vLLM does from 0.11.1 on"
NOT_SEEN: Final = "none of its processes is seen on a visible GPU"
SEE_IT: Final = "run it where the engine runs: in its pod with shareProcessNamespace: true, or on the host"
NO_SHARE: Final = "what it holds while it is awake is not told"
SAY_IT: Final = "say it with --gpu-memory-utilization or --bytes; a sidecar's page knows it of an engine it saw awake"


def judge_wake(conditions: Conditions, page: EnginePage | Failure, ask: Ask) -> Clearance:
    """Return whether each GPU has free what the engine gave back for its sleep; `ask` is what the operator told.

    What it held is its share of the GPU within a GiB or two: activations come and go, and graphs lie beside it.
    """
    if isinstance(conditions.readings, Failure):
        return Clearance(conditions=conditions, findings=(checks.failure_of(conditions.readings),))
    told = _told(page, ask)
    reports = (gpu_report(device, conditions, told or ask) for device in conditions.readings.devices)
    gpus = tuple(gpu for gpu in reports if {each.pid for each in gpu.holders or ()} & conditions.engine_pids)
    shown = () if told is None else tuple(replace(gpu, highest_utilization_ratio=None) for gpu in gpus)
    return Clearance(conditions=conditions, findings=_findings(conditions, page, told, gpus), gpus=shown)


def _findings(
    conditions: Conditions, page: EnginePage | Failure, told: Ask | None, gpus: tuple[GpuReport, ...]
) -> tuple[Finding, ...]:
    if isinstance(page, Failure):
        return (_unknown(page.message),)
    sleeps = awake(page)
    if sleeps is None:
        return (_unknown(UNTOLD),)
    if sleeps:
        return (_remark(f"the engine is awake: there is nothing to wake{_room_for_weights(conditions)}"),)
    if not gpus:
        return (_unknown(NOT_SEEN, SEE_IT),)
    if told is None:
        return (_unknown(NO_SHARE, SAY_IT),)
    return tuple(_of(gpu, told, conditions.engine_pids) for gpu in gpus)


def _told(page: EnginePage | Failure, ask: Ask) -> Ask | None:
    """Return what the engine takes: as the operator says, else as its page does; None where neither does."""
    if isinstance(page, Failure) or ask != Ask(utilization_ratio=None, tensor_parallel_size=ask.tensor_parallel_size):
        return ask
    shares = {engine.gpu_memory_utilization_ratio for engine in page.engines}
    in_bytes = any(engine.kv_cache_memory_bytes for engine in page.engines)
    share = shares.pop() if len(shares) == 1 else None
    return None if in_bytes or share is None else replace(ask, utilization_ratio=share)


def _of(gpu: GpuReport, told: Ask, engine_pids: frozenset[int]) -> Finding:
    memory, index = gpu.reading.memory, gpu.reading.index
    held = together(each.used_bytes for each in gpu.holders or () if each.pid in engine_pids)
    if memory is None or held is None:
        return replace(_unknown("what the engine holds of it cannot be told from here", SEE_IT), gpu=index)
    to_wake = max(0, asked_bytes(told, memory) - held)
    text = f"the engine sleeps and holds {gib(held)}; to wake takes about {gib(to_wake)}, and"
    if to_wake <= memory.free_bytes:
        return replace(_remark(f"{text} {gib(memory.free_bytes)} are free"), gpu=index)
    text = f"{text} only {gib(memory.free_bytes)} are free: {gib(to_wake - memory.free_bytes)} are missing"
    return Finding(
        Kind.MEMORY,
        Conclusion.NOT_GOOD,
        f"{text}{held_by(gpu)}",
        "end or move what else is there first: vLLM that wakes without room ends with an out-of-memory",
        gpu=index,
        may_pass=True,
    )


def _room_for_weights(conditions: Conditions) -> str:
    host = conditions.host
    if host is None or host.limit_bytes is None or host.room_bytes is None:
        return ""
    left = f"{gib(host.room_bytes)} of {gib(host.limit_bytes)} are left"
    return f"; sleep level 1 would put its weights into host memory, of which {left}"


def _remark(text: str) -> Finding:
    return Finding(Kind.ENGINE, Conclusion.GOOD, text)


def _unknown(text: str, fix: str | None = None) -> Finding:
    return Finding(Kind.ENGINE, Conclusion.CANNOT_TELL, text, fix)
