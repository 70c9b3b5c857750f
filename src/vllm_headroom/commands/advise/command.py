"""The command `advise`: where the facts come from, and its exit status."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from typing import Final

from vllm_headroom.commands.advise.document import document
from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.history.history import History
from vllm_headroom.commands.advise.options import parser_of_options, settings_of
from vllm_headroom.commands.advise.settings import Settings
from vllm_headroom.commands.advise.text import text
from vllm_headroom.commands.advise.verdict import Verdict, judge
from vllm_headroom.commands.cli import BAD_INPUT, say
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.read import recorded

STATUS: Final = {Verdict.NOTHING_TO_CHANGE: 0, Verdict.ADVICE: 1, Verdict.CANNOT_TELL: BAD_INPUT}


def start(words: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = parser_of_options()
    given = parser.parse_args(words)
    if sum(source is not None for source in (given.trace, given.trace_option, given.url)) != 1:
        parser.error("needs a TRACE or --url, and not both")
    try:
        answer = judge(_facts(given))
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    say(json.dumps(document(answer), indent=2, allow_nan=False) if given.json else text(answer))
    return STATUS[answer.verdict]


def _facts(given: argparse.Namespace) -> Facts:
    settings = settings_of(given)
    if given.engine_url is not None:
        from vllm_headroom.commands.advise.history.sources import with_engine  # noqa: PLC0415 - a trace alone needs no HTTP client

        settings = with_engine(settings, given.engine_url)
    if given.url is not None:
        return _of_sidecar(given.url, settings)
    history = History()
    for snapshot in recorded(given.trace if given.trace_option is None else given.trace_option):
        history.step(snapshot)
    return history.facts(settings)


def _of_sidecar(url: str, settings: Settings) -> Facts:
    from vllm_headroom.commands.advise.history.page import facts_of  # noqa: PLC0415 - a trace needs no parser of pages
    from vllm_headroom.commands.advise.history.sources import sidecar_page  # noqa: PLC0415 - the same

    facts = facts_of(sidecar_page(url), settings)
    if isinstance(facts, str):
        raise BadInput(facts)
    return facts
