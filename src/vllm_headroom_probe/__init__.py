"""A probe that vLLM loads into each of its processes: it writes what the process knows of its memory to a file.

Nothing here raises into vLLM, keeps it waiting, initialises CUDA, or runs without HEADROOM_PROBE_DIR. It runs in vLLM's
own Python, 3.9 or newer, and needs nothing but the standard library.
"""

from __future__ import annotations

import logging
import os
import sys


def register() -> None:
    """Begin to write into the folder that HEADROOM_PROBE_DIR names; vLLM's plugin call, which nothing guards."""
    try:
        if folder := os.environ.get("HEADROOM_PROBE_DIR"):
            from vllm_headroom_probe.hooks import begin  # noqa: PLC0415 - inert without a folder, and errors end here

            begin(folder, sys._getframe(1))  # noqa: SLF001 - the callers' frames hold what vLLM is building
    except Exception:
        logging.getLogger("vllm.headroom_probe").exception("headroom probe: it did not start, vLLM does")
