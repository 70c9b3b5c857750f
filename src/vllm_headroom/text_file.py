"""Bounded reading of a file that people write, or of a pipe in its place."""

import errno
import os
import select
import time
from pathlib import Path
from typing import Final

WAIT_SECONDS: Final = 5.0
"""Time for the writer of a pipe, such as a shell's `<(command)`; without one, reading would block for ever."""


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return at most `most_bytes` of the file; raises OSError, also if a pipe stays empty."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    ends, waiting, content = time.monotonic() + WAIT_SECONDS, select.poll(), bytearray()
    waiting.register(descriptor, select.POLLIN)
    try:
        while len(content) < most_bytes:
            if not waiting.poll(max(0.0, 1000 * (ends - time.monotonic()))):
                raise OSError(
                    errno.ETIMEDOUT, f"a pipe into which nobody writes for {WAIT_SECONDS:g} s"
                )
            part = os.read(descriptor, min(most_bytes - len(content), 2**20))
            if not part:
                break
            content += part
    finally:
        os.close(descriptor)
    return bytes(content)
