"""The daemon on a clock that runs $SPEED times as fast, from $BEGAN on: a minute comes within seconds.

While the file $RAISING has the name of a source, its reader raises an error of a random kind. The folder $NODE_TREE has
the processes of a node, as `tests.fakes.node_tree` writes them.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from vllm_headroom.__main__ import main
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon import node_daemon, parts
from vllm_headroom.parse import engines
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.scrape.proc import connections, files
from vllm_headroom.scrape.proc.node import LocatedEngine, NodeProcesses
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


class NearProcesses(NodeProcesses):
    """Finds the engines of the node in a folder, all of whose addresses are this machine's."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(
            proc=folder / "proc", container_logs=folder / "containers", pod_logs=folder / "pods", **options
        )

    async def find_engines(self, timeout_seconds: float) -> tuple[LocatedEngine, ...]:
        """Return the engines that the folder shows, each at its port of this machine."""
        engines = await super().find_engines(timeout_seconds)
        return tuple(
            replace(engine, page_url=f"http://127.0.0.1:{engine.port}/metrics" if engine.page_url else "")
            for engine in engines
        )


if __name__ == "__main__":
    if "NODE_TREE" in os.environ:
        tree = Path(os.environ["NODE_TREE"])
        vars(parts)[NodeProcesses.__name__] = partial(NearProcesses, tree)
        vars(node_daemon)[Processes.__name__] = partial(Processes, proc=tree / "proc")
    if "RAISING" in os.environ:
        for source, (owner, name) in READER_PARTS.items():
            raise_while_named(source, owner, name, Path(os.environ["RAISING"]))
    # One clock for all parts, because each would begin at its own time.
    clock = HurriedClock()
    vars(parts)[SystemClock.__name__] = lambda: clock
    # In the namespace of the tests all pids are of one kind, as on a host.
    vars(files)[files.has_host_pids.__name__] = lambda _: True
    # The kernel measures how long a request waits, and its clock does not hurry.
    vars(connections)["SLOW_REQUEST_SECONDS"] /= float(os.environ["SPEED"])
    main()
