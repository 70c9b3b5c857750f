"""Which of the visible GPUs will vLLM use?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.commands.preflight.finding import Finding, Kind
from vllm_headroom.model import GpuReading


class Wanted(Struct, frozen=True, kw_only=True):
    """What is said of vLLM's GPUs, None where nothing is.

    `named` are NVML's indices or UUIDs; `visible` is CUDA_VISIBLE_DEVICES, whose indices are CUDA's, and
    `in_slot_order` whether CUDA is told to count as NVML does. `count` is how many vLLM takes.
    """

    named: tuple[str, ...] | None = None
    visible: tuple[str, ...] | None = None
    in_slot_order: bool = False
    count: int | None = None


def choose(devices: tuple[GpuReading, ...], wanted: Wanted) -> tuple[tuple[GpuReading, ...], tuple[Finding, ...]]:
    """Return the GPUs that vLLM will use, and what speaks against that choice.

    Those that are named; else, of those that CUDA_VISIBLE_DEVICES leaves, the first `count`, as vLLM takes them.
    """
    if wanted.named is not None:
        chosen, missing = _matching(devices, wanted.named)
        return chosen, (*_missing(missing, devices, "--gpus"), *_too_few(chosen, wanted.count or 1))
    chosen, missing = (devices, ()) if wanted.visible is None else _matching(devices, wanted.visible)
    by_index = wanted.visible is not None and any(name.isdecimal() for name in wanted.visible)
    first = chosen[: wanted.count]
    findings = (*_missing(missing, devices, "CUDA_VISIBLE_DEVICES"), *_too_few(first, wanted.count or 1))
    if (by_index and len(chosen) < len(devices)) or len(first) < len(chosen):
        findings += tuple(_order_unknown(devices, in_slot_order=wanted.in_slot_order))
    return first, findings


def identical(devices: Sequence[GpuReading]) -> Iterator[Finding]:
    """Tell that GPUs which are to work in parallel differ; those that cannot be read are told of elsewhere."""
    kinds = {(device.name, device.memory.total_bytes) for device in devices if device.memory is not None}
    if len(kinds) <= 1:
        return
    told = ", ".join(sorted(f"{name} with {total_bytes} bytes" for name, total_bytes in kinds))
    text = f"tensor parallelism needs GPUs of one kind, and these are {len(kinds)}: {told}"
    fix = (
        "name GPUs of one kind with --gpus and in vLLM's CUDA_VISIBLE_DEVICES; where only the bytes differ, so does"
        " their ECC mode; or --ignore identical"
    )
    yield Finding(Kind.IDENTICAL, Conclusion.NOT_GOOD, text, fix)


def _matching(
    devices: tuple[GpuReading, ...], names: tuple[str, ...]
) -> tuple[tuple[GpuReading, ...], tuple[str, ...]]:
    found = [(name, [device for device in devices if _is(device, name)]) for name in names]
    chosen = dict.fromkeys(device for _, matching in found for device in matching)
    return tuple(chosen), tuple(name for name, matching in found if not matching)


def _is(device: GpuReading, name: str) -> bool:
    """Tell whether this is its index or its UUID, of which CUDA takes the beginning too."""
    if name.isdecimal():
        return device.index == int(name)
    return device.uuid.casefold().startswith(name.casefold())


def _missing(names: tuple[str, ...], devices: tuple[GpuReading, ...], given_by: str) -> Iterator[Finding]:
    if names:
        visible = ", ".join(f"{device.index} ({device.uuid})" for device in devices)
        text = f"{given_by} names GPUs that are not visible: {', '.join(names)}"
        fix = f"name some of those that are: {visible}; or give this container more in NVIDIA_VISIBLE_DEVICES"
        yield Finding(Kind.GPUS, Conclusion.NOT_GOOD, text, fix)


def _too_few(chosen: tuple[GpuReading, ...], count: int) -> Iterator[Finding]:
    if len(chosen) < count:
        text = f"vLLM needs {count} GPUs, and {len(chosen)} are there for it"
        fix = "lower --tensor-parallel-size, or give this container more GPUs"
        yield Finding(Kind.GPUS, Conclusion.NOT_GOOD, text, fix)


def _order_unknown(devices: tuple[GpuReading, ...], *, in_slot_order: bool) -> Iterator[Finding]:
    if not in_slot_order and len({device.name for device in devices}) > 1:
        text = "which of these different GPUs vLLM takes cannot be told: CUDA counts the fastest first, NVML by slot"
        fix = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, here and for vLLM, or name the GPUs with --gpus"
        yield Finding(Kind.GPUS, Conclusion.CANNOT_TELL, text, fix)
