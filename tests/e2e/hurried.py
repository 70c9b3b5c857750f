"""The daemon on a clock that runs $SPEED times as fast, from $BEGAN on: a minute comes within seconds.

While the file $RAISING has the name of a source, its reader raises an error of a random kind.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vllm_headroom.__main__ import main
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon import parts
from vllm_headroom.parse import engines
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.scrape.proc import connections, files
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Source
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


ERRORS: Final = (RecursionError, MemoryError, struct.error, IndexError, OverflowError, TypeError, ZeroDivisionError)
RAISED_TEXT: Final = "raised on purpose"
READER_PARTS: Final[dict[Source, tuple[Any, str]]] = {
    Source.ENGINE: (engines, "build_page"),
    Source.NVML: (Nvml, "_query_devices"),
    Source.PROCESS: (Processes, "_read_engine"),
    Source.PROBE: (parts, "parse_probe"),
}
"""A function that each reading of a source calls, as its owner and its name."""


def raise_while_named(source: Source, owner: Any, name: str, named: Path) -> None:
    """Make the function of this name raise while the file has the source's name."""
    function: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if named.exists() and named.read_text() == source:
            raise random.choice(ERRORS)(RAISED_TEXT)  # noqa: S311 - no secret
        return function(*arguments, **options)

    setattr(owner, name, call)


if __name__ == "__main__":
    if "RAISING" in os.environ:
        for source, (owner, name) in READER_PARTS.items():
            raise_while_named(source, owner, name, Path(os.environ["RAISING"]))
    vars(parts)[SystemClock.__name__] = HurriedClock
    # In the namespace of the tests all pids are of one kind, as on a host.
    vars(files)[files.has_host_pids.__name__] = lambda _: True
    # The kernel measures how long a request waits, and its clock does not hurry.
    vars(connections)["SLOW_SECONDS"] /= float(os.environ["SPEED"])
    main()
