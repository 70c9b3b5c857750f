"""Types that threads read files into are complete before a thread uses them."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

COMPLETE_AGAIN: Final = """
import msgspec

from vllm_headroom.daemon.state import file
from vllm_headroom.trace.incident import Incident

for kind in (file.SavedState, file.EngineRuns, file.SavedHistory, Incident):
    # A type that is complete already is not read again; any other would raise a NameError here.
    kind.__annotations__ = dict.fromkeys(kind.__annotations__, "NoSuchType")
    msgspec.json.Decoder(kind)
"""


def test_no_thread_completes_a_type_because_two_at_once_end_the_process() -> None:
    """Two threads that complete a type of msgspec at the same time end the process with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", COMPLETE_AGAIN], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
