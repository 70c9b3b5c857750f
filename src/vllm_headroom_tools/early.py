"""What a process does before it imports much: its streams, how signals end it, and what imports go without."""

import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEAST_FILES = 40
"""The daemon keeps 17 open, and scrapers, the engine's page and /proc take some more."""


def count_files() -> None:
    """End the process with status 2 where it may not open as many files as it needs."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < LEAST_FILES:
        problem = f"only {most} files may be open at once, {LEAST_FILES} are needed: raise the limit (ulimit -n)"
        with suppress(OSError):
            os.write(2, f"vllm-headroom: {problem}\n".encode())
        os._exit(2)


def end_on_signals(status: int | None) -> None:
    """Let either end the process at once and without a traceback: with `status`, or as signals end a process."""

    def end(number: int, _frame: object) -> None:
        if status is not None:
            os._exit(status)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # so that a shell's loop ends as well
        os._exit(128 + number)  # the first process of a container is spared by signals

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def stand_in() -> None:
    """Let a standard stream that was closed from the start lead nowhere, before another file takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - it stays open


@contextmanager
def no_collection() -> Iterator[None]:
    """Import without looking for garbage, of which imports make next to none: a tenth of the daemon's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
