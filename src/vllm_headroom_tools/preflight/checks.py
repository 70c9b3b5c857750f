"""The checks of a GPU, of the host memory and of /dev/shm before vLLM starts."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from vllm_headroom_tools.sizing.estimate import (
    HOST_BYTES_PER_PROCESS,
    LEFT_TO_THE_MACHINE_BYTES,
    SHM_QUEUE_BYTES,
)
from vllm_headroom_tools.vllm_options import LAST_RELEASE

MIN_OWN_BYTES: Final = 3 * GIB // 10
"""The minimum amount of memory that vLLM allocates before it checks the free memory.

When vLLM reads the free memory, its own CUDA context is already on the GPU. Since vLLM 0.11, NCCL's
buffers are there too. vLLM logs "Free memory on device (F/T GiB) on startup". On otherwise empty
GPUs, F is 0.33 (B200) to 0.53 GiB (H100) lower than T. With tensor parallelism, it is 0.49 to
1.55 GiB lower.
"""

MAX_OWN_BYTES: Final = 6 * GIB // 10
"""The maximum amount of memory that vLLM allocates before it checks the free memory. The source is
the same as for MIN_OWN_BYTES.
"""

MAX_OWN_PARALLEL_BYTES: Final = 165 * GIB // 100
"""The memory that vLLM takes before its check of the free memory. This is the maximum with tensor
parallelism. It was 1.55 GiB on two and four H100 (vLLM 0.19).
"""


class MemoryRequest(Struct, frozen=True, kw_only=True):
    """The memory that vLLM requests per GPU.

    The request is a share, a size in bytes, or the larger of the two. All fields are None if no
    request is set.
    """

    utilization_ratio: float | None
    bytes_per_gpu: int | None = None
    tensor_parallel_size: int = 1

    @property
    def max_own_bytes(self) -> int:
        """Return the maximum memory that vLLM allocates before it checks the free memory."""
        return MAX_OWN_PARALLEL_BYTES if self.tensor_parallel_size > 1 else MAX_OWN_BYTES


def compute_requested_bytes(request: MemoryRequest, memory: GpuMemory) -> int:
    """Return the bytes that must be free when vLLM checks the memory.

    Returns 0 for an empty request. vLLM refuses to start with less (vllm/v1/worker/utils.py:
    request_memory).
    """
    share_bytes = 0
    if request.utilization_ratio is not None:
        share_bytes = ceil(request.utilization_ratio * memory.usable_bytes)
    return max(share_bytes, request.bytes_per_gpu or 0)


def compute_highest_utilization(request: MemoryRequest, memory: GpuMemory) -> float | None:
    """Return the highest gpu_memory_utilization that is certain to work now, in steps of 0.01.

    Returns None if not even 0.01 would work.
    """
    if memory.usable_bytes <= 0:
        return None
    free_bytes = memory.free_bytes
    if memory.machine_available_bytes is not None:
        free_bytes = min(free_bytes, memory.machine_available_bytes - LEFT_TO_THE_MACHINE_BYTES)
    # The share is rounded down. vLLM refuses to start if the share exceeds the free memory.
    hundredths = (free_bytes - request.max_own_bytes) * 100 // memory.usable_bytes
    return hundredths / 100 if hundredths > 0 else None


class Kind(StrEnum):
    """The subject of a finding. The names are stable, because scripts and --ignore use them."""

    DRIVER = "driver"
    GPUS = "gpus"
    MEMORY = "memory"
    ECC = "ecc"
    HEAT = "heat"
    IDENTICAL = "identical"
    NVLINK = "nvlink"
    OPTIONS = "options"
    SHM = "shm"
    HOST = "host"
    ENGINE = "engine"


class Obstacle(Struct, frozen=True):
    """Something that prevents vLLM from starting, or something that is unknown.

    A finding whose verdict is GOOD is only a remark.
    """

    kind: Kind
    verdict: Conclusion
    text: str

    fix: str | None = None
    """The steps to take, or None if the text already contains them."""

    gpu: int | None = None
    """The GPU's index in NVML. The value is None if the finding does not concern a single GPU."""

    may_pass: bool = False
    """Whether the obstacle may go away by itself."""

    @property
    def sentence(self) -> str:
        """Return the text, prefixed with the name of the GPU if there is one."""
        return self.text if self.gpu is None else f"GPU {self.gpu}: {self.text}"


