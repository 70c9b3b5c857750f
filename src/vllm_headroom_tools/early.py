"""What a process does before it imports much: streams, limits, signals and garbage collection."""

import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEFAULT_COMMAND = "run"
"""The command without which the program runs: the daemon."""

MIN_OPEN_FILES = 40
"""The daemon keeps 17 open, and scrapers, the engine's page and /proc take some more."""


def require_open_files() -> None:
    """Exit with status 2 where the process may not open as many files as it needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES:
        problem = (
            f"only {limit} files may be open at once, {MIN_OPEN_FILES} are needed:"
            " raise the limit (ulimit -n)"
        )
        # By system calls alone: with no file left, a module could not be imported.
        with suppress(OSError):
            os.write(2, f"vllm-headroom: {problem}\n".encode())
        os._exit(2)


def exit_on_signals(status: int | None) -> None:
    """Let SIGINT and SIGTERM end the process at once and without a traceback.

    The process exits with `status`. Where `status` is None, the signal itself ends the process, so
    that a shell sees how it ended.
    """

    def exit_now(number: int, _frame: object) -> None:
        """End the process at once, with `status` or as the signal would have."""
        if status is not None:
            os._exit(status)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # so that a shell's loop ends as well
        # The kernel ignores a signal's default action in a container's first process.
        os._exit(128 + number)

    signal.signal(signal.SIGINT, exit_now)
    signal.signal(signal.SIGTERM, exit_now)


def open_closed_streams() -> None:
    """Connect to /dev/null each standard stream that was closed when the process started.

    Otherwise the next file that is opened would take the stream's number, and output for the stream
    would be written into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - it stays open


@contextmanager
def pause_collection() -> Iterator[None]:
    """Turn garbage collection off within the context, which is meant for imports.

    Imports leave next to no garbage, and collecting would take a tenth of the daemon's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
