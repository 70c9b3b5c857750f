"""Is the probe in vLLM's processes, and does it answer?"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Final

from vllm_headroom.commands.doctor.fixes import COMPOSE, POD, Check, Fix, Status
from vllm_headroom.commands.doctor.look import Sight
from vllm_headroom.derive.inside.present import told
from vllm_headroom.model import Failure, ProbedProcess, ProbeReadings
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.probe import Probe

READ_SECONDS: Final = 2.0
FROM_PROBE: Final = ("headroom_engine_memory_bytes", "headroom_allocator_*", "headroom_leak_location")
OFF: Final = "HEADROOM_PROBE_DIR is not set: what only vLLM's processes know is not read"
NO_GPU: Final = "torch's allocator is not told: vLLM has no GPU, has not begun to use it, or may sleep"

FIXES: Final = (
    Fix(
        where=f"{POD}, after the container that runs vllm-headroom probe install (the component probe has it all)",
        lines=(
            "containers:",
            "- name: vllm",
            "  env:",
            "  - {name: PYTHONPATH, value: /opt/headroom-probe}",
            "  - {name: HEADROOM_PROBE_DIR, value: /run/headroom-probe}",
            "  volumeMounts:",
            "  - {name: headroom-probe, mountPath: /opt/headroom-probe, readOnly: true}",
            "  - {name: headroom-probe-files, mountPath: /run/headroom-probe}",
        ),
    ),
    Fix(
        where=f"in vLLM's compose service (deploy/compose), and the folder {COMPOSE} too",
        lines=("environment: {PYTHONPATH: /opt/headroom-probe, HEADROOM_PROBE_DIR: /run/headroom-probe}",),
    ),
    Fix(where="where vLLM's environment has VLLM_PLUGINS", lines=("VLLM_PLUGINS=...,headroom_probe",)),
)
RESTART: Final = (Fix(where="by a restart of vLLM, once what its log says is mended", lines=("headroom probe: ...",)),)


async def probe_files(folder: Path | None) -> tuple[ProbedProcess, ...] | Failure | None:
    """Return what the probe has written, as the daemon reads it; None where it is not set."""
    return None if folder is None else await Probe(folder, parse=parse_probe).read(READ_SECONDS)


def probe(files: tuple[ProbedProcess, ...] | Failure | None, sight: Sight) -> Check:
    """Tell whether the probe is there, loaded by the vLLM that runs, and writes."""
    processes = () if isinstance(sight.processes, Failure) else sight.processes.engine
    found = told(files, processes, time.time())
    if found is None:
        return Check(Status.NOT_APPLICABLE, OFF)
    if isinstance(found, Failure):
        return _missing(found.message, (), *FIXES)
    stopped = tuple(f"{_called(each)} has stopped: {each.stopped}" for each in _of_now(found) if each.stopped)
    if not found.present:
        return _missing(_why_none(found), stopped, *(RESTART if found.silent or stopped else FIXES))
    details = (*stopped, *(f"{_called(each)} writes no longer" for each in found.silent))
    if details:
        return _missing(f"{_counted(found.present)}, but not all", details, *RESTART)
    telling = any(process.devices for process in found.present)
    return Check(Status.OK, _counted(found.present), details=() if telling else (NO_GPU,))


def _missing(text: str, details: tuple[str, ...], *fixes: Fix) -> Check:
    return Check(Status.MISSING, text, details=details, absent=FROM_PROBE, fixes=fixes)


def _of_now(found: ProbeReadings) -> tuple[ProbedProcess, ...]:
    """Return those that may be of the engine that runs: not older than what writes now."""
    began = min((each.started_at_seconds for each in found.present), default=0.0)
    return tuple(each for each in found.others if each.started_at_seconds >= began)


def _why_none(found: ProbeReadings) -> str:
    if found.silent:
        return "vLLM's processes have loaded it, and none writes any more: they are stopped or stuck"
    return "none of vLLM's processes writes now: it is down, still starting, or was started without the probe"


def _counted(present: tuple[ProbedProcess, ...]) -> str:
    roles = Counter(str(each.role) for each in present)
    versions = sorted({each.vllm_version for each in present if each.vllm_version})
    counted = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    return f"it answers in {counted}" + (f" of vLLM {', '.join(versions)}" if versions else "")


def _called(process: ProbedProcess) -> str:
    return f"{process.role} (pid {process.pid} of its container)"