CERTAIN_REASONS: Final = frozenset(
    {Reason.DRIVER_MISSING, Reason.VERSION_MISMATCH, Reason.NO_DEVICES, Reason.DEVICE_LOST}
)
"""The reasons for failures that also make CUDA and therefore vLLM fail. With any other reason, vLLM
may still start.
"""

RECOMMENDED_SHM_BYTES: Final = GIB
"""The size of /dev/shm that NVIDIA recommends for containers (NCCL user guide, troubleshooting:
--shm-size=1g)."""

LARGER_SHM: Final = (
    "docker run --ipc=host or --shm-size=1g; in Kubernetes an emptyDir with medium: Memory at"
    " /dev/shm, both in vLLM's container and in this one"
)


def report_failure(failure: Failure, gpu: int | None = None) -> Obstacle:
    """Return the finding for a failure of NVML or of one GPU.

    The verdict is "cannot tell" if vLLM may start despite the failure.
    """
    is_certain = failure.reason in CERTAIN_REASONS
    return Obstacle(
        Kind.DRIVER,
        Conclusion.NOT_GOOD if is_certain else Conclusion.CANNOT_TELL,
        failure.message,
        gpu=gpu,
        may_pass=failure.reason is Reason.TIMEOUT,
    )


def check_memory(
    device: GpuReading, request: MemoryRequest, holders: str, swap_bytes: int | None
) -> Iterator[Obstacle]:
    """Compare a GPU's free memory with vLLM's request and its additional allocations.

    Yields nothing if the free memory is sufficient. `holders` ends a sentence with the names of the
    processes that hold the used memory. `swap_bytes` is None if it is unknown.
    """
    memory = device.memory
    # A failure explains more than the missing figures, so it is reported instead.
    if device.failure is not None:
        yield report_failure(device.failure, device.index)
    elif memory is None:
        yield _report_memory(
            device,
            Conclusion.CANNOT_TELL,
            "the driver reports no memory for this GPU",
            "see what `free` reports as available",
        )
    else:
        yield from _check_free_memory(device, memory, request, holders)
    # A GPU that uses the machine's memory cannot use swap, including zram.
    if memory is not None and memory.is_unified and swap_bytes:
        swap = f"the machine's {format_gib(swap_bytes)} of swap and zram count as no room"
        yield Obstacle(
            Kind.HOST,
            Conclusion.GOOD,
            f"{swap}: it would hang before they are full",
            gpu=device.index,
        )


def _check_free_memory(
    device: GpuReading, memory: GpuMemory, request: MemoryRequest, holders: str
) -> Iterator[Obstacle]:
    """Check for a memory shortage, a close fit, and limits of unified memory."""
    # The free memory beyond vLLM's request, before vLLM's processes allocate any.
    spare_bytes = memory.free_bytes - compute_requested_bytes(request, memory)
    if spare_bytes < MIN_OWN_BYTES:
        yield _report_shortage(device, memory, request, holders)
        return
    # The amount that vLLM allocates before it checks the free memory varies within a range. If the
    # spare memory is within this range, the start may succeed.
    if spare_bytes < request.max_own_bytes:
        yield _report_memory(
            device,
            Conclusion.GOOD,
            f"it is close: {format_gib(spare_bytes)} are left beside vLLM's request, and it takes"
            f" {format_gib(MIN_OWN_BYTES)} to {format_gib(request.max_own_bytes)} before its check",
            "if vLLM refuses to start, request a little less",
        )
    if memory.machine_available_bytes is not None:
        requested_bytes = compute_requested_bytes(request, memory)
        yield from _check_free_blocks(device, memory, requested_bytes)
        yield from _check_machine(device, memory, request, memory.machine_available_bytes)


def _check_free_blocks(
    device: GpuReading, memory: GpuMemory, requested_bytes: int
) -> Iterator[Obstacle]:
    """Check the free 2 MiB blocks on a machine with unified memory.

    The driver maps memory in blocks of this size and cannot use smaller pieces.
    """
    blocks_bytes = memory.machine_free_blocks_bytes
    if blocks_bytes is None or blocks_bytes >= requested_bytes:
        return
    # With few free blocks, vLLM fails immediately. With more free blocks, vLLM may still run out of
    # them later.
    is_scarce = blocks_bytes < SCARCE_BLOCKS_BYTES
    yield Obstacle(
        Kind.HOST,
        Conclusion.NOT_GOOD if is_scarce else Conclusion.GOOD,
        f"{format_gib(blocks_bytes)} of the machine's memory are free in blocks of 2 MiB, and vLLM"
        f" requests {format_gib(requested_bytes)}: the rest is in the page cache, and allocations"
        " can fail before the kernel takes it back",
        "drop the page cache before the start and while the model loads (sync; echo 3"
        " >/proc/sys/vm/drop_caches); or --ignore host",
        gpu=device.index,
        may_pass=True,
    )


