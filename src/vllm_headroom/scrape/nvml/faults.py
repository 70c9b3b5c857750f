"""What a GPU says of faults in its memory, and of changes that wait for a reset."""

from __future__ import annotations

import pynvml
from msgspec import Struct

from vllm_headroom.scrape.nvml.calls import Calls
from vllm_headroom.scrape.nvml.parts import Part


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
