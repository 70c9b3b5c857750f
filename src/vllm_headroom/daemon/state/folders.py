"""Name the state folders of several engines, and remove old ones."""

import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from vllm_headroom.units import DAY_SECONDS

PREFIX: Final = "engine-"
"""The name of an engine's folder begins with this. No other folder is ever removed."""

MOST_UNUSED: Final = 16
"""Our choice: this many folders of engines that are gone are kept, for their incidents. By the
limits of the flight record, each folder takes at most 38 MiB.
"""

UNUSED_SECONDS: Final = 7 * DAY_SECONDS
"""If a folder changed within this time, more of them are kept: see MOST_RECENT."""

MOST_RECENT: Final = 64
"""Our choice: this many folders of engines that are gone are kept at all. Each new pod of a
workload that crashes has a separate folder. Without this limit they fill the disk of the node.
"""

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def name_folder(*parts: str) -> str:
    """Return the name of an engine's folder, made of the engine's names and identity."""
    texts = [_UNSAFE.sub("-", part) for part in parts if part]
    return PREFIX + "_".join(texts)[:200]


def remove_unused(state_dir: Path, used_names: Collection[str]) -> None:
    """Remove the folders of engines that are not watched, except the newest.

    At most MOST_RECENT of them are kept and, of those that have not changed for UNUSED_SECONDS,
    only those among the newest MOST_UNUSED. Raises OSError if the folder cannot be read.
    """
    newest_seconds: dict[Path, float] = {}
    for folder in state_dir.iterdir():
        is_engines = folder.name.startswith(PREFIX) and folder.is_dir() and not folder.is_symlink()
        if is_engines and folder.name not in used_names:
            newest_seconds[folder] = folder.stat().st_mtime
    newest_first = sorted(newest_seconds, key=newest_seconds.__getitem__, reverse=True)
    for position, folder in enumerate(newest_first):
        is_recent = time.time() - newest_seconds[folder] <= UNUSED_SECONDS
        most_folders = MOST_RECENT if is_recent else MOST_UNUSED
        if position >= most_folders:
            shutil.rmtree(folder, ignore_errors=True)