def _check_machine(
    device: GpuReading, memory: GpuMemory, request: MemoryRequest, available_bytes: int
) -> Iterator[Obstacle]:
    """Check whether vLLM leaves enough memory for a machine with unified memory."""
    requested_bytes = compute_requested_bytes(request, memory)
    # The check assumes vLLM's maximum allocation, because swapping would make the machine hang.
    left_bytes = available_bytes - requested_bytes - request.max_own_bytes
    if left_bytes >= LEFT_TO_THE_MACHINE_BYTES:
        return
    highest_ratio = compute_highest_utilization(request, memory)
    fix = "stop what else runs there"
    if highest_ratio is not None:
        fix = f"start with --gpu-memory-utilization {highest_ratio:.2f}"
    yield Obstacle(
        Kind.HOST,
        Conclusion.NOT_GOOD,
        "this GPU works on the machine's memory, and vLLM would leave"
        f" {format_gib(max(0, left_bytes))} of it to the system and to its own processes:"
        f" {format_gib(LEFT_TO_THE_MACHINE_BYTES)} are the least, or it swaps and hangs",
        f"{fix}; or --ignore host",
        gpu=device.index,
    )


def _report_shortage(
    device: GpuReading, memory: GpuMemory, request: MemoryRequest, holders: str
) -> Obstacle:
    """Return the finding on a memory shortage.

    The shortage is permanent if the GPU is too small.
    """
    requested_bytes = compute_requested_bytes(request, memory)
    needed_bytes = requested_bytes + MIN_OWN_BYTES
    needs = (
        f"vLLM requests {format_gib(requested_bytes)} besides the {format_gib(MIN_OWN_BYTES)} or"
        " more that it takes before its check"
    )
    # If the GPU is too small, neither waiting nor stopping other processes will help.
    if needed_bytes > memory.usable_bytes:
        return _report_memory(
            device,
            Conclusion.NOT_GOOD,
            f"{needs}, and this GPU has {format_gib(memory.usable_bytes)} in all",
            "request less",
        )
    missing = format_gib(needed_bytes - memory.free_bytes)
    fix = (
        "wait until the driver frees an exited process's memory (--wait 120s), or stop what holds"
        " the rest"
    )
    highest_ratio = compute_highest_utilization(request, memory)
    if highest_ratio is not None and request.utilization_ratio is not None:
        fix += f"; or start with --gpu-memory-utilization {highest_ratio:.2f}"
    return _report_memory(
        device,
        Conclusion.NOT_GOOD,
        f"{format_gib(memory.free_bytes)} are free, and {needs}: {missing} are missing{holders}",
        fix,
        may_pass=True,
    )


def _report_memory(
    device: GpuReading, verdict: Conclusion, text: str, fix: str, *, may_pass: bool = False
) -> Obstacle:
    return Obstacle(Kind.MEMORY, verdict, text, fix, gpu=device.index, may_pass=may_pass)


def check_gpu_faults(device: GpuReading, faults: GpuFaults | None) -> Iterator[Obstacle]:
    """Check for faults that require a reset or a new GPU.

    Source: NVIDIA GPU Memory Error Management. If the GPU did not respond (`faults` is None), the
    only finding is "cannot tell".
    """
    if faults is None:
        yield Obstacle(
            Kind.ECC,
            Conclusion.CANNOT_TELL,
            "the GPU did not report in time whether a reset is due: look for Xid lines in the"
            " node's kernel log",
            gpu=device.index,
            may_pass=True,
        )
        return
    reset = (
        f"reset it while nothing runs on it (nvidia-smi --gpu-reset -i {faults.index}, on the"
        " node), or reboot the node"
    )
    if faults.ecc is not None:
        # On some GPUs, ECC takes up part of the memory. If a reset changes the ECC mode, the memory
        # for vLLM also changes.
        is_on, is_on_after_reset = faults.ecc
        if is_on != is_on_after_reset:
            now, later = ("on", "off") if is_on else ("off", "on")
            text = (
                f"ECC is {now} and will be {later} after the next reset, which changes how much"
                " memory it has"
            )
            yield _report_fault(faults, text, reset)
    if faults.row_remap_pending:
        yield _report_fault(faults, "a faulty row of its memory waits to be remapped", reset)
    if faults.page_retirement_pending:
        yield _report_fault(faults, "a faulty page of its memory waits to be retired", reset)
    if faults.row_remap_failed:
        yield _report_fault(
            faults,
            "a faulty row of its memory could not be remapped",
            "have it replaced: NVIDIA takes it back for this",
        )


