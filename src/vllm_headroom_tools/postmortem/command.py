"""The command `postmortem`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_headroom.trace.parse import BadInput, read_trace
from vllm_headroom_tools.cli import Command, save
from vllm_headroom_tools.history import Curves
from vllm_headroom_tools.options import FILE, BadOptions, Parser, Value
from vllm_headroom_tools.postmortem import rules
from vllm_headroom_tools.postmortem.facts import Circumstances, find_trace, read_header
from vllm_headroom_tools.postmortem.follow import Follower
from vllm_headroom_tools.postmortem.report import Postmortem, Timeline, build_document, render_text
from vllm_headroom_tools.postmortem.rules import Diagnosis, EndCause, Sureness
from vllm_headroom_tools.progress import track_lines

DESCRIPTION: Final = """\
Shows on one page what happened before the engine exited, why, and how sure that
is: out of GPU memory by a leak, by a burst or by a neighbour; killed by the
kernel; a crash with GPU memory left; a start that never fitted; a hang; an exit
while idle.

FILE is an incident that the daemon saved, or any trace, whose last exit counts;
FOLDER means its newest incident. Without either, it uses HEADROOM_STATE_DIR.
"""

EXAMPLES: Final = """\
The exit status is 0, or 2 if it cannot use its input.

Example:
  vllm-headroom postmortem
  vllm-headroom postmortem incidents/2026-01-31T08-00-00Z.jsonl --html why.html
"""

RULES: Final[tuple[Callable[[Circumstances], Diagnosis | None], ...]] = (
    rules.diagnose_kill,
    rules.diagnose_start,
    rules.diagnose_neighbour,
    rules.diagnose_leak,
    rules.diagnose_burst,
    rules.diagnose_hang,
    rules.diagnose_stop,
    rules.diagnose_idle_end,
    rules.diagnose_crash,
)
"""Of equally sure findings, the first counts."""

UNKNOWN: Final = Diagnosis(
    cause=EndCause.UNKNOWN,
    sureness=Sureness.POSSIBLE,
    sentence="The cause of the exit is not known.",
    evidence=("look in vLLM's log (kubectl logs --previous), and in the kernel's (dmesg -T)",),
)
NOTHING: Final = Diagnosis(
    cause=EndCause.NOTHING, sureness=Sureness.LIKELY, sentence="There is no exit of an engine here, and no stall."
)


def judge(facts: Circumstances | None, *, has_ended: bool = False) -> tuple[Diagnosis, ...]:
    """Return the causes that fit, the surest first, at least one; a sure one excludes those that are only possible.

    `has_ended` is whether the engine exited although no circumstances are known.
    """
    if facts is None:
        return (UNKNOWN if has_ended else NOTHING,)
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    if any(finding.sureness is Sureness.SURE for finding in found):
        found = [finding for finding in found if finding.sureness is not Sureness.POSSIBLE]
    return tuple(sorted(found, key=lambda finding: list(Sureness).index(finding.sureness))) or (UNKNOWN,)


STATE_DIR: Final = "HEADROOM_STATE_DIR"
PLACE: Final = Value(read=FILE.read, accepts="the path of a file or a folder")
NO_PLACE: Final = f"needs a FILE or a FOLDER, or {STATE_DIR} in the environment"


def add_options(parser: Parser) -> None:
    """Add the options to the parser."""
    parser.add_argument("place", metavar="FILE", nargs="?", type=PLACE, help="an incident, a trace, or a folder")
    parser.add_argument("--html", metavar="FILE", type=FILE, help="write the page, with its curves, into one file")


def build_report(file: Path) -> Postmortem:
    """Read the post-mortem of a trace; raises BadInput."""
    header = read_header(file)
    follower, timeline, curves = Follower(header), Timeline(), Curves()
    for snapshot in read_trace(str(file), track_lines):
        timeline.step(follower.step(snapshot), follower.watch)
        curves.step(snapshot)
    if not (header or follower.watch.samples):
        raise BadInput(f"{file}: has no samples")
    return Postmortem(
        file=str(file),
        findings=judge(follower.facts, has_ended=bool(header) or follower.silent),
        facts=follower.facts,
        header=header,
        timeline=timeline.list_entries(header),
        curves=curves,
    )


def _run(given: Namespace) -> Postmortem:
    place = given.place or os.environ.get(STATE_DIR)
    if not place:
        raise BadOptions(NO_PLACE)
    report = build_report(find_trace(Path(place)))
    if given.html is not None:
        from vllm_headroom_tools.postmortem.report import build_page  # noqa: PLC0415 - only here is a page's style needed

        save(given.html, build_page(report), "--html ")
    return report


COMMAND: Final[Command[Postmortem]] = Command(
    usage="%(prog)s [OPTION]... [FILE or FOLDER]",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=add_options,
    run=_run,
    text=render_text,
    document=build_document,
    status=lambda _: 0,
)
