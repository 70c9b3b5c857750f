"""The file: always the old state or the new one, whatever happens while it is written."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from vllm_headroom.daemon.state.content import FORMAT, SavedState

NAME: Final = "state.json"
MOST_BYTES: Final = 64 * 2**20
"""A hundred times the state of eight GPUs: what is larger is not ours and would only fill memory."""


class Unusable(Exception):  # noqa: N818 - it says what the file is
    """A file that holds no state for this daemon; its text says why."""


def encode(saved: SavedState) -> bytes:
    """Return the file's content; raises ValueError when a value is not finite."""
    document = _adapter().dump_python(saved, mode="json")
    return _canonical({**document, "checksum": _checksum(document)})


def decode(content: bytes) -> SavedState:
    """Return what `encode` was given; raises Unusable."""
    try:
        document = json.loads(content)
        written = document.pop("format"), document.pop("checksum")
        if written[0] != FORMAT:
            raise Unusable(f"it is of format {written[0]!r:.20}, this version reads {FORMAT}")
        if written[1] != _checksum({**document, "format": FORMAT}):
            raise Unusable("it is damaged: its checksum is another")
        return _adapter().validate_python(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unusable("it is damaged: it is no complete state") from None


def read(folder: Path) -> SavedState | None:
    """Return the saved state, None where there is none; raises Unusable and OSError."""
    try:
        with (folder / NAME).open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(content) > MOST_BYTES:
        raise Unusable("it is too large to be a state")
    return decode(content)


def write(folder: Path, saved: SavedState) -> None:
    """Replace the saved state at once, and durably; makes the folder; raises OSError and what `encode` raises."""
    content, unfinished = encode(saved), folder / f"{NAME}.new"
    folder.mkdir(parents=True, exist_ok=True)
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(folder / NAME)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def set_aside(folder: Path) -> None:
    """Rename the saved state to `state.json.bad`, over an older one; raises OSError."""
    (folder / NAME).replace(folder / f"{NAME}.bad")


@cache
def _adapter() -> TypeAdapter[SavedState]:
    return TypeAdapter(SavedState)


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(document)).hexdigest()
