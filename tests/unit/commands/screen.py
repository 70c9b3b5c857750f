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
PLAIN: Final = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "TERM", "COLUMNS"}}


def on_a_terminal(
    words: Sequence[str],
    *,
    columns: int = 80,
    ended: tuple[str, signal.Signals] | None = None,
    environment: Mapping[str, str] = {},
) -> tuple[str, int]:
    """Return what a command writes to a terminal, and its status; when it wrote `ended` it gets a signal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, env={**PLAIN, "TERM": "xterm", **environment})
    os.close(theirs)
    shown = bytearray()
    try:
        while part := os.read(ours, 65536):
            shown.extend(part)
            if ended and ended[0].encode() in shown:
                process.send_signal(ended[1])
    except OSError:  # what Linux says of a terminal whose other side has closed
        os.close(ours)
    return shown.decode(), process.wait(30)


def plain(shown: str) -> str:
    """Return what was written without its colours and what else moves a terminal."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
