"""The daemon's process: its settings are read in a child, whose imports end with it."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

from vllm_headroom_tools.early import unhindered

if TYPE_CHECKING:
    from vllm_headroom.config.plain import PlainSettings


STDERR: Final = 2
KILLED: Final = 1
RECEIVING, SENDING = os.pipe()
"""From the child to the daemon: the settings, or nothing where the child has said all there is to say."""


def hand_over(settings: PlainSettings) -> None:
    """Send the settings to the daemon, if it is still there."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(SENDING, "wb") as pipe:
        pickle.dump(settings, pipe)


def run(read: Callable[[], NoReturn]) -> NoReturn:
    """Run the daemon with the settings that `read` hands over in a child, or end as the child did.

    What reads them, pydantic, argparse and YAML, takes 13 MiB, of which the daemon needs nothing. It imports its own
    meanwhile.
    """
    with unhindered():
        import vllm_headroom.daemon.parts  # noqa: F401, PLC0415 - before the child, which needs most of it as well
    try:
        child = os.fork()
    except OSError as error:
        os.write(STDERR, f"vllm-headroom run: no process can read the settings ({error.strerror})\n".encode())
        os._exit(KILLED)
    if child == 0:
        os.close(RECEIVING)
        read()
    os.close(SENDING)
    with unhindered():
        from vllm_headroom.daemon import app  # noqa: PLC0415 - beside the child
    with os.fdopen(RECEIVING, "rb") as pipe:
        handed_over = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        os.write(STDERR, f"vllm-headroom run: signal {-status} ended the process that read the settings\n".encode())
    if status != 0 or not handed_over:
        os._exit(status if status >= 0 else KILLED)
    gc.freeze()  # what was imported stays: a full collection would look through it for 25 ms, and scrapes would wait
    app.serve(pickle.loads(handed_over))  # noqa: S301 - written by this program
