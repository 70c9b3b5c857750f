"""Read the probe's files from a folder to which another container can write anything."""

import contextlib
import os
import re
import stat
from collections.abc import Callable
from heapq import nlargest
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from vllm_headroom.model import Failure, ProbedProcess
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

FILE_NAME: Final = re.compile(r"[0-9]{1,10}-[0-9]{1,12}\.json", re.ASCII)
"""The name of a process's file, which contains its pid and start time. The daemon does not read the
probe's other files.
"""

MAX_ENTRIES: Final = 4096
"""The maximum number of entries in the folder. An engine leaves one file per process and run. Even
hundreds of runs leave fewer files than this.
"""

MAX_FILES: Final = 128
"""The number of newest files that are read. An engine on eight GPUs has a quarter as many
processes.
"""

MAX_FILE_BYTES: Final = 16 * 1024
"""The probe does not write larger files (vllm_headroom_probe.folder)."""

BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
UNREADABLE: Final = "it is no file of at most 16 KiB that can be read"

ParsedFile = tuple[ProbedProcess, str | None] | str
"""A file's process and boot ID, or what is wrong with the file."""


class FileVersion(NamedTuple):
    """Identifies a file's content. Each write replaces the file, so the file's inode changes."""

    changed_nanoseconds: int
    inode: int
    size: int


class ReadFile(Struct, frozen=True, kw_only=True):
    """A file's parsed content, with the version that was read."""

    version: FileVersion
    parsed: ParsedFile


class TooManyError(Exception):
    """The folder has more entries than any probe would create."""


def list_newest(folder: Path) -> dict[str, FileVersion]:
    """Return the versions of the newest MAX_FILES probe files, keyed by name, newest first.

    The result is empty if there are no probe files. Raises OSError if the folder cannot be listed.
    Raises TooManyError if it has more than MAX_ENTRIES entries of any name.
    """
    versions: list[tuple[FileVersion, str]] = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > MAX_ENTRIES:
                raise TooManyError
            # The file may have been removed in the meantime.
            with contextlib.suppress(OSError):
                if FILE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    version = FileVersion(status.st_mtime_ns, status.st_ino, status.st_size)
                    versions.append((version, entry.name))
    return {name: version for version, name in nlargest(MAX_FILES, versions)}


def read_regular_file(folder: Path, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes | None:
    """Return a file's content.

    Returns None in two cases:

    - The file is gone, unreadable or too large.
    - The file was replaced by a link, pipe or device.
    """
    # The engine's container may replace the file at any time. Therefore, links are not followed,
    # and opening a pipe does not block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(folder / name, flags)
    except OSError:
        return None
    try:
        # To detect a file that is too large, one byte more than allowed is read.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = os.read(descriptor, max_bytes + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return content if len(content) <= max_bytes else None


class ProbeReader:
    """Reads HEADROOM_PROBE_DIR on a daemon thread, so that a hung volume affects only this source.

    The engine's container can write to the folder. The content is therefore limited in size and
    validated. The content is trusted only for the engine's own memory. Files from an earlier boot
    are ignored.
    """

    def __init__(
        self, folder: Path, *, parse: Callable[[bytes], ParsedFile], boot: Path = BOOT_ID_FILE
    ) -> None:
        self._folder = folder
        self._parse = parse
        self._boot_id_file = boot
        self._boot_id: str | None = None
        """The ID of the machine's current boot, or None until it has been read."""
        self._files: dict[str, ReadFile] = {}
        self._worker = Worker[tuple[ProbedProcess, ...] | Failure]("probe")

    async def read(self, timeout_seconds: float) -> tuple[ProbedProcess, ...] | Failure:
        """Return the newest record of each process, running or exited; never raise.

        The result is a Failure if the folder cannot be read in time. The result is also a Failure
        if there is no usable file. A result without failure contains at least one record.
        """
        try:
            return await self._worker.call(self._read, timeout_seconds)
        except TimeoutError:
            reason = Reason.TIMEOUT
            problem = f"did not answer within {timeout_seconds:g} s: a volume hangs"
        except TooManyError:
            reason = Reason.OUT_OF_BOUNDS
            problem = f"has more than {MAX_ENTRIES} entries, which no probe makes: empty it"
        except PermissionError:
            reason = Reason.NO_PERMISSION
            problem = (
                "cannot be read: let the daemon's user into it (fsGroup in the pod, or its mode)"
            )
        except OSError as error:
            trouble = f"{self._folder} cannot be read"
            advice = "mount the folder HEADROOM_PROBE_DIR"
            return build_unavailable(Source.PROBE, trouble, error, advice)
        return Failure(source=Source.PROBE, reason=reason, message=f"{self._folder} {problem}")

    def _read(self) -> tuple[ProbedProcess, ...] | Failure:
        """Return the records, or a failure if there are none; runs on the thread."""
        # The boot ID is read once, because it stays the same until the machine reboots.
        if self._boot_id is None:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._boot_id = self._boot_id_file.read_text().strip() or None
        versions = list_newest(self._folder)
        self._files = {name: self._read_file(name, version) for name, version in versions.items()}
        processes = self._list_processes()
        return processes or self._explain_no_process()

    def _read_file(self, name: str, version: FileVersion) -> ReadFile:
        """Return a file's parsed content; read the file again only if its version has changed."""
        previous = self._files.get(name)
        if previous is not None and previous.version == version:
            return previous
        content = read_regular_file(self._folder, name)
        parsed = UNREADABLE if content is None else self._parse(content)
        return ReadFile(version=version, parsed=parsed)

    def _list_processes(self) -> tuple[ProbedProcess, ...]:
        """Return the processes in the usable files, without those from an earlier boot.

        If a file's or the machine's boot ID is unknown, the file's process is included.
        """
        processes = []
        for file in self._files.values():
            if isinstance(file.parsed, str):
                continue
            process, boot_id = file.parsed
            if self._boot_id is None or boot_id in {None, self._boot_id}:
                processes.append(process)
        return tuple(processes)

    def _explain_no_process(self) -> Failure:
        """Return why the folder has no usable file: files are malformed or missing."""
        # Reporting a malformed file is more helpful than reporting that there is no file.
        for name, file in self._files.items():
            if isinstance(file.parsed, str):
                message = f"{self._folder / name} cannot be used: {file.parsed}"
                return Failure(source=Source.PROBE, reason=Reason.MALFORMED, message=message)
        message = (
            f"no probe has written into {self._folder}: let vLLM find it on PYTHONPATH, with"
            " HEADROOM_PROBE_DIR set to the same folder (vllm-headroom doctor)"
        )
        return Failure(source=Source.PROBE, reason=Reason.NOT_FOUND, message=message)
