"""The command `advise`: where the facts come from."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Coroutine
from typing import Any, Final

from vllm_headroom.commands.advise.document import document
from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.history.history import History
from vllm_headroom.commands.advise.options import DESCRIPTION, EXAMPLES, options, settings_of
from vllm_headroom.commands.advise.settings import Settings
from vllm_headroom.commands.advise.text import text
from vllm_headroom.commands.advise.verdict import Answer, judge
from vllm_headroom.commands.cli import Command
from vllm_headroom.config.options import BadOptions
from vllm_headroom.trace.read import recorded

ONE_SOURCE: Final = "needs a TRACE or --headroom-url, and not both"


def _run(given: Namespace) -> Answer | Coroutine[Any, Any, Answer]:
    if sum(source is not None for source in (given.trace, given.trace_option, given.headroom_url)) != 1:
        raise BadOptions(ONE_SOURCE)
    if given.engine_url is None and given.headroom_url is None:
        return judge(_recorded(given, settings_of(given)))
    return _asked(given)


async def _asked(given: Namespace) -> Answer:
    from vllm_headroom.commands.advise.history.sources import (  # noqa: PLC0415 - a trace alone needs no HTTP client
        sidecar_facts,
        with_engine,
    )

    settings = settings_of(given)
    if given.engine_url is not None:
        settings = await with_engine(settings, given.engine_url)
    if given.headroom_url is not None:
        return judge(await sidecar_facts(given.headroom_url, settings))
    return judge(_recorded(given, settings))


def _recorded(given: Namespace, settings: Settings) -> Facts:
    history = History()
    for snapshot in recorded(given.trace or given.trace_option):
        history.step(snapshot)
    return history.facts(settings)


COMMAND: Final[Command[Answer]] = Command(
    usage="%(prog)s [OPTION]... TRACE\n       %(prog)s [OPTION]... --headroom-url URL",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=text,
    document=document,
    status=lambda answer: answer.verdict.status,
)
