"""Read a file written by people, or a pipe in its place, within limits."""

import errno
import os
import select
import time
from pathlib import Path
from typing import Final

WAIT_SECONDS: Final = 5.0
"""The writer of a pipe, such as a shell's `<(command)`, may take this long.

Reading a pipe that has no writer would block forever.
"""

CHUNK_BYTES: Final = 2**20
"""The maximum number of bytes per read call."""


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file or pipe, up to its first `most_bytes` bytes.

    Raises OSError if the file cannot be read. Also raises OSError if a pipe does not end within
    WAIT_SECONDS.
    """
    # Opening the file must neither wait for a pipe nor acquire a controlling terminal.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    deadline_seconds = time.monotonic() + WAIT_SECONDS
    content = bytearray()
    readiness = select.poll()
    readiness.register(descriptor, select.POLLIN)
    try:
        while len(content) < most_bytes:
            wait_milliseconds = 1000 * (deadline_seconds - time.monotonic())
            if not readiness.poll(max(0.0, wait_milliseconds)):
                raise OSError(
                    errno.ETIMEDOUT, f"a pipe into which nobody writes for {WAIT_SECONDS:g} s"
                )
            chunk = os.read(descriptor, min(most_bytes - len(content), CHUNK_BYTES))
            if not chunk:
                break
            content += chunk
    finally:
        os.close(descriptor)
    return bytes(content)
