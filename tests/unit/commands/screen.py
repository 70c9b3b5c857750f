"""A real terminal of a width, on which a command is run."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from typing import Final

HEADROOM: Final = (sys.executable, "-m", "vllm_headroom")
CHANGING: Final = {"NO_COLOR", "TERM", "COLUMNS", "PYTHONUNBUFFERED"}
"""Say how it is drawn; unbuffered, Python loses what a terminal does not take before a signal comes."""

PLAIN: Final = {name: value for name, value in os.environ.items() if name not in CHANGING}


def on_a_terminal(
    words: Sequence[str],
    *,
    columns: int = 80,
    signal_after: tuple[str, signal.Signals] | None = None,
    environment: Mapping[str, str] = {},
) -> tuple[str, int]:
    """Return what a command writes to a terminal, `ended` by a signal once these words came, and its status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, env={**PLAIN, "TERM": "xterm", **environment})
    os.close(theirs)
    shown = bytearray()
    try:
        while part := os.read(ours, 65536):
            shown.extend(part)
            if signal_after and signal_after[0].encode() in shown:
                process.send_signal(signal_after[1])
                signal_after = None
    except OSError:  # what Linux reports about a terminal whose other side has closed
        os.close(ours)
    return shown.decode(), process.wait(30)


def plain(shown: str) -> str:
    """Return what was written without its colours and what else moves a terminal."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
