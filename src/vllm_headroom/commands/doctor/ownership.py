"""Which of the GPUs are the engine's, and how is that known?"""

from __future__ import annotations

from collections import Counter
from typing import Final

from msgspec.structs import replace

from vllm_headroom.commands.doctor.fixes import (
    NEWER_DRIVER,
    SAY_WHICH_PORT,
    SEE_HOST_PIDS,
    SEE_THE_GPUS,
    SEE_THE_PROCESSES,
    TRACE_THEM,
    Check,
    Fix,
    Status,
    setting,
)
from vllm_headroom.commands.doctor.gpus import NO_NVML, OF_OWNED_GPUS, called
from vllm_headroom.commands.doctor.look import Sight
from vllm_headroom.daemon.transitions import AMBIGUOUS, NOT_ATTRIBUTED
from vllm_headroom.derive.attribution import Selection, pids_are_true
from vllm_headroom.model import Failure, Vendor
from vllm_headroom.scrape.proc.reader import HIDDEN
from vllm_headroom.vocabulary import Attribution

HOW: Final = {
    Attribution.PROCESS: "the engine's (process: one of its processes is on it)",
    Attribution.UUID: "the engine's (uuid: HEADROOM_GPUS names it)",
    Attribution.SINGLE: "taken for the engine's (single: no other is visible)",
    Attribution.ASSUMED: "taken for the engine's (assumed: HEADROOM_GPUS is all)",
    None: "not taken for the engine's",
}
ALONE: Final = "the only visible GPU is taken for the engine's, but none of the engine's processes is on it"
NOT_ON_ANY: Final = (
    "none of the engine's processes is on a visible GPU: it is still starting, or uses GPUs that this container does"
    " not see"
)
NOT_ON_THOSE_READ: Final = (
    "none of the engine's processes is on a GPU that can be read; they may be on one that cannot, see gpus"
)
NOT_LISTED: Final = (
    "the engine's processes are seen, but what this driver lists on the GPUs cannot be matched with them in a container"
)
NOT_TRACED: Final = (
    "the engine's processes are seen, but not what they have open, which alone tells a container who is on AMD's cards"
)
DOWN: Final = "needs the engine to run, see engine"


def gpu_attribution(sight: Sight, selection: Selection) -> Check:
    """Tell which GPUs are taken for the engine's, how that came, and why it is none."""
    if isinstance(sight.readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    return replace(
        _judged(sight, selection),
        details=tuple(f"{called(gpu.reading)} {HOW[gpu.attribution]}" for gpu in sight.gpus),
        absent=() if any(gpu.attribution for gpu in sight.gpus) else OF_OWNED_GPUS,
    )


def _judged(sight: Sight, selection: Selection) -> Check:
    owned = [gpu for gpu in sight.gpus if gpu.attribution]
    names = {name.casefold() for gpu in sight.gpus for name in (gpu.reading.uuid, str(gpu.reading.index))}
    invisible = [name for name in selection.listed if name.casefold() not in names]
    if invisible:
        text = f"HEADROOM_GPUS names GPUs that are not visible: {', '.join(invisible)}"
        return Check(Status.MISSING, text, fixes=(_named(sight), *SEE_THE_GPUS))
    if others := [gpu for gpu in sight.gpus if gpu.left_out]:
        shown = ", ".join(called(gpu.reading) for gpu in others)
        text = f"HEADROOM_GPUS leaves out GPUs that the engine's processes are on: {shown}"
        return Check(
            Status.MISSING, text, fixes=(setting("# leave HEADROOM_GPUS out: the engine's processes tell its GPUs"),)
        )
    if not owned:
        return _none(sight)
    is_up = not isinstance(sight.page, Failure)
    if owned[0].attribution is Attribution.SINGLE and is_up and _could_be_told(sight):  # and they are not on it
        return Check(Status.UNKNOWN, ALONE, fixes=(_named(sight), *SEE_THE_GPUS))
    return Check(Status.OK, f"{len(owned)} of {len(sight.gpus)} taken for the engine's")


def _could_be_told(sight: Sight) -> bool:
    """Tell whether a process of the engine on a visible GPU would have been found on it."""
    if isinstance(sight.processes, Failure) or not sight.processes.engine:
        return False
    return _pids_are_true(sight) and all(gpu.reading.processes is not None for gpu in sight.gpus)


def _pids_are_true(sight: Sight) -> bool:
    return not isinstance(sight.readings, Failure) and pids_are_true(sight.readings, sight.processes)


def _none(sight: Sight) -> Check:
    """Return why automatic attribution took none of several GPUs."""
    processes, name_them = sight.processes, _named(sight)
    if isinstance(processes, Failure):
        share = SEE_THE_PROCESSES if processes == HIDDEN else ()
        return Check(Status.MISSING, NOT_ATTRIBUTED, fixes=(*share, name_them))
    if processes.ambiguous_roots:
        return Check(Status.MISSING, AMBIGUOUS, fixes=(*SAY_WHICH_PORT, name_them))
    if isinstance(sight.page, Failure):
        return Check(Status.UNKNOWN, DOWN, fixes=(name_them,))
    if not processes.engine:
        share = () if processes.sees_host_pids else SEE_THE_PROCESSES
        return Check(Status.MISSING, NOT_ATTRIBUTED, fixes=(*share, name_them))
    if _could_be_told(sight):
        return Check(Status.MISSING, NOT_ON_ANY, fixes=(*SEE_THE_GPUS, name_them))
    return _unmatched(sight, name_them)


def _unmatched(sight: Sight, name_them: Fix) -> Check:
    """Return why the engine's processes are not found on GPUs though they are seen."""
    if any(gpu.reading.failure for gpu in sight.gpus) and _pids_are_true(sight):
        return Check(Status.MISSING, NOT_ON_THOSE_READ, fixes=(name_them,))
    if any(gpu.reading.vendor is Vendor.AMD and gpu.reading.processes is None for gpu in sight.gpus):
        return Check(Status.MISSING, NOT_TRACED, fixes=(*TRACE_THEM, SEE_HOST_PIDS, name_them))
    return Check(Status.MISSING, NOT_LISTED, fixes=(NEWER_DRIVER, SEE_HOST_PIDS, name_them))


def _named(sight: Sight) -> Fix:
    devices = [gpu.reading for gpu in sight.gpus]
    whole = Counter(device.index for device in devices if not device.uuid.startswith("MIG-"))
    names = [str(device.index) if whole[device.index] == 1 else device.uuid for device in devices]
    return setting(f"HEADROOM_GPUS={','.join(names)}  # leave out those that the engine does not use")
