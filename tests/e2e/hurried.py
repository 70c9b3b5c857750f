"""The daemon on a clock that runs $SPEED times as fast, from $BEGAN on: a minute comes within seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path

from vllm_headroom.__main__ import main
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon import parts
from vllm_headroom.scrape.proc import connections, files
from vllm_headroom_tools.demo.run import ScaledClock


class HurriedClock(ScaledClock):
    """Shows the same time in all processes that are given the same beginning."""

    def __init__(self) -> None:
        speed, now = float(os.environ["SPEED"]), time.time()
        super().__init__(speed)
        began = float(os.environ.get("BEGAN", now))
        self._ahead_seconds = began + speed * (now - began) - self._began_seconds
        self._stepped = Path(os.environ.get("STEPPED", "/nowhere"))

    def time(self) -> float:
        """Return simulated seconds since the epoch, with the step that the file $STEPPED says the clock was set by."""
        return super().time() + (float(self._stepped.read_text()) if self._stepped.exists() else 0.0)


if __name__ == "__main__":
    vars(parts)[SystemClock.__name__] = HurriedClock
    # In the namespace of the tests all pids are of one kind, as on a host.
    vars(files)[files.has_host_pids.__name__] = lambda _: True
    # The kernel measures how long a request waits, and its clock does not hurry.
    vars(connections)["SLOW_SECONDS"] /= float(os.environ["SPEED"])
    main()
