"""Read the probe's files, in a folder that another container may fill with anything."""

import contextlib
import os
import re
import stat
from collections.abc import Callable
from heapq import nlargest
from pathlib import Path
from typing import Final

from vllm_headroom.model import Failure, ProbedProcess
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

NAME: Final = re.compile(r"[0-9]{1,10}-[0-9]{1,12}\.json", re.ASCII)
"""A process by pid and start; other files of the probe are not for the daemon."""

MOST_ENTRIES: Final = 4096
"""An engine leaves a file per process and run; hundreds of runs stay below."""

MOST_FILES: Final = 128
"""The newest that are read: four times the processes of an engine on eight GPUs."""

MOST_BYTES: Final = 16 * 1024

Stamp = tuple[int, int, int]
"""A file's time of change, inode and size; each write replaces the file."""


class TooManyError(Exception):
    """There are more entries than any probe makes."""


def list_newest(folder: Path) -> dict[str, Stamp]:
    """Return the newest regular files named as a probe names them; raises OSError and TooManyError."""
    found: list[tuple[Stamp, str]] = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > MOST_ENTRIES:
                raise TooManyError
            with contextlib.suppress(OSError):
                if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append(((status.st_mtime_ns, status.st_ino, status.st_size), entry.name))
    return {name: stamp for stamp, name in nlargest(MOST_FILES, found)}


def read_content(folder: Path, name: str, most_bytes: int = MOST_BYTES) -> bytes | None:
    """Return a file's content; None where it is gone, unreadable, too large or now a link, pipe or device."""
    try:
        descriptor = os.open(
            folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        read = os.read(descriptor, most_bytes + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return read if len(read) <= most_bytes else None


BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
UNREADABLE: Final = "it is no file of at most 16 KiB that can be read"

Parsed = tuple[ProbedProcess, str | None] | str
"""The process of a file and its boot ID, or what is wrong with the file."""


class ProbeReader:
    """Reads HEADROOM_PROBE_DIR on a daemon thread, so that a volume that hangs costs this source only.

    The engine's container can write to the folder: its content is bounded, checked, and trusted for
    the engine's own memory only. Files of an earlier boot are ignored.
    """

    def __init__(
        self, folder: Path, *, parse: Callable[[bytes], Parsed], boot: Path = BOOT
    ) -> None:
        self._folder = folder
        self._parse = parse
        self._boot = boot
        self._boot_id: str | None = None
        self._known: dict[str, tuple[Stamp, Parsed]] = {}
        self._worker = Worker[tuple[ProbedProcess, ...] | Failure]("probe")

    async def read(self, timeout_seconds: float) -> tuple[ProbedProcess, ...] | Failure:
        """Return the newest record of each process, running or exited; at least one."""
        try:
            return await self._worker.call(self._read, timeout_seconds)
        except TimeoutError:
            reason, problem = (
                Reason.TIMEOUT,
                f"did not answer within {timeout_seconds:g} s: a volume hangs",
            )
        except TooManyError:
            problem = f"has more than {MOST_ENTRIES} entries, which no probe makes: empty it"
            reason = Reason.OUT_OF_BOUNDS
        except PermissionError:
            problem = (
                "cannot be read: let the daemon's user into it (fsGroup in the pod, or its mode)"
            )
            reason = Reason.NO_PERMISSION
        except OSError as error:
            trouble, advice = (
                f"{self._folder} cannot be read",
                "mount the folder HEADROOM_PROBE_DIR",
            )
            return build_unavailable(Source.PROBE, trouble, error, advice)
        return Failure(source=Source.PROBE, reason=reason, message=f"{self._folder} {problem}")

    def _read(self) -> tuple[ProbedProcess, ...] | Failure:
        if self._boot_id is None:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._boot_id = self._boot.read_text().strip() or None
        before, self._known = self._known, {}
        for name, stamp in list_newest(self._folder).items():
            known = before.get(name)
            if known is None or known[0] != stamp:
                written = read_content(self._folder, name)
                known = stamp, UNREADABLE if written is None else self._parse(written)
            self._known[name] = known
        found = {name: parsed for name, (_, parsed) in self._known.items()}
        ours = {None, self._boot_id}
        usable = [parsed for parsed in found.values() if not isinstance(parsed, str)]
        if processes := tuple(
            each for each, boot_id in usable if boot_id in ours or self._boot_id is None
        ):
            return processes
        message = (
            f"no probe has written into {self._folder}: let vLLM find it on PYTHONPATH, with HEADROOM_PROBE_DIR set to"
            " the same folder (vllm-headroom doctor)"
        )
        for name, wrong in found.items():
            if isinstance(wrong, str):
                message = f"{self._folder / name} cannot be used: {wrong}"
                return Failure(source=Source.PROBE, reason=Reason.MALFORMED, message=message)
        return Failure(source=Source.PROBE, reason=Reason.NOT_FOUND, message=message)
