"""Find the state folder of one of several engines that a daemon watches."""

from pathlib import Path
from typing import Final

from vllm_headroom.daemon.state.folders import FOLDER_PREFIX, name_folder
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.engine_choice import choose_engine

POD_NAMES: Final = 3
"""A state folder's name has this many names before the port. They are namespace, pod and UID."""


def find_engine_folder(place: Path, wanted: str | None) -> Path:
    """Return the wanted engine's folder if `place` contains several state folders, else `place`.

    If several pods have had the wanted name, the newest pod's folder is returned. Raises BadInput
    unless exactly one engine has the wanted name. Also raises BadInput if `place` cannot be read.
    """
    newest_folders: dict[str, Path] = {}
    try:
        folders = [path for path in place.glob(f"{FOLDER_PREFIX}*") if path.is_dir()]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime):
            # The last part of the folder's name is the pod's UID. Operators do not type it.
            *names, _ = folder.name.removeprefix(FOLDER_PREFIX).split("_")
            # The three names are the pod's namespace, its name and its UID.
            is_pods = len(names) == POD_NAMES
            newest_folders["/".join(names[:2]) if is_pods else "_".join(names)] = folder
    except OSError as error:
        raise BadInput(f"{place}: cannot be read: {error.strerror}") from error
    # The folders are sorted by date. If several pods have the same name, the newest replaces the
    # others.
    if not newest_folders:
        if wanted is not None:
            raise BadInput(f"{place}: has no folders of several engines: leave --engine out")
        return place
    if wanted is not None and "://" in wanted:
        wanted = name_folder(wanted.partition("://")[2]).removeprefix(FOLDER_PREFIX)
    elif wanted is not None:
        wanted = "/".join(wanted.split("/")[:2])
    return newest_folders[choose_engine(newest_folders, wanted)]