HOT_CELSIUS: Final = 87.0
"""The temperature at which a GPU begins to throttle itself. HeadroomGpuHot uses the same threshold.
"""


def check_heat(device: GpuReading) -> Iterator[Obstacle]:
    """Yield a remark if a GPU is hot while idle.

    vLLM would start on the GPU, but would be slow.
    """
    if device.temperature_celsius is not None and device.temperature_celsius >= HOT_CELSIUS:
        yield Obstacle(
            Kind.HEAT,
            Conclusion.GOOD,
            f"it is at {device.temperature_celsius:.0f} \N{DEGREE SIGN}C, and slows down from"
            f" {HOT_CELSIUS:.0f} on",
            "look at its cooling before it takes load",
            gpu=device.index,
        )


CUDA_DRIVERS: Final = {12: (525, 60), 13: (580, 65)}
"""The minimum driver version for each major version of CUDA. Source: NVIDIA's CUDA release notes,
minimum required driver version for minor version compatibility.
"""


def check_driver(driver_version: str | None, cuda_major: int | None) -> Iterator[Obstacle]:
    """Check that the driver is new enough for the installed vLLM's CUDA version.

    Yields nothing if either version is unknown (None).
    """
    required = CUDA_DRIVERS.get(cuda_major or 0)
    parts = re.match(r"(\d+)\.(\d+)", driver_version or "")
    if required is None or parts is None:
        return
    if (int(parts[1]), int(parts[2])) >= required:
        return
    needed = ".".join(str(number) for number in required)
    yield Obstacle(
        Kind.DRIVER,
        # On data-centre GPUs, NVIDIA's compatibility package runs a newer CUDA on an older driver.
        Conclusion.CANNOT_TELL,
        f"the driver is {driver_version}, and the CUDA {cuda_major} of the vLLM here needs"
        f" {needed}: it starts only with NVIDIA's compatibility package (cuda-compat)",
        "update the driver, or use a vLLM that is built for an older CUDA",
    )


def check_unknown_options(
    unknown_options: Iterable[str], vllm_version: str | None
) -> Iterator[Obstacle]:
    """Report the options that do not exist in any vLLM release in our table.

    `unknown_options` contains a line about each option. `vllm_version` is the version of vLLM in
    this environment. If our table covers this version, vLLM would refuse to start. If our table
    does not cover the version, the version may have these options.
    """
    release = re.match(r"(\d+)\.(\d+)", vllm_version or "")
    is_refused = release is not None and (int(release[1]), int(release[2])) <= LAST_RELEASE
    for line in unknown_options:
        if is_refused:
            yield Obstacle(
                Kind.OPTIONS,
                Conclusion.NOT_GOOD,
                f"{line} The vLLM {vllm_version} here would refuse to start",
                "correct it, or leave it out",
            )
        else:
            yield Obstacle(Kind.OPTIONS, Conclusion.GOOD, f"{line} A newer vLLM may have it")


def check_nvlink(devices: Sequence[GpuReading], faults: Iterable[GpuFaults]) -> Iterator[Obstacle]:
    """Yield a remark if a model is split across GPUs without NVLink.

    vLLM still starts, but every step waits for PCI Express. Yields nothing if the driver does not
    report NVLink.
    """
    chosen_indices = {device.index for device in devices}
    pairs = set()
    for gpu_faults in faults:
        unlinked_indices = chosen_indices.intersection(gpu_faults.unlinked_indices or ())
        if gpu_faults.index in chosen_indices:
            pairs |= {
                (min(gpu_faults.index, index), max(gpu_faults.index, index))
                for index in unlinked_indices
            }
    if not pairs:
        return
    names = ", ".join(f"{first} and {second}" for first, second in sorted(pairs)[:MOST_PAIRS])
    more = f" and {len(pairs) - MOST_PAIRS} pairs more" if len(pairs) > MOST_PAIRS else ""
    yield Obstacle(
        Kind.NVLINK,
        Conclusion.GOOD,
        f"no NVLink connects GPUs {names}{more}: with tensor parallelism each step then waits for"
        " PCI Express",
        "choose GPUs that NVLink connects (nvidia-smi topo -p2p n), or use pipeline parallelism;"
        " where there should be NVLink, look for the fabric manager",
    )


