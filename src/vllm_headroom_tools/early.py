"""Set up streams, limits, signals and garbage collection before larger imports."""

import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEFAULT_COMMAND = "run"
"""The command that runs if none is named: the daemon."""

MIN_OPEN_FILES = 40
"""The open files that the daemon needs: it keeps 17 open, and scrapers, the engine's page and /proc
need some more.
"""


def require_open_files() -> None:
    """Exit with status 2 if the process may not open as many files as it needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES:
        problem = (
            f"only {limit} files may be open at once, {MIN_OPEN_FILES} are needed:"
            " raise the limit (ulimit -n)"
        )
        # The function only makes system calls, because without a free descriptor no module can be
        # imported.
        with suppress(OSError):
            os.write(2, f"vllm-headroom: {problem}\n".encode())
        os._exit(2)


def exit_on_signals(status: int | None) -> None:
    """Let SIGINT and SIGTERM end the process at once and without a traceback.

    The process exits with `status`. If `status` is None, the signal itself ends the process, so
    that a shell sees which signal ended it.
    """

    def exit_now(number: int, _frame: object) -> None:
        """End the process at once, with `status` or as the signal would have."""
        if status is not None:
            os._exit(status)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # so that a shell's loop ends as well
        # In a container's first process, the kernel ignores a signal's default action.
        os._exit(128 + number)

    signal.signal(signal.SIGINT, exit_now)
    signal.signal(signal.SIGTERM, exit_now)


def open_closed_streams() -> None:
    """Connect to /dev/null each standard stream that was closed when the process started.

    Otherwise the next opened file would get the stream's number, and the stream's output would be
    written into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - it stays open


@contextmanager
def pause_collection() -> Iterator[None]:
    """Turn garbage collection off within the context, which is meant for imports.

    Imports leave almost no garbage, and collecting it would take a tenth of the daemon's start-up
    time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
