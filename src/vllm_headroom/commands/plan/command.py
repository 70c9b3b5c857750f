"""The command `plan`."""

from __future__ import annotations

from argparse import Namespace
from typing import Final

from vllm_headroom.commands.cli import Command
from vllm_headroom.commands.plan.document import document
from vllm_headroom.commands.plan.estimate import Estimate, estimate, fits
from vllm_headroom.commands.plan.options import DESCRIPTION, EXAMPLES, options
from vllm_headroom.commands.plan.request import question
from vllm_headroom.commands.plan.text import text
from vllm_headroom.trace.errors import BadInput

STATUS: Final = {True: 0, False: 1, None: 2}


def _run(given: Namespace) -> Estimate:
    found = estimate(question(given))
    if found is None:
        raise BadInput("the KV cache's dtype is not known here")
    return found


COMMAND: Final[Command[Estimate]] = Command(
    usage="%(prog)s --model-config PATH --gpu-memory SIZE [OPTION]...",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=text,
    document=document,
    status=lambda found: STATUS[fits(found)],
)
