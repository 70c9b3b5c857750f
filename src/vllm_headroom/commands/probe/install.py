"""Puts the probe where any vLLM finds it: a package and its metadata, in a folder for PYTHONPATH."""

from __future__ import annotations

import importlib.util
import shutil
from importlib import metadata
from pathlib import Path
from typing import Final

from vllm_headroom.trace.errors import BadInput

PACKAGE: Final = "vllm_headroom_probe"
ENTRY_POINTS: Final = f"[vllm.general_plugins]\nheadroom_probe = {PACKAGE}:register\n"
"""As pyproject.toml has it: what vLLM looks for in the metadata of everything on its path."""


def install(folder: Path) -> tuple[str, ...]:
    """Put the probe into the folder, in place of an older one; return the names of what is there now."""
    version = metadata.version("vllm-headroom")
    info = folder / f"{PACKAGE}-{version}.dist-info"
    made = [folder / PACKAGE, info] if folder.exists() else [folder, folder / PACKAGE, info]
    try:
        for old in (folder / PACKAGE, *folder.glob(f"{PACKAGE}-*.dist-info")):
            if old.exists():
                shutil.rmtree(old)
        for path in made:
            path.mkdir(parents=True)
            path.chmod(0o755)  # vLLM is another user, and the umask may be one's own
        for file in sorted(_source().glob("*.py")):
            shutil.copyfile(file, folder / PACKAGE / file.name)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-headroom-probe\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        for file in (*(folder / PACKAGE).iterdir(), *info.iterdir()):
            file.chmod(0o644)
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror or error}") from error
    return PACKAGE, info.name


def _source() -> Path:
    """Return where the probe is in this distribution, without importing it."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise BadInput(f"{PACKAGE} is not in this installation of vllm-headroom")
    return Path(found.origin).parent
