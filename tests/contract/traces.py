"""The recorded traces of real servers: each is read once, and watched once by the detector."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

from vllm_headroom.model import Snapshot
from vllm_headroom_tools.history import LeakReplay
from vllm_headroom_tools.trace import parse_trace


@cache
def read_recording(path: Path) -> tuple[Snapshot, ...]:
    with gzip.open(path) as stream:
        return tuple(parse_trace(iter(stream)))


@cache
def watch_recording(path: Path) -> LeakReplay:
    """Return what was reported about a whole recording."""
    watch = LeakReplay()
    for snapshot in read_recording(path):
        watch.step(snapshot)
    return watch
