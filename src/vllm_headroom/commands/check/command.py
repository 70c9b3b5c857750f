"""The command `check`: its exit status and what it writes where."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_headroom.commands.check.excess import Report
from vllm_headroom.commands.check.github import commands
from vllm_headroom.commands.check.judge import judge
from vllm_headroom.commands.check.judgement import STATUS, Judgement, overall
from vllm_headroom.commands.check.junit import broken, report
from vllm_headroom.commands.check.limits import Limits
from vllm_headroom.commands.check.options import limits_of, parsed
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.check.text import document, table
from vllm_headroom.commands.cli import BAD_INPUT, say
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.read import recorded


def start(words: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    given = parsed(words)
    try:
        return _check(given)
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT


def _check(given: argparse.Namespace) -> int:
    limits = limits_of(given)
    try:
        traces = [
            (name, _read(option, name, given, limits))
            for option, name in (("--trace", given.trace), ("--baseline", given.baseline))
            if name is not None
        ]
    except BadInput as error:
        _save(given.junit, broken(str(error)))
        raise
    records = [record for _, record in traces]
    judgements = tuple(judge(limits, records[0], records[1] if records[1:] else None))
    _save(given.junit, report(judgements))
    say(_shown(given, traces, judgements))
    return STATUS[overall(judgements)]


def _read(option: str, name: str, given: argparse.Namespace, limits: Limits) -> Record:
    """Return the trace that an option names; raises BadInput, which names the option."""
    expected = Report(reported_bytes=given.reported_bytes, utilization_ratio=given.gpu_memory_utilization)
    record = Record(expected, keeps_gpus=limits.leak_bytes is not None, keeps_host=limits.host_leak_bytes is not None)
    try:
        for snapshot in recorded(name):
            record.step(snapshot)
    except BadInput as error:
        raise BadInput(f"{option}: {error}") from error
    return record


def _shown(given: argparse.Namespace, traces: Sequence[tuple[str, Record]], judgements: Sequence[Judgement]) -> str:
    if given.json:
        return json.dumps(document(traces, judgements), indent=2, allow_nan=False)
    shown = table(traces, judgements)
    return "\n".join((shown, *commands(judgements))) if given.format == "github" else shown


def _save(file: Path | None, text: bytes) -> None:
    if file is None:
        return
    try:
        file.write_bytes(text)
    except OSError as error:
        raise BadInput(f"{file}: cannot be written: {error.strerror}") from error
