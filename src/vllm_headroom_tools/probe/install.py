"""Install the probe where vLLM finds it."""

import importlib.util
import shutil
from importlib import metadata
from pathlib import Path
from typing import Final

from vllm_headroom_tools.bad_input import BadInput

PACKAGE: Final = "vllm_headroom_probe"

ENTRY_POINTS: Final = f"[vllm.general_plugins]\nheadroom_probe = {PACKAGE}:register\n"
"""The entry point from pyproject.toml. vLLM looks for entry points in all packages on its Python
path.
"""

FOLDER_MODE: Final = 0o755
FILE_MODE: Final = 0o644
"""The mode of the files. Everyone may read the files, because vLLM runs as another user. The umask
may be stricter, so the mode is set explicitly.
"""


def install(folder: Path) -> tuple[str, ...]:
    """Install the probe in a folder, and return the names of its two folders.

    An older probe is replaced. Raises BadInput if this installation does not include the probe.
    Also raises BadInput if the folder is not writable.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise BadInput(f"{PACKAGE} is not in this installation of vllm-headroom")
    source = Path(spec.origin).parent
    version = metadata.version("vllm-headroom")
    package = folder / PACKAGE
    info = folder / f"{PACKAGE}-{version}.dist-info"
    # An existing folder keeps its mode, because it may belong to another package.
    new_folders = [package, info] if folder.exists() else [folder, package, info]
    try:
        for old in (package, *folder.glob(f"{PACKAGE}-*.dist-info")):
            if old.exists():
                shutil.rmtree(old)
        for path in new_folders:
            path.mkdir(parents=True)
            path.chmod(FOLDER_MODE)
        for file in sorted(source.glob("*.py")):
            shutil.copyfile(file, package / file.name)
        # vLLM finds plugins through the metadata of installed packages.
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm-headroom-probe\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        # vLLM often runs as a different user than this command.
        for file in (*package.iterdir(), *info.iterdir()):
            file.chmod(FILE_MODE)
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror or error}") from error
    return PACKAGE, info.name
