"""The checks of one GPU, of host memory and of /dev/shm before vLLM starts."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from math import ceil
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.verdicts import SCARCE_BLOCKS_BYTES
from vllm_headroom.model import Failure, GpuMemory, GpuReading, HostMemory, Shm
from vllm_headroom.scrape.nvml.device import GpuFaults
from vllm_headroom.units import GIB, MIB, format_gib
from vllm_headroom.vocabulary import Reason
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.sizing.estimate import HOST_BYTES_PER_PROCESS, LEFT_TO_THE_MACHINE_BYTES

LEAST_OWN_BYTES: Final = 3 * GIB // 10
"""vLLM looks at the free memory when its own CUDA context, and from 0.11 on NCCL's buffers, already lie on the GPU.
In its line "Free memory on device (F/T GiB) on startup" the two are 0.33 (B200) to 0.53 GiB (H100) apart on GPUs that
are otherwise empty, and 0.49 to 0.96 GiB with tensor parallelism.
"""


class MemoryRequest(Struct, frozen=True, kw_only=True):
    """What vLLM requests: a share of each GPU, bytes on each GPU, or both; and its tensor-parallel size."""

    utilization_ratio: float | None
    bytes_per_gpu: int | None = None
    tensor_parallel_size: int = 1

    @property
    def most_own_bytes(self) -> int:
        """What vLLM may take for itself before its check of free memory."""
        return GIB if self.tensor_parallel_size > 1 else 6 * GIB // 10


def compute_asked_bytes(ask: MemoryRequest, memory: GpuMemory) -> int:
    """Return what has to be free: vLLM refuses to start with less (vllm/v1/worker/utils.py: request_memory)."""
    ratio = ask.utilization_ratio
    return max(0 if ratio is None else ceil(ratio * memory.usable_bytes), ask.bytes_per_gpu or 0)


def compute_highest_utilization(ask: MemoryRequest, memory: GpuMemory) -> float | None:
    """Return the highest gpu_memory_utilization that would surely work now, rounded down to 0.01; None for none."""
    free_bytes = memory.free_bytes
    if memory.machine_available_bytes is not None:
        free_bytes = min(free_bytes, memory.machine_available_bytes - LEFT_TO_THE_MACHINE_BYTES)
    hundredths = (
        (free_bytes - ask.most_own_bytes) * 100 // memory.usable_bytes
        if memory.usable_bytes > 0
        else 0
    )
    return hundredths / 100 if hundredths > 0 else None


class Kind(StrEnum):
    """What is looked at; a closed set, for scripts and for --ignore."""

    DRIVER = "driver"
    GPUS = "gpus"
    MEMORY = "memory"
    ECC = "ecc"
    IDENTICAL = "identical"
    SHM = "shm"
    HOST = "host"
    ENGINE = "engine"


class Obstacle(Struct, frozen=True):
    """One thing that keeps vLLM from starting, that is not known, or, with GOOD, that is worth a remark.

    `fix` is None where `text` ends in what to do; `gpu` is an NVML index. With `may_pass`, waiting may fix it.
    """

    kind: Kind
    verdict: Conclusion
    text: str
    fix: str | None = None
    gpu: int | None = None
    may_pass: bool = False

    @property
    def sentence(self) -> str:
        """The text, with the GPU that it is about."""
        return self.text if self.gpu is None else f"GPU {self.gpu}: {self.text}"


CERTAIN: Final = frozenset(
    {Reason.DRIVER_MISSING, Reason.VERSION_MISMATCH, Reason.NO_DEVICES, Reason.DEVICE_LOST}
)
"""Failures that CUDA meets as well."""

LEAST_SHM_BYTES: Final = 256 * MIB
"""vLLM's largest queue between its processes takes 240 MiB, and it does not start with less free
(vllm/distributed/device_communicators/shm_broadcast.py: MessageQueue, check_shm_free_space).
"""

ENOUGH_SHM_BYTES: Final = GIB
"""What NVIDIA asks for in containers (NCCL user guide, troubleshooting: --shm-size=1g)."""

LARGER_SHM: Final = (
    "docker run --ipc=host or --shm-size=1g; in Kubernetes an emptyDir with medium: Memory at /dev/shm, both in vLLM's"
    " container and in this one"
)


def report_failure(failure: Failure, gpu: int | None = None) -> Obstacle:
    """Report a failure of NVML, or of one GPU; its message ends in what to do."""
    verdict = Conclusion.NOT_GOOD if failure.reason in CERTAIN else Conclusion.CANNOT_TELL
    return Obstacle(
        Kind.DRIVER, verdict, failure.message, gpu=gpu, may_pass=failure.reason is Reason.TIMEOUT
    )


def check_memory(
    device: GpuReading, ask: MemoryRequest, held_by: str, swap_bytes: int | None
) -> Iterator[Obstacle]:
    """Compare the free memory with what vLLM requests and takes besides; `held_by` says who has the rest.

    Swap, zram included, is no room for a GPU that works on the machine's memory.
    """
    if device.failure is not None:
        yield report_failure(device.failure, device.index)
    elif device.memory is None:
        text = "the driver reports no memory for this GPU"
        yield _report_memory(
            device, Conclusion.CANNOT_TELL, text, "see what `free` reports as available"
        )
    elif (
        spare_bytes := device.memory.free_bytes - compute_asked_bytes(ask, device.memory)
    ) < LEAST_OWN_BYTES:
        yield _report_shortage(device, device.memory, ask, held_by)
    else:
        if spare_bytes < ask.most_own_bytes:
            text = (
                f"it is close: {format_gib(spare_bytes)} are left beside vLLM's request, and it takes"
                f" {format_gib(LEAST_OWN_BYTES)} to {format_gib(ask.most_own_bytes)} before its check"
            )
            yield _report_memory(
                device, Conclusion.GOOD, text, "if vLLM refuses to start, request a little less"
            )
        if device.memory.machine_available_bytes is not None:
            yield from _check_machine(
                device, device.memory, ask, device.memory.machine_available_bytes
            )
    if device.memory is not None and device.memory.is_unified and swap_bytes:
        swap = f"the machine's {format_gib(swap_bytes)} of swap and zram count as no room"
        yield Obstacle(
            Kind.HOST,
            Conclusion.GOOD,
            f"{swap}: it would hang before they are full",
            gpu=device.index,
        )


def _check_machine(
    device: GpuReading, memory: GpuMemory, ask: MemoryRequest, available_bytes: int
) -> Iterator[Obstacle]:
    """Check the free blocks, which a driver maps, and what is left to a machine that shares its memory."""
    blocks, asked_bytes = memory.machine_free_blocks_bytes, compute_asked_bytes(ask, memory)
    if blocks is not None and blocks < asked_bytes:
        text = (
            f"{format_gib(blocks)} of the machine's memory are free in blocks of 2 MiB, and vLLM requests"
            f" {format_gib(asked_bytes)}: the rest is in the page cache, and allocations can fail before the kernel"
            " takes it back"
        )
        fix = "drop the page cache before the start and while the model loads (sync; echo 3 >/proc/sys/vm/drop_caches)"
        verdict = Conclusion.NOT_GOOD if blocks < SCARCE_BLOCKS_BYTES else Conclusion.GOOD
        yield Obstacle(
            Kind.HOST, verdict, text, f"{fix}; or --ignore host", gpu=device.index, may_pass=True
        )
    left_bytes = available_bytes - asked_bytes - ask.most_own_bytes
    if left_bytes < LEFT_TO_THE_MACHINE_BYTES:
        text = (
            f"this GPU works on the machine's memory, and vLLM would leave {format_gib(max(0, left_bytes))} of it to"
            f" the system and to its own processes: {format_gib(LEFT_TO_THE_MACHINE_BYTES)} are the least, or it swaps"
            " and hangs"
        )
        highest = compute_highest_utilization(ask, memory)
        less = (
            "stop what else runs there"
            if highest is None
            else f"start with --gpu-memory-utilization {highest:.2f}"
        )
        yield Obstacle(
            Kind.HOST, Conclusion.NOT_GOOD, text, f"{less}; or --ignore host", gpu=device.index
        )


def _report_shortage(
    device: GpuReading, memory: GpuMemory, ask: MemoryRequest, held_by: str
) -> Obstacle:
    asked, usable = compute_asked_bytes(ask, memory), memory.usable_bytes
    asks = f"{format_gib(asked)} besides the {format_gib(LEAST_OWN_BYTES)} or more that it takes before its check"
    if asked + LEAST_OWN_BYTES > usable:
        text = f"vLLM requests {asks}, and this GPU has {format_gib(usable)} in all"
        return _report_memory(device, Conclusion.NOT_GOOD, text, "request less")
    missing = format_gib(asked + LEAST_OWN_BYTES - memory.free_bytes)
    text = f"{format_gib(memory.free_bytes)} are free, and vLLM requests {asks}: {missing} are missing{held_by}"
    fix = "wait until the driver frees an exited process's memory (--wait 120s), or stop what holds the rest"
    highest = compute_highest_utilization(ask, memory)
    if highest is not None and ask.utilization_ratio is not None:
        fix += f"; or start with --gpu-memory-utilization {highest:.2f}"
    return _report_memory(device, Conclusion.NOT_GOOD, text, fix, may_pass=True)


def _report_memory(
    device: GpuReading, verdict: Conclusion, text: str, fix: str, *, may_pass: bool = False
) -> Obstacle:
    return Obstacle(Kind.MEMORY, verdict, text, fix, gpu=device.index, may_pass=may_pass)


def check_faults(device: GpuReading, faults: GpuFaults | None) -> Iterator[Obstacle]:
    """Check what waits for a reset or a new GPU (NVIDIA's GPU memory error management guide); None is no answer."""
    if faults is None:
        text = "the GPU did not report in time whether a reset is due: look for Xid lines in the node's kernel log"
        yield Obstacle(Kind.ECC, Conclusion.CANNOT_TELL, text, gpu=device.index, may_pass=True)
        return
    reset = f"reset it while nothing runs on it (nvidia-smi --gpu-reset -i {faults.index}, on the node), or reboot the node"
    is_on, will_be = ("on" if ecc else "off" for ecc in faults.ecc or (False, False))
    ecc = f"ECC is {is_on} and will be {will_be} after the next reset, which changes its memory"
    failed = "a faulty row of its memory could not be remapped"
    for is_so, text, fix in (
        (is_on != will_be, ecc, reset),
        (faults.row_remap_pending, "a faulty row of its memory waits to be remapped", reset),
        (faults.page_retirement_pending, "a faulty page of its memory waits to be retired", reset),
        (faults.row_remap_failed, failed, "have it replaced: NVIDIA takes it back for this"),
    ):
        if is_so:
            yield Obstacle(
                Kind.ECC, Conclusion.NOT_GOOD, text, f"{fix}; or --ignore ecc", gpu=faults.index
            )


def check_host_memory(host: HostMemory | None, ask: MemoryRequest) -> Iterator[Obstacle]:
    """Compare what is left of the container's memory, or the machine's, with what vLLM's processes hold themselves."""
    needed_bytes = HOST_BYTES_PER_PROCESS * (2 + ask.tensor_parallel_size)
    if (
        host
        and host.limit_bytes is not None
        and host.room_bytes is not None
        and host.room_bytes < needed_bytes
    ):
        text = (
            f"{format_gib(host.room_bytes)} of {format_gib(host.limit_bytes)} of host memory are left, and vLLM's"
            f" server, core and workers hold {format_gib(needed_bytes)} or more: the kernel would kill it while it"
            " starts"
        )
        fix = "raise the container's memory limit, or stop what else takes memory here; or --ignore host"
        yield Obstacle(Kind.HOST, Conclusion.NOT_GOOD, text, fix, may_pass=True)


def check_left_files(left: Mapping[str, int]) -> Iterator[Obstacle]:
    """Report files of an earlier run's tier of the KV cache in /dev/shm, by their sizes."""
    if left:
        names = ", ".join(f"{name} ({format_gib(size)})" for name, size in left.items())
        text = (
            "no vLLM is visible that uses these files of a KV cache's tier, and a start can fail on them"
            f" (vllm-project/vllm#51317): {names}"
        )
        yield Obstacle(
            Kind.SHM,
            Conclusion.NOT_GOOD,
            text,
            f"remove them: rm {' '.join(left)}; or --ignore shm",
        )


def check_shared_memory(shm: Shm | None) -> Iterator[Obstacle]:
    """Compare /dev/shm with what several processes of vLLM need."""
    if shm is None:
        yield Obstacle(Kind.SHM, Conclusion.NOT_GOOD, "there is no /dev/shm", LARGER_SHM)
        return
    free = (
        f"{_format_mib(shm.free_bytes)} of the {_format_mib(shm.total_bytes)} of /dev/shm are free"
    )
    if shm.free_bytes < LEAST_SHM_BYTES:
        text = f"{free}, and vLLM needs {_format_mib(LEAST_SHM_BYTES)} free for tensor parallelism"
        left = shm.total_bytes >= ENOUGH_SHM_BYTES
        fix = (
            "remove what a killed instance left there (vllm_*, psm_*, nccl-*)"
            if left
            else LARGER_SHM
        )
        yield Obstacle(Kind.SHM, Conclusion.NOT_GOOD, text, f"{fix}; or --ignore shm")
    elif shm.free_bytes < ENOUGH_SHM_BYTES:
        text = f"{free}: NVIDIA asks for {_format_mib(ENOUGH_SHM_BYTES)} where NCCL uses it"
        yield Obstacle(Kind.SHM, Conclusion.GOOD, text, LARGER_SHM)


def _format_mib(n_bytes: int) -> str:
    return f"{n_bytes // MIB} MiB"


class GpuChoice(Struct, frozen=True, kw_only=True):
    """The options that choose vLLM's GPUs, None where not set.

    `named` are NVML's indices or UUIDs; `visible` is CUDA_VISIBLE_DEVICES, whose indices are CUDA's, and
    `in_slot_order` whether CUDA counts as NVML does. `count` is how many vLLM takes.
    """

    named: tuple[str, ...] | None = None
    visible: tuple[str, ...] | None = None
    in_slot_order: bool = False
    count: int | None = None


def choose_gpus(
    devices: tuple[GpuReading, ...], wanted: GpuChoice
) -> tuple[tuple[GpuReading, ...], tuple[Obstacle, ...]]:
    """Return the GPUs that vLLM will use, and the problems of that choice.

    Those that are named; else, of those that CUDA_VISIBLE_DEVICES leaves, the first `count`, as vLLM takes them.
    """
    names = wanted.visible if wanted.named is None else wanted.named
    found = {
        name: [device for device in devices if _is_named(device, name)] for name in names or ()
    }
    left = (
        devices
        if names is None
        else tuple(dict.fromkeys(device for named in found.values() for device in named))
    )
    chosen = left if wanted.named is not None else left[: wanted.count]
    problems = []
    if missing := [name for name, named in found.items() if not named]:
        given_by = "CUDA_VISIBLE_DEVICES" if wanted.named is None else "--gpus"
        visible = ", ".join(f"{device.index} ({device.uuid})" for device in devices)
        text = f"{given_by} names GPUs that are not visible: {', '.join(missing)}"
        fix = f"name some of those that are: {visible}; or give this container more in NVIDIA_VISIBLE_DEVICES"
        problems.append(Obstacle(Kind.GPUS, Conclusion.NOT_GOOD, text, fix))
    if len(chosen) < (count := wanted.count or 1):
        text = f"vLLM needs {count} GPUs, and {len(chosen)} are there for it"
        fix = "lower --tensor-parallel-size, or give this container more GPUs"
        problems.append(Obstacle(Kind.GPUS, Conclusion.NOT_GOOD, text, fix))
    by_index = any(name.isdecimal() for name in wanted.visible or ())
    in_order = len(chosen) < len(left) or (by_index and len(left) < len(devices))
    if in_order and not wanted.in_slot_order and len({device.name for device in devices}) > 1:
        text = "which of these different GPUs vLLM takes is not known: CUDA counts the fastest first, NVML by slot"
        fix = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, here and for vLLM, or name the GPUs with --gpus"
        problems.append(Obstacle(Kind.GPUS, Conclusion.CANNOT_TELL, text, fix))
    return chosen, tuple(problems)


def check_identical(devices: Sequence[GpuReading]) -> Iterator[Obstacle]:
    """Check that GPUs which work in parallel are alike; those that cannot be read have findings already."""
    kinds = {
        (device.name, device.memory.total_bytes) for device in devices if device.memory is not None
    }
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{name} with {total_bytes} bytes" for name, total_bytes in kinds))
        text = f"tensor parallelism needs GPUs of one kind, and these are {len(kinds)}: {found}"
        fix = (
            "name GPUs of one kind with --gpus and in vLLM's CUDA_VISIBLE_DEVICES; where only the bytes differ, so"
            " does their ECC mode; or --ignore identical"
        )
        yield Obstacle(Kind.IDENTICAL, Conclusion.NOT_GOOD, text, fix)


def _is_named(device: GpuReading, name: str) -> bool:
    if name.isdecimal():
        return device.index == int(name)
    return device.uuid.casefold().startswith(name.casefold())  # CUDA takes a prefix too
