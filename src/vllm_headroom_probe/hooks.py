"""The life of the probe in one process: when it begins, what a fork makes of it, and a thread that never harms."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from functools import cache
from types import FrameType

from vllm_headroom_probe.probe import Probe

TOO_OLD = re.compile(r"0\.[0-8]\.\d")
"""What vLLM kept where before 0.9 was not read; of builds from source the version says nothing ("0.1.dev1")."""

_probe: Probe | None = None
"""Module state, as forks and torch's queue of calls need it: one probe for each process."""


def begin(folder: str, frame: FrameType | None) -> None:
    """Begin in this process, once; a further call only shows where vLLM is building its worker or its core."""
    global _probe  # noqa: PLW0603 - see above
    version = str(vars(sys.modules.get("vllm") or sys).get("__version__", ""))
    if TOO_OLD.match(version):
        _warn_too_old(version)
        return
    if _probe is None:
        _probe = Probe(folder)
        os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
        _watch_for_ooms()
        _probe.start()
    _probe.engine.search(frame)


@cache
def _warn_too_old(version: str) -> None:
    logging.getLogger("vllm.headroom_probe").warning("headroom probe: idle, vLLM %s is older than 0.9", version)


def _before_fork() -> None:
    """Leave no thread of the probe alive: a child inherits the locks that one holds."""
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.rest()


def _after_in_parent() -> None:
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.start()


def _after_in_child() -> None:
    """Begin anew: this is another process, in which vLLM takes its plugins for loaded."""
    global _probe  # noqa: PLW0603 - see above
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.record.forget()
            _probe = Probe(_probe.folder)
            _probe.start()


def _watch_for_ooms() -> None:
    """Have torch call when an OutOfMemoryError comes, from the moment on when vLLM has initialised CUDA."""
    with contextlib.suppress(Exception):
        sys.modules["torch"].cuda._lazy_call(_attach)  # noqa: SLF001 - attaching itself would initialise CUDA


def _attach() -> None:
    with contextlib.suppress(Exception):
        sys.modules["torch"]._C._cuda_attach_out_of_memory_observer(_on_oom)  # noqa: SLF001 - torch has no other name


def _on_oom(device: int, asked: int, total: int, free: int) -> None:
    with contextlib.suppress(Exception):
        if _probe is not None:
            _probe.note_oom(device, asked, total, free)
