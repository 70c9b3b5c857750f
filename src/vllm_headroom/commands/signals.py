"""What SIGINT and SIGTERM do to a command that does not take them over."""

from __future__ import annotations

import os
import signal


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
