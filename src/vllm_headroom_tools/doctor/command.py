"""The command `doctor`: looks at everything at once."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.config.settings import Settings
from vllm_headroom.daemon import logs
from vllm_headroom.daemon.app import version
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.doctor.engine import engine, engine_inputs, kv_bytes, probe, probe_files, reported_memory
from vllm_headroom_tools.doctor.fixes import Check, Status, look
from vllm_headroom_tools.doctor.gpus import gpu_attribution, gpus, nvml, process_memory, processes
from vllm_headroom_tools.doctor.port import listen_port, state_dir, trace_file
from vllm_headroom_tools.look import PROC, SYS
from vllm_headroom_tools.terminal import wrapped

Found = Mapping[str, Any]
"""A part of what --json prints."""

MARKS: Final = {Status.OK: "ok", Status.MISSING: "MISSING", Status.UNKNOWN: "unknown", Status.NOT_APPLICABLE: "-"}
INDENT: Final = " " * 9
"""The width of the marks: what follows stands below the name."""


def document(checks: Mapping[str, Check], version: str) -> dict[str, Any]:
    """Return what --json prints of the checks by name; `ok` is null where it is not known or does not apply."""
    listed = [_check(name, check) for name, check in checks.items()]
    is_all = all(check["state"] in {Status.OK, Status.NOT_APPLICABLE} for check in listed)
    return {"ok": is_all, "version": version, "checks": listed}


def _check(name: str, check: Check) -> dict[str, Any]:
    state = check.state
    return {
        "name": name,
        "state": state,
        "ok": {Status.OK: True, Status.MISSING: False}.get(state),
        "found": check.text if state is Status.OK else None,
        "missing": check.text if state is Status.MISSING else None,
        "reason": check.text if state in {Status.UNKNOWN, Status.NOT_APPLICABLE} else None,
        "details": list(check.details),
        "absent": list(check.absent),
        "fix": [{"where": fix.where, "lines": list(fix.lines)} for fix in check.fixes],
    }


def text(found: Found) -> list[str]:
    """Return a line for each check with its mark, what else there is to say below it, and the sum."""
    lines = [line for check in found["checks"] for line in _lines(check)]
    return [*lines, *(("",) if lines[-1] else ()), _sum(found)]


def _lines(check: Found) -> Iterator[str]:
    told = check["found"] or check["missing"] or check["reason"]
    yield from wrapped(f"{MARKS[check['state']]:<8} {check['name']:<16} ", told)
    for detail in check["details"]:
        yield from wrapped(f"{INDENT}  ", detail)
    if check["absent"]:
        yield from wrapped(f"{INDENT}absent   ", ", ".join(check["absent"]))
    for index, fix in enumerate(check["fix"]):
        yield from wrapped(f"{INDENT}{'or' if index else 'fix':<8} ", f"{fix['where']}:")
        yield from (f"{INDENT}{'':<8}   {line}" for line in fix["lines"])
    if check["absent"] or check["fix"]:
        yield ""


def _sum(found: Found) -> str:
    if found["ok"]:
        return "Nothing is missing."
    states = [check["state"] for check in found["checks"]]
    return f"{states.count(Status.MISSING)} missing and {states.count(Status.UNKNOWN)} unknown, of {len(states)}."


DESCRIPTION: Final = """\
Says what the daemon can see from here with these settings, what is missing, and
the line that fixes it. It reads as the daemon does, leaves nothing behind, and
is done within ten seconds. Run it where the daemon runs:
  kubectl exec POD -c headroom -- vllm-headroom doctor
"""

EPILOG: Final = """\
It ends with status 0 when nothing is missing, 1 when something is missing or
cannot be told, and 2 when it cannot use its settings. What is marked - was not
asked for, or does not apply.
"""


async def _run(given: Namespace) -> dict[str, Any]:
    logs.configure(given.settings.log_format, "error")  # the readers log what is told here in full
    return document(await examine(given.settings.values()), version())


async def examine(settings: PlainSettings, proc: Path = PROC, sys: Path = SYS) -> dict[str, Check]:
    """Look at everything at the same time; the names are for scripts, which know them."""
    sight, port, state, trace, files = await asyncio.gather(
        look(settings, proc, sys),
        listen_port(settings.listen_host, settings.listen_port, settings.web_config_file),
        state_dir(settings.state_dir),
        trace_file(settings.trace_file),
        probe_files(settings.probe_dir),
    )
    return {
        "engine": engine(sight),
        "engine_inputs": engine_inputs(sight),
        "reported_memory": reported_memory(sight, settings.reported_bytes),
        "kv_bytes": kv_bytes(sight, settings.kv_bytes_per_token, settings.model_shape),
        "nvml": nvml(sight),
        "gpus": gpus(sight),
        "gpu_attribution": gpu_attribution(sight, settings.selection),
        "processes": processes(sight),
        "process_memory": process_memory(sight),
        "probe": probe(files, sight),
        "listen_port": port,
        "state_dir": state,
        "trace_file": trace,
    }


COMMAND: Final[Command[dict[str, Any]]] = Command(
    usage="%(prog)s [--json] [OPTION VALUE]...",
    description=DESCRIPTION,
    epilog=EPILOG,
    options=lambda parser: parser.add_settings(Settings),
    run=_run,
    text=text,
    document=lambda found: found,
    status=lambda found: 0 if found["ok"] else 1,
)
