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
"""The command that runs if none is given: the daemon."""

MIN_OPEN_FILES = 40
"""The number of open files that the daemon needs. It keeps 17 open. Scrapers, the engine's page and
/proc need several more.
"""


def require_open_files() -> None:
    """Exit with status 2 if the process may not open enough files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES:
        problem = (
            f"only {limit} files may be open at once, {MIN_OPEN_FILES} are needed:"
            " raise the limit (ulimit -n)"
        )
        # Only system calls are made from here on. Importing a module needs a free file descriptor.
        with suppress(OSError):
            os.write(2, f"vllm-headroom: {problem}\n".encode())
        os._exit(2)


def exit_on_signals(status: int | None) -> None:
    """Make SIGINT and SIGTERM end the process immediately, without a traceback.

    The process exits with `status`. If `status` is None, the signal itself ends the process, so a
    shell sees which signal it was.
    """

    def exit_now(number: int, _frame: object) -> None:
        """End the process immediately.

        If `status` is None, the signal itself ends it.
        """
        if status is not None:
            os._exit(status)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # so that a loop in a shell also ends
        # In a container's first process (pid 1), the kernel ignores a signal's default action.
        os._exit(128 + number)

    signal.signal(signal.SIGINT, exit_now)
    signal.signal(signal.SIGTERM, exit_now)


def open_closed_streams() -> None:
    """Connect to /dev/null each standard stream that was closed when the process started.

    If a stream stayed closed, the next file to be opened would get its file descriptor. Output to
    the stream would end up in that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - it stays open


@contextmanager
def pause_collection() -> Iterator[None]:
    """Turn off garbage collection within the context, which is meant for imports.

    Imports leave almost no garbage. Collecting it would take a tenth of the daemon's startup time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
