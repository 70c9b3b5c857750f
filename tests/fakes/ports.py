"""Ports that stay free until a test uses them."""

from __future__ import annotations

import os
import re
import socket
from itertools import count

# Below the range from which Linux gives out a port that nobody chose (32768 to 60999): one that was free there a moment
# ago is soon a client's or another test's. Every worker of pytest-xdist has a separate share.
FIRST, SHARE = 12_000, 2_000
_worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0) % 10
_turns = count(os.getpid())


def free_port(in_a_row: int = 1) -> int:
    """Return the first of so many ports of 127.0.0.1 at which nobody listens, given to no other test of this run."""
    free = 0
    for _ in range(SHARE):
        port = FIRST + _worker * SHARE + (place := next(_turns) % SHARE)
        free = free + 1 if place and _is_free(port) else 0
        if free == in_a_row:
            return port - in_a_row + 1
    message = f"no {in_a_row} of {SHARE} ports are free"
    raise AssertionError(message)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
