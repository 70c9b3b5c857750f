"""The command `doctor`, which runs all checks at once."""

import asyncio
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon import logs
from vllm_headroom.daemon.app import read_version
from vllm_headroom.daemon.engine_log import EngineLogFollower, build_log_source
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.probe import ProbeReader
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.doctor import engine, gpus, node, port
from vllm_headroom_tools.doctor.engine_log import check_log
from vllm_headroom_tools.doctor.fixes import Check, Fix, Status, survey_engine
from vllm_headroom_tools.look import PROC, SYS
from vllm_headroom_tools.settings import ModelSettings
from vllm_headroom_tools.terminal import wrap_text

MARKS: Final = {
    Status.OK: "ok",
    Status.MISSING: "MISSING",
    Status.UNKNOWN: "unknown",
    Status.NOT_APPLICABLE: "-",
}
VERDICTS: Final = {Status.MISSING: Conclusion.NOT_GOOD, Status.UNKNOWN: Conclusion.CANNOT_TELL}
INDENT: Final = " " * 9
"""The indent has the width of the mark. Lines below a check are then aligned with its name."""

LOG_SECONDS: Final = 4.0
"""The time limit for reading the engine's log; the Kubernetes API server may take seconds."""

PROBE_SECONDS: Final = 2.0
"""The time limit for reading the probe's files."""


