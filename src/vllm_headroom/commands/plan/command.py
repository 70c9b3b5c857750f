"""The command `plan`: what it prints, and its exit status."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Final

from vllm_headroom.commands.cli import BAD_INPUT, say
from vllm_headroom.commands.plan.document import document
from vllm_headroom.commands.plan.estimate import estimate, fits
from vllm_headroom.commands.plan.options import parser
from vllm_headroom.commands.plan.request import question
from vllm_headroom.commands.plan.text import text
from vllm_headroom.vocabulary import CONTROLS

FITS: Final = 0
DOES_NOT_FIT: Final = 1
CANNOT_TELL: Final = 2


def start(words: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    given = parser().parse_args(words)
    asked = question(given)
    found = asked if isinstance(asked, str) else estimate(asked) or "the KV cache's dtype is not known here"
    if isinstance(found, str):
        sys.stderr.write(f"vllm-headroom plan: {found.translate(CONTROLS)}\n")
        return BAD_INPUT
    say(json.dumps(document(found), allow_nan=False) if given.json else text(found))
    answer = fits(found)
    return CANNOT_TELL if answer is None else FITS if answer else DOES_NOT_FIT
