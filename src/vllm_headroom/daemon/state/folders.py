"""Name the state folders of several engines, and remove old ones."""

import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from vllm_headroom.units import DAY_SECONDS

FOLDER_PREFIX: Final = "engine-"
"""The prefix of the name of an engine's folder. No other folder is ever removed."""

MOST_UNUSED: Final = 16
"""The number of folders of former engines that are kept for their incidents (our choice). The
limits of the flight record cap each folder at 38 MiB.
"""

UNUSED_SECONDS: Final = 7 * DAY_SECONDS
"""For folders that changed within this time, the limit is MOST_RECENT instead of MOST_UNUSED."""

MOST_RECENT: Final = 64
"""The maximum number of folders of former engines that are kept at all (our choice). Each new pod
of a crashing workload has a separate folder. Without this limit, the folders would fill the node's
disk.
"""

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def name_folder(*parts: str) -> str:
    """Return the name of an engine's folder, built from the engine's names and identity."""
    texts = [_UNSAFE.sub("-", part) for part in parts if part]
    return FOLDER_PREFIX + "_".join(texts)[:200]


def remove_unused(state_dir: Path, used_names: Collection[str]) -> None:
    """Remove the folders of engines that are not watched, except the newest ones.

    At most MOST_RECENT folders are kept. A folder unchanged for UNUSED_SECONDS is removed, unless
    it is among the newest MOST_UNUSED. Raises OSError if `state_dir` cannot be read.
    """
    newest_seconds: dict[Path, float] = {}
    for folder in state_dir.iterdir():
        is_engines = (
            folder.name.startswith(FOLDER_PREFIX) and folder.is_dir() and not folder.is_symlink()
        )
        if is_engines and folder.name not in used_names:
            newest_seconds[folder] = folder.stat().st_mtime
    newest_first = sorted(newest_seconds, key=newest_seconds.__getitem__, reverse=True)
    for position, folder in enumerate(newest_first):
        is_recent = time.time() - newest_seconds[folder] <= UNUSED_SECONDS
        most_folders = MOST_RECENT if is_recent else MOST_UNUSED
        if position >= most_folders:
            shutil.rmtree(folder, ignore_errors=True)