MOST_PAIRS: Final = 4
"""Our choice: the largest number of GPU pairs that are named."""


def _report_fault(faults: GpuFaults, text: str, fix: str) -> Obstacle:
    return Obstacle(
        Kind.ECC, Conclusion.NOT_GOOD, text, f"{fix}; or --ignore ecc", gpu=faults.index
    )


def check_host_memory(host: HostMemory | None, request: MemoryRequest) -> Iterator[Obstacle]:
    """Compare the free host memory of the container or machine with what vLLM needs.

    Yields nothing if the free memory is sufficient or unknown.
    """
    if host is None or host.limit_bytes is None or host.room_bytes is None:
        return
    # vLLM's processes are an API server, an engine core and the workers.
    process_count = 2 + request.tensor_parallel_size
    needed_bytes = HOST_BYTES_PER_PROCESS * process_count
    if host.room_bytes < needed_bytes:
        yield Obstacle(
            Kind.HOST,
            Conclusion.NOT_GOOD,
            f"{format_gib(host.room_bytes)} of {format_gib(host.limit_bytes)} of host memory are"
            f" left, and vLLM's server, core and workers hold {format_gib(needed_bytes)} or more:"
            " the kernel would kill it while it starts",
            "raise the container's memory limit, or stop what else takes memory here; or --ignore"
            " host",
            may_pass=True,
        )


def check_offload_files(sizes_bytes: Mapping[str, int]) -> Iterator[Obstacle]:
    """Report the files that KV cache offloading has left in /dev/shm.

    `sizes_bytes` maps the paths of these files to their sizes. Yields nothing if there are no such
    files.
    """
    if sizes_bytes:
        files = ", ".join(f"{name} ({format_gib(size)})" for name, size in sizes_bytes.items())
        yield Obstacle(
            Kind.SHM,
            Conclusion.NOT_GOOD,
            "no vLLM is visible that uses these files of a KV cache's tier, and a start can fail on"
            f" them (vllm-project/vllm#51317): {files}",
            f"remove them: rm {' '.join(sizes_bytes)}; or --ignore shm",
        )


def check_shared_memory(shm: Shm | None) -> Iterator[Obstacle]:
    """Check the size of /dev/shm, through which vLLM's workers communicate.

    `shm` is None if /dev/shm does not exist. Yields nothing if /dev/shm is large enough.
    """
    if shm is None:
        yield Obstacle(Kind.SHM, Conclusion.NOT_GOOD, "there is no /dev/shm", LARGER_SHM)
        return
    free = (
        f"{_format_mib(shm.free_bytes)} of the {_format_mib(shm.total_bytes)} of /dev/shm are free"
    )
    if shm.free_bytes < SHM_QUEUE_BYTES:
        fix = LARGER_SHM
        # If /dev/shm is large but full, files have been left in it.
        if shm.total_bytes >= RECOMMENDED_SHM_BYTES:
            fix = "remove what a killed instance left there (vllm_*, psm_*, nccl-*)"
        yield Obstacle(
            Kind.SHM,
            Conclusion.NOT_GOOD,
            f"{free}, and vLLM needs {_format_mib(SHM_QUEUE_BYTES)} free for tensor parallelism",
            f"{fix}; or --ignore shm",
        )
    elif shm.free_bytes < RECOMMENDED_SHM_BYTES:
        recommended = _format_mib(RECOMMENDED_SHM_BYTES)
        text = f"{free}: NVIDIA asks for {recommended} where NCCL uses it"
        yield Obstacle(Kind.SHM, Conclusion.GOOD, text, LARGER_SHM)


def _format_mib(n_bytes: int) -> str:
    return f"{n_bytes // MIB} MiB"


class GpuChoice(Struct, frozen=True, kw_only=True):
    """The options that select vLLM's GPUs; an option that is not set is None."""

    named: tuple[str, ...] | None = None
    """Indices in NVML, or UUIDs."""

    visible: tuple[str, ...] | None = None
    """The GPUs in CUDA_VISIBLE_DEVICES or its HIP equivalent; indices are CUDA's, not NVML's."""

    has_slot_order: bool = False
    """Whether CUDA's indices are in the order of PCI slots and therefore match NVML's."""

    count: int | None = None
    """The number of GPUs that vLLM uses."""


