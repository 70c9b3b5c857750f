"""The probe's hooks in a process: vLLM's plugin call, forks and torch's OutOfMemoryError."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from functools import cache
from types import FrameType

from vllm_headroom_probe.probe import Probe

UNSUPPORTED_VERSION = re.compile(r"0\.[0-8]\.\d")
"""vLLM versions before 0.9, whose attributes are unknown. The version of a source build,
"0.1.dev1", does not match.
"""

_probe: Probe | None = None
"""The only probe in this process. It is module state because forks and torch's callback need it."""


def begin(folder: str, frame: FrameType | None) -> None:
    """Start this process's probe on the first call.

    Each call looks for vLLM's worker or core. `frame` is the caller's frame. vLLM calls this
    function while building the worker or core. One of the frames on the caller's stack holds the
    worker or core. Nothing is started in an unsupported version of vLLM.
    """
    global _probe  # noqa: PLW0603 - see above
    vllm = sys.modules.get("vllm")
    version = str(getattr(vllm, "__dict__", {}).get("__version__", ""))
    if UNSUPPORTED_VERSION.match(version):
        _warn_too_old(version)
        return
    if _probe is None:
        _probe = Probe(folder)
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
        )
        _watch_for_ooms()
        _probe.start()
    _probe.engine.search(frame)


@cache
def _warn_too_old(version: str) -> None:
    logging.getLogger("vllm.headroom_probe").warning(
        "headroom probe: idle, vLLM %s is older than 0.9", version
    )


def _before_fork() -> None:
    """End the probe's thread, because a child process would inherit the thread's locks."""
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.pause()


def _after_in_parent() -> None:
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.start()


def _after_in_child() -> None:
    """Start a new probe in a forked process.

    There, vLLM does not load its plugins again.
    """
    global _probe  # noqa: PLW0603 - see above
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.recording.discard()
            _probe = Probe(_probe.folder)
            _probe.start()


def _watch_for_ooms() -> None:
    """Make torch call `_on_oom` before it raises an OutOfMemoryError."""
    with contextlib.suppress(Exception):
        # The call is queued until vLLM has initialised CUDA. Attaching the observer now would
        # initialise it.
        sys.modules["torch"].cuda._lazy_call(_attach_observer)  # noqa: SLF001


def _attach_observer() -> None:
    with contextlib.suppress(Exception):
        sys.modules["torch"]._C._cuda_attach_out_of_memory_observer(_on_oom)  # noqa: SLF001 - torch's only name
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.begin_history(sys._getframe(1))  # noqa: SLF001 - see register


def _on_oom(device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.report_oom(device, requested_bytes, total_bytes, free_bytes)
