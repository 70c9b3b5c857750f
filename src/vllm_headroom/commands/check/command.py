"""The command `check`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_headroom.commands.check.excess import Report
from vllm_headroom.commands.check.judge import judge
from vllm_headroom.commands.check.judgement import Judgement, overall
from vllm_headroom.commands.check.options import DESCRIPTION, EXAMPLES, limits_of, options
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.check.reports import broken, commands, report
from vllm_headroom.commands.check.text import document, table
from vllm_headroom.commands.cli import Command
from vllm_headroom.commands.progress import reading
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.read import recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The traces with their names, the first of which was judged, and how; `for_github` as it was asked for."""

    traces: Sequence[tuple[str, Record]]
    judgements: tuple[Judgement, ...]
    for_github: bool


def _run(given: Namespace) -> Checked:
    limits = limits_of(given)
    try:
        traces = [
            (name, _read(option, name, given))
            for option, name in (("--trace", given.trace), ("--baseline", given.baseline))
            if name is not None
        ]
    except BadInput as error:
        _save(given.junit, broken(str(error)))
        raise
    records = [record for _, record in traces]
    judgements = tuple(judge(limits, records[0], records[1] if records[1:] else None))
    _save(given.junit, report(judgements))
    return Checked(traces=traces, judgements=judgements, for_github=given.format == "github")


def _read(option: str, name: str, given: Namespace) -> Record:
    """Return the trace that an option names; raises BadInput, which names the option."""
    expected = Report(reported_bytes=given.reported_bytes, utilization_ratio=given.gpu_memory_utilization)
    record = Record(
        expected,
        keeps_gpus=given.max_leak_per_thousand_requests is not None,
        keeps_host=given.max_host_leak_per_thousand_requests is not None,
    )
    try:
        for snapshot in recorded(name, reading):
            record.step(snapshot)
    except BadInput as error:
        raise BadInput(f"{option}: {error}") from error
    return record


def _text(checked: Checked) -> Iterator[str]:
    yield from table(checked.traces, checked.judgements)
    if checked.for_github:
        yield from commands(checked.judgements)


def _save(file: Path | None, text: bytes) -> None:
    if file is None:
        return
    try:
        file.write_bytes(text)
    except OSError as error:
        raise BadInput(f"{file}: cannot be written: {error.strerror}") from error


COMMAND: Final[Command[Checked]] = Command(
    usage="%(prog)s --trace FILE [--baseline FILE] [LIMIT]... [OPTION]...",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=_text,
    document=lambda checked: document(checked.traces, checked.judgements),
    status=lambda checked: overall(checked.judgements).status,
)
