"""A GPU as NVML opens it: its parts that have memory of their own, the faults of that memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import pynvml
from msgspec import Struct

from vllm_headroom.model import Failure, GpuReading
from vllm_headroom.scrape.nvml.calls import Calls, Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A whole GPU, or a MIG instance with its id; `handle` is valid until NVML is shut down or the GPU is lost."""

    index: int
    uuid: str
    name: str
    gpu_uuid: str
    gpu_instance: int | None = None
    handle: Handle = field(repr=False, compare=False)

    def failed(self, failure: Failure, xid_errors: tuple[tuple[int, int], ...]) -> GpuReading:
        """Return the reading of this part when it cannot be read; XID errors are counted here, so they stay known."""
        return GpuReading(index=self.index, uuid=self.uuid, name=self.name, xid_errors=xid_errors, failure=failure)


def whole_gpu(index: int, calls: Calls) -> Part:
    """Open the GPU at an NVML index. Raises NVMLError where it cannot be opened."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    name = calls.ask(uuid, "name", lambda: pynvml.nvmlDeviceGetName(handle)) or ""
    return Part(index=index, uuid=uuid, name=name, gpu_uuid=uuid, handle=handle)


def parts(gpu: Part, calls: Calls) -> tuple[Part, ...]:
    """Return the MIG instances seen from here, or the GPU itself where there are none; never both.

    Instances can be made and removed at any time, so this is asked anew for every reading.
    """
    mode = calls.ask(gpu.uuid, "MIG mode", lambda: pynvml.nvmlDeviceGetMigMode(gpu.handle))
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return (gpu,)
    count = calls.ask(gpu.uuid, "MIG devices", lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)) or 0
    instances = (_instance(gpu, position, calls) for position in range(count))
    return tuple(instance for instance in instances if instance is not None) or (gpu,)


def _instance(gpu: Part, position: int, calls: Calls) -> Part | None:
    handle = calls.ask(
        gpu.uuid,
        f"MIG device {position}",
        lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, position),
    )
    if handle is None:
        return None
    uuid = calls.ask(gpu.uuid, "MIG UUID", lambda: pynvml.nvmlDeviceGetUUID(handle))
    if uuid is None:
        return None
    return Part(
        index=gpu.index,
        uuid=uuid,
        name=calls.ask(uuid, "name", lambda: pynvml.nvmlDeviceGetName(handle)) or gpu.name,
        gpu_uuid=gpu.uuid,
        gpu_instance=calls.ask(uuid, "GPU instance", lambda: pynvml.nvmlDeviceGetGpuInstanceId(handle)),
        handle=handle,
    )


class GpuFaults(Struct, frozen=True, kw_only=True):
    """The faults of the GPU at an NVML index; None where it does not tell, as with MIG instances on it.

    `ecc` is whether ECC is on now, and after the next reset. `row_remap_failed` stays True once it has been.
    """

    index: int
    ecc: tuple[bool, bool] | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    page_retirement_pending: bool | None = None


def faults_of(gpu: Part, calls: Calls) -> GpuFaults:
    """Ask a whole GPU. Raises NVMLError where it, or the driver, fails."""
    ecc = calls.ask(gpu.uuid, "ECC mode", lambda: pynvml.nvmlDeviceGetEccMode(gpu.handle))
    rows = calls.ask(gpu.uuid, "row remapping", lambda: pynvml.nvmlDeviceGetRemappedRows(gpu.handle))
    pages = calls.ask(gpu.uuid, "page retirement", lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu.handle))
    return GpuFaults(
        index=gpu.index,
        ecc=None if ecc is None else (bool(ecc[0]), bool(ecc[1])),
        row_remap_pending=None if rows is None else bool(rows[2]),
        row_remap_failed=None if rows is None else bool(rows[3]),
        page_retirement_pending=None if pages is None else bool(pages),
    )
