"""The command `load`: its words, its answer and its exit status."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence

import uvloop

from vllm_headroom.commands.cli import BAD_INPUT, say
from vllm_headroom.commands.load.compose import load
from vllm_headroom.commands.load.document import document
from vllm_headroom.commands.load.options import order, parser
from vllm_headroom.commands.load.text import text
from vllm_headroom.daemon import logs
from vllm_headroom.trace.errors import BadInput


def start(words: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logs.configure("logfmt", "error")  # the readers log what is told here in full
    given = parser().parse_args(words)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(load(order(given)))
    except BadInput as error:
        sys.stderr.write(f"vllm-headroom load: {error}\n")
        return BAD_INPUT
    found = document(report)
    say(json.dumps(found, indent=2, allow_nan=False) if given.json else text(found))
    return report.status