def choose_gpus(
    devices: tuple[GpuReading, ...], choice: GpuChoice
) -> tuple[tuple[GpuReading, ...], tuple[Obstacle, ...]]:
    """Return the GPUs that vLLM will use, and the findings on this selection.

    If the choice names GPUs, vLLM uses those GPUs. Without names, vLLM uses the first `count` GPUs
    in CUDA_VISIBLE_DEVICES. Both results may be empty.
    """
    # Names given by --gpus take precedence over the variable.
    names = choice.visible if choice.named is None else choice.named
    candidates = devices
    missing_names = []
    if names is not None:
        named_devices: dict[GpuReading, None] = {}
        for name in names:
            matches = [device for device in devices if _is_named(device, name)]
            # Two names may refer to the same GPU. A UUID prefix may refer to several.
            named_devices.update(dict.fromkeys(matches))
            if not matches and name not in missing_names:
                missing_names.append(name)
        candidates = tuple(named_devices)
    # vLLM uses all GPUs that --gpus names. Without --gpus, vLLM uses the first visible GPUs.
    chosen = candidates if choice.named is not None else candidates[: choice.count]

    problems = []
    if missing_names:
        problems.append(_report_missing(devices, choice, missing_names))
    needed_count = choice.count or 1
    if len(chosen) < needed_count:
        text = f"vLLM needs {needed_count} GPUs, and {len(chosen)} are there for it"
        fix = "lower --tensor-parallel-size, or give this container more GPUs"
        problems.append(Obstacle(Kind.GPUS, Conclusion.NOT_GOOD, text, fix))
    if _depends_on_order(devices, candidates, chosen, choice):
        text = (
            "which of these different GPUs vLLM takes is not known: CUDA counts the fastest first,"
            " NVML by slot"
        )
        fix = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, here and for vLLM, or name the GPUs with --gpus"
        problems.append(Obstacle(Kind.GPUS, Conclusion.CANNOT_TELL, text, fix))
    return chosen, tuple(problems)


def _report_missing(
    devices: Sequence[GpuReading], choice: GpuChoice, missing_names: Sequence[str]
) -> Obstacle:
    """Return the finding that some of the named GPUs are not visible."""
    source = "CUDA_VISIBLE_DEVICES" if choice.named is None else "--gpus"
    visible = ", ".join(f"{device.index} ({device.uuid})" for device in devices)
    return Obstacle(
        Kind.GPUS,
        Conclusion.NOT_GOOD,
        f"{source} names GPUs that are not visible: {', '.join(missing_names)}",
        f"name some of those that are: {visible}; or give this container more in"
        " NVIDIA_VISIBLE_DEVICES",
    )


def _depends_on_order(
    devices: Sequence[GpuReading],
    candidates: Sequence[GpuReading],
    chosen: Sequence[GpuReading],
    choice: GpuChoice,
) -> bool:
    """Return whether CUDA's order may make vLLM use GPUs other than `chosen`.

    The order matters only if the GPU models differ and some GPUs are not used.
    """
    if choice.has_slot_order or len({device.name for device in devices}) <= 1:
        return False
    if len(chosen) < len(candidates):
        return True
    has_indices = any(name.isdecimal() for name in choice.visible or ())
    return has_indices and len(candidates) < len(devices)


def check_identical(devices: Sequence[GpuReading]) -> Iterator[Obstacle]:
    """Check that GPUs that work in parallel have the same name and memory size.

    Yields nothing if the GPUs are identical. Another check covers GPUs that cannot be read.
    """
    # GPUs with the same name but different memory sizes differ in their ECC mode.
    kinds = {
        (device.name, device.memory.total_bytes) for device in devices if device.memory is not None
    }
    if len(kinds) > 1:
        listed = sorted(f"{name} with {total_bytes} bytes" for name, total_bytes in kinds)
        yield Obstacle(
            Kind.IDENTICAL,
            Conclusion.NOT_GOOD,
            f"tensor parallelism needs GPUs of one kind, and these are {len(kinds)}:"
            f" {', '.join(listed)}",
            "name GPUs of one kind with --gpus and in vLLM's CUDA_VISIBLE_DEVICES; where only the"
            " bytes differ, so does their ECC mode; or --ignore identical",
        )


def _is_named(device: GpuReading, name: str) -> bool:
    """Return whether an index or a UUID prefix refers to this GPU."""
    if name.isdecimal():
        return device.index == int(name)
    return device.uuid.casefold().startswith(name.casefold())  # CUDA accepts a prefix too
