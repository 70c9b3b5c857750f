"""State files; each write replaces an entire file."""

import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from vllm_headroom.daemon.state.saved import SavedState
from vllm_headroom.derive.life.states import EngineRuns
from vllm_headroom.expose.view import SavedHistory
from vllm_headroom.trace.recorder import make_folder, replace_file

STATE_FORMAT: Final = 18
"""The format number of the leak detector's state. Increase it when the fields of a state, or their
meaning, change.
"""

RUNS_FORMAT: Final = 2
"""The format number of the engine's runs. Increase it under the same conditions as STATE_FORMAT."""

HISTORY_FORMAT: Final = 4
"""The format number of the file with the page's last day. Increase it under the same conditions as
STATE_FORMAT.
"""

MOST_STATE_BYTES: Final = 64 * 2**20
"""The maximum size of a file that is read. The state of eight GPUs is a hundredth of this."""

T = TypeVar("T")


class UnusableState(Exception):  # noqa: N818 - the name describes the file
    """The file contains no usable state for this daemon; the message gives the reason."""


class StateFile(Generic[T]):
    """The name, format and value type of a state file.

    The folder is passed to each method.
    """

    def __init__(self, name: str, value_type: type[T], format_number: int, loss: str) -> None:
        self.name = name
        self.rejected_name = f"{name}.bad"
        """The name that is given to an unusable file."""
        self.loss = loss
        """What the operator loses if the file is unusable, as a clause for the log."""
        self._value_type = value_type
        # msgspec prepares a type when it is first used. If two threads do this at the same time,
        # msgspec 0.22 crashes with SIGSEGV. Therefore, the types are prepared here, when the module
        # is imported.
        msgspec.json.Decoder(value_type)
        self._format_number = format_number

    def encode(self, value: T) -> bytes:
        """Return the value as JSON with the format number and a checksum.

        Raises ValueError if the value contains a number that is not finite.
        """
        document = msgspec.to_builtins(value, str_keys=True)
        # The format number is set first, so the checksum covers it too.
        document["format"] = self._format_number
        document["checksum"] = _compute_checksum(document)
        return _encode_canonical(document)

    def decode(self, content: bytes) -> T:
        """Return the value encoded in a file's content.

        Raises UnusableState if the format, the checksum or the structure is wrong.
        """
        try:
            document = json.loads(content)
            format_number = document.pop("format")
            checksum = document.pop("checksum")
            if format_number != self._format_number:
                raise UnusableState(
                    f"it is of format {format_number!r:.20}, this version reads"
                    f" {self._format_number}"
                )
            # The checksum covers the document as it was written, except for the checksum itself.
            if checksum != _compute_checksum(document | {"format": self._format_number}):
                raise UnusableState("it is damaged: its checksum is another")
            return msgspec.convert(document, self._value_type, str_keys=True)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UnusableState("it is damaged: it is no complete state") from None

    def read(self, folder: Path) -> T | None:
        """Return the saved value, or None if the file does not exist.

        Raises UnusableState in three cases:

        - The file is not a regular file.
        - The file is too large.
        - `decode` rejects the content.

        Raises OSError if the file cannot be read.
        """
        try:
            # With O_NONBLOCK, opening a pipe does not wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(folder / self.name, flags), "rb") as stream:
                status = os.fstat(stream.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise UnusableState("it is no file but a pipe or a device")
                if status.st_size > MOST_STATE_BYTES:
                    raise UnusableState("it is too large to be a state")
                content = stream.read(MOST_STATE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise UnusableState("it is no file but a link or a socket") from None
            raise
        return self.decode(content)

    def write(self, folder: Path, value: T) -> None:
        """Replace the saved value atomically and durably.

        The folder is created if it is missing. Raises OSError if writing fails. Raises ValueError
        if the value contains a number that is not finite.
        """
        content = self.encode(value)
        make_folder(folder)
        replace_file(folder / self.name, folder / f"{self.name}.new", (content,))
        # Without syncing the folder, a crash of the machine could undo the rename.
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def set_aside(self, folder: Path) -> None:
        """Rename the file to `rejected_name`, replacing any older one; raise OSError on failure."""
        (folder / self.name).replace(folder / self.rejected_name)


def _encode_canonical(document: dict[str, Any]) -> bytes:
    """Return the document as JSON with sorted keys, so that equal documents have equal bytes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _compute_checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(_encode_canonical(document)).hexdigest()


STATE: Final = StateFile("state.json", SavedState, STATE_FORMAT, "the leak detector starts over")
RUNS: Final = StateFile(
    "lives.json", EngineRuns, RUNS_FORMAT, "the engine's restarts are counted from zero"
)
"""The counts of the engine's runs. The counts have a separate file, because they continue when the
leak detector's state is set aside. The detector's state belongs to a single run.
"""

HISTORY: Final = StateFile(
    "history.json", SavedHistory, HISTORY_FORMAT, "the page draws its curves from now on"
)
"""The curves of the page's last day. The curves have a separate file, because they are only
displayed, and remain valid when another engine is running.
"""
