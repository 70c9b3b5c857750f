"""A plugin of vLLM's whose library in C makes the engine core keep 16 MiB at each request, the way that a file names.

The library is that of NATIVE_LEAK, built from tests/fakes/leaks.c, the file NATIVE_LEAK_WAY.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from pathlib import Path
from typing import Any

BYTES = 16 << 20


def register() -> None:
    if "NATIVE_LEAK" not in os.environ or not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - of the core's process alone

    leak = ctypes.CDLL(os.environ["NATIVE_LEAK"]).leak
    leak.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    add_request = Scheduler.add_request

    def leaking(self: Any, request: Any) -> None:
        way = Path(os.environ["NATIVE_LEAK_WAY"]).read_bytes()
        leak(way, os.environb[b"NATIVE_LEAK_SHM"], BYTES)
        add_request(self, request)

    Scheduler.add_request = leaking
