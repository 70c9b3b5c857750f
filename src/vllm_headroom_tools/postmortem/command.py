"""The command `postmortem`: its options, and which cause it was."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_headroom.config.kinds import FILE, Value
from vllm_headroom.config.options import BadOptions, Parser
from vllm_headroom.trace.parse import BadInput, recorded
from vllm_headroom_tools.cli import Command, save
from vllm_headroom_tools.history.curves import Curves
from vllm_headroom_tools.postmortem.facts import Circumstances, header_of, trace_of
from vllm_headroom_tools.postmortem.follow import Follower
from vllm_headroom_tools.postmortem.report import Postmortem, Timeline, document, text
from vllm_headroom_tools.postmortem.rules import (
    Diagnosis,
    EndCause,
    Sureness,
    burst,
    crash,
    hang,
    idle,
    killed,
    leak,
    neighbour,
    never_fitted,
    stopped,
)
from vllm_headroom_tools.progress import reading

DESCRIPTION: Final = """\
Says in one page what happened before the engine ended, and why: out of GPU
memory by a leak, by a burst or by a neighbour; killed by the kernel; a crash
with memory at ease; a start that never fitted; a hang; an end while idle. And
how sure that is.

FILE is an incident that the daemon set aside, or any trace, whose last end
counts; of a FOLDER it is the newest incident. Without either it is that of
HEADROOM_STATE_DIR.
"""

EXAMPLES: Final = """\
It ends with status 0, and with 2 where it cannot use its input.

Example:
  vllm-headroom postmortem
  vllm-headroom postmortem incidents/2026-01-31T08-00-00Z.jsonl --html why.html
"""

RULES: Final[tuple[Callable[[Circumstances], Diagnosis | None], ...]] = (
    killed,
    never_fitted,
    neighbour,
    leak,
    burst,
    hang,
    stopped,
    idle,
    crash,
)
"""Of findings that are as sure as each other, the first counts."""

UNKNOWN: Final = Diagnosis(
    cause=EndCause.UNKNOWN,
    sureness=Sureness.POSSIBLE,
    sentence="What ended the engine cannot be told from this.",
    evidence=("vLLM's own log has the last word (kubectl logs --previous), and the kernel's (dmesg -T)",),
)
NOTHING: Final = Diagnosis(
    cause=EndCause.NOTHING, sureness=Sureness.LIKELY, sentence="No end of an engine is seen here, and no stall."
)


def judge(facts: Circumstances | None, *, told: bool = False) -> tuple[Diagnosis, ...]:
    """Return what fits, the surest first; there is always one. `told` is whether there was an end all the same.

    Beside one that is sure none is possible.
    """
    if facts is None:
        return (UNKNOWN if told else NOTHING,)
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    if any(finding.sureness is Sureness.SURE for finding in found):
        found = [finding for finding in found if finding.sureness is not Sureness.POSSIBLE]
    return tuple(sorted(found, key=lambda finding: list(Sureness).index(finding.sureness))) or (UNKNOWN,)


STATE_DIR: Final = "HEADROOM_STATE_DIR"
PLACE: Final = Value(read=FILE.read, accepts="the path of a file or a folder")
NO_PLACE: Final = f"needs a FILE or a FOLDER, or {STATE_DIR} in the environment"


def options(parser: Parser) -> None:
    """Add the options to the parser."""
    parser.add_argument("place", metavar="FILE", nargs="?", type=PLACE, help="an incident, a trace, or a folder")
    parser.add_argument("--html", metavar="FILE", type=FILE, help="write the page, with its curves, into one file")


def report_of(file: Path) -> Postmortem:
    """Return the post-mortem of a trace; raises BadInput."""
    known = header_of(file)
    follower, timeline, curves = Follower(known), Timeline(), Curves()
    for snapshot in recorded(str(file), reading):
        timeline.step(follower.step(snapshot), follower.watch)
        curves.step(snapshot)
    if not (known or follower.watch.samples):
        raise BadInput(f"{file}: has no samples")
    return Postmortem(
        file=str(file),
        findings=judge(follower.facts, told=bool(known) or follower.silent),
        facts=follower.facts,
        known=known,
        timeline=timeline.moments(known),
        curves=curves,
    )


def _run(given: Namespace) -> Postmortem:
    place = given.place or os.environ.get(STATE_DIR)
    if not place:
        raise BadOptions(NO_PLACE)
    report = report_of(trace_of(Path(place)))
    if given.html is not None:
        from vllm_headroom_tools.postmortem.report import page  # noqa: PLC0415 - only here is a page's style needed

        save(given.html, page(report), "--html ")
    return report


COMMAND: Final[Command[Postmortem]] = Command(
    usage="%(prog)s [OPTION]... [FILE or FOLDER]",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=text,
    document=document,
    status=lambda _: 0,
)
