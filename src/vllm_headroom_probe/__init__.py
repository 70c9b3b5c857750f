"""The probe that vLLM loads into each process.

The probe writes memory figures to a file. The probe never raises an error in vLLM's code, blocks
vLLM or initialises CUDA. The probe runs in vLLM's Python, version 3.9 or later, without any other
packages.
"""

from __future__ import annotations

import logging
import os
import sys


def register() -> None:
    """Start writing to HEADROOM_PROBE_DIR; vLLM calls this plugin without catching errors."""
    try:
        folder = os.environ.get("HEADROOM_PROBE_DIR")
        if folder:
            # Importing here catches an import error. Without a folder, the plugin costs nothing.
            from vllm_headroom_probe.hooks import begin  # noqa: PLC0415

            # The callers' frames hold the objects that vLLM is building.
            begin(folder, sys._getframe(1))  # noqa: SLF001
        elif os.environ.get("HEADROOM_PROBE_SNAPSHOT"):
            logging.getLogger("vllm.headroom_probe").warning(
                "headroom probe: idle, HEADROOM_PROBE_SNAPSHOT needs HEADROOM_PROBE_DIR too"
            )
    except Exception:
        logging.getLogger("vllm.headroom_probe").exception(
            "headroom probe: it did not start, vLLM does"
        )