def find_place(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """Return the words that name this process's environment in the `where` of a fix.

    The environment is a pod, a container or a machine.
    """
    if "KUBERNETES_SERVICE_HOST" in environ:
        return ("pod",)
    is_container = any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
    return ("compose",) if is_container else ("machine", "systemd")


def build_report(checks: Mapping[str, Check], version: str, place: tuple[str, ...] = ()) -> Report:
    """Return the report on the checks, which are keyed by name.

    `place` contains words for the environment of this process. A fix comes first if its `where`
    contains one of these words. The exit status is 1 if anything is missing or unknown.
    """

    def is_elsewhere(fix: Fix) -> bool:
        return not any(word in fix.where for word in place)

    # False sorts before True, so the fixes for this place come first.
    sorted_checks = {
        name: replace(check, fixes=tuple(sorted(check.fixes, key=is_elsewhere)))
        for name, check in checks.items()
    }
    # MISSING comes first, because something UNKNOWN may be fine.
    findings = [_build_finding(name, check) for name, check in sorted_checks.items()]
    states = [check.state for check in sorted_checks.values()]
    missing_count = states.count(Status.MISSING)
    unknown_count = states.count(Status.UNKNOWN)
    is_complete = not missing_count and not unknown_count
    headline = "Nothing is missing."
    if not is_complete:
        headline = f"{missing_count} missing and {unknown_count} unknown, of {len(states)}."
    return Report(
        verdict=find_worst(finding.verdict for finding in findings),
        headline=headline,
        findings=findings,
        data={
            "ok": is_complete,
            "version": version,
            "checks": [_describe_check(name, check) for name, check in sorted_checks.items()],
        },
        lines=_render_text(sorted_checks, headline, is_elsewhere),
        exit_status=0 if is_complete else 1,
    )


def _build_finding(name: str, check: Check) -> Finding:
    """Return a check as a finding that contains every line of the check's fixes."""
    lines: list[str] = []
    for fix in check.fixes:
        lines += [f"{fix.where}: {line}" for line in fix.lines]
    return Finding(name, VERDICTS.get(check.state, Conclusion.GOOD), check.text, tuple(lines))


def _describe_check(name: str, check: Check) -> dict[str, Any]:
    """Return a check for the JSON document.

    `ok` is None if the check's result is unknown or does not apply.
    """
    # A check's text is in the field for its state. The fields for the other two states are null.
    texts: dict[str, str | None] = {"found": None, "missing": None, "reason": None}
    is_ok = None
    if check.state is Status.OK:
        is_ok = True
        texts["found"] = check.text
    elif check.state is Status.MISSING:
        is_ok = False
        texts["missing"] = check.text
    else:
        texts["reason"] = check.text
    return {
        "name": name,
        "state": check.state,
        "ok": is_ok,
        **texts,
        "details": list(check.details),
        "absent": list(check.absent),
        "fix": [{"where": fix.where, "lines": list(fix.lines)} for fix in check.fixes],
    }


def _render_text(
    checks: Mapping[str, Check], headline: str, is_elsewhere: Callable[[Fix], bool]
) -> Iterator[str]:
    """Yield the report's lines, with an empty line after each check that has fixes."""
    is_last_spaced = False
    for name, check in checks.items():
        yield from wrap_text(f"{MARKS[check.state]:<8} {name:<16} ", check.text)
        for detail in check.details:
            yield from wrap_text(f"{INDENT}  ", detail)
        if check.absent:
            yield from wrap_text(f"{INDENT}absent   ", ", ".join(check.absent))
        # The first fix is for this environment. The other fixes are alternatives for other
        # environments.
        for index, fix in enumerate(check.fixes):
            word = "fix" if is_elsewhere(fix) else "fix here"
            if index > 0:
                word = "or"
            yield from wrap_text(f"{INDENT}{word:<8} ", f"{fix.where}:")
            yield from (f"{INDENT}{'':<8}   {line}" for line in fix.lines)
        is_last_spaced = bool(check.absent or check.fixes)
        if is_last_spaced:
            yield ""
    if not is_last_spaced:
        yield ""
    yield headline


async def _run(arguments: Namespace) -> Report:
    settings = arguments.settings
    # At a lower level, the readers would also log the problems that the checks report.
    logs.configure(settings.log_format, "error")
    checks = await examine(settings)
    return build_report(checks, read_version(), find_place(os.environ))


async def examine(settings: ModelSettings, proc: Path = PROC, sys: Path = SYS) -> dict[str, Check]:
    """Return the result of each check by name; the sources are read concurrently.

    The names are stable, because scripts rely on them.
    """
    # With several engines, most of the checks below have no single result.
    if settings.engines is not None:
        return await node.examine_node(settings, proc, sys)
    probe = None
    if settings.probe_dir:
        probe = ProbeReader(settings.probe_dir, parse=parse_probe)
    engine_log = None
    if settings.engine_log is not None:
        source = build_log_source(settings.engine_log, settings.engine_container)
        engine_log = EngineLogFollower(source, SystemClock())
    # The checks run concurrently, because each may wait until its timeout.
    survey, listening, state, trace, files, log_reading = await asyncio.gather(
        survey_engine(settings, proc, sys),
        port.check_listen_port(
            settings.listen_host, settings.listen_port, settings.web_config_file
        ),
        port.check_state_dir(settings.state_dir),
        port.check_trace_file(settings.trace_file),
        probe.read(PROBE_SECONDS) if probe else asyncio.sleep(0, None),
        engine_log.read(LOG_SECONDS) if engine_log else asyncio.sleep(0, None),
    )
    return {
        "engine": engine.check_engine(survey),
        "engine_inputs": engine.check_engine_inputs(survey),
        "reported_memory": engine.check_reported_memory(survey, settings.reported_bytes),
        "kv_bytes": engine.check_kv_bytes(
            survey, settings.kv_bytes_per_token, settings.model_reader.configured
        ),
        "vllm_options": engine.check_options(survey),
        "vllm_faults": engine.check_faults(survey),
        "nvml": gpus.check_nvml(survey),
        "gpus": gpus.check_gpus(survey),
        "gpu_attribution": gpus.check_gpu_attribution(survey, Selection.of(settings.gpus)),
        "processes": gpus.check_processes(survey),
        "process_memory": gpus.check_process_memory(survey),
        "probe": engine.check_probe(files, survey),
        "engine_log": check_log(log_reading),
        "listen_port": listening,
        "state_dir": state,
        "trace_file": trace,
    }


COMMAND: Final[Command] = Command(
    usage="%(prog)s [--json] [OPTION VALUE]...",
    description="""\
Says what the daemon can see from here with these settings, what is missing, and
the line that fixes it. It reads as the daemon does, leaves nothing behind, and
is done within ten seconds. Run it where the daemon runs:
  kubectl exec POD -c headroom -- vllm-headroom doctor
""",
    epilog="""\
It ends with status 0 when nothing is missing, 1 when something is missing or
is not known, and 2 when it cannot use its settings. What is marked - was not
asked for, or does not apply.
""",
    options=lambda parser: parser.add_settings(ModelSettings),
    run=_run,
)
