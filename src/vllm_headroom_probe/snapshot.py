"""Make torch record its memory history.

If torch runs out of memory, a snapshot of the history is written. The file is a pickle that torch's
viewer memory_viz can read. This module is imported only if HEADROOM_PROBE_SNAPSHOT is set.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import IO, Any, NamedTuple

from vllm_headroom_probe.engine import read_own
from vllm_headroom_probe.gpu import can_read_torch, find_cuda
from vllm_headroom_probe.record import is_history_on, read_request

REQUEST_NAME = "snapshot.json"
"""The file in the probe's folder through which a command requests a snapshot."""

FORMAT_FIELD = "headroom_snapshot"
"""The field that identifies a request for a snapshot. Its value is the version of the format."""

MAX_HISTORY_EVENTS = 10_000
"""The number of newest allocations and releases that torch keeps per GPU. Our choice: it limits the
memory for the history and the time for a snapshot.
"""

MAX_SNAPSHOT_BYTES = 64 << 20
"""The maximum size of a snapshot. A snapshot with a full history and 3,000 blocks takes 1.5 MiB."""

MAX_WRITE_SECONDS = 10.0
"""The time limit for writing a snapshot. An OutOfMemoryError is delayed while its snapshot is
written.
"""

MAX_KEPT_SNAPSHOTS = 16
"""The number of newest snapshots kept. Without a limit, a crash loop would fill up the volume."""

FILE_NAME = re.compile(r"(oom|requested)-(rank[0-9]+-)?[0-9]+-[0-9]+\.pickle(\.tmp)?")
"""The names of snapshots. No other file is ever removed."""

MAX_ENTRIES = 4096
"""The maximum number of folder entries that are read."""

MAX_LARGEST = 10
"""The number of lines of code listed in the probe's file. These are the lines that hold the most
memory.
"""

MAX_PATH_CHARACTERS = 120
"""This many characters are kept from the end of a code line's path."""

MAX_REPORT_BYTES = 3000
"""The maximum size of the facts about one snapshot in the probe's file. The entire file is limited
to 16 KiB. If it exceeds that, the probe stops. Ten lines take 2,000 bytes.
"""

MAX_PROBLEM_CHARACTERS = 200
"""The number of characters kept from an error's text."""

TORCH_CODE = re.compile(r"(site|dist)-packages/torch/|/torchinductor_|/torch_compile_cache/")
"""Matches the paths of torch itself and of the code that torch generates. Such lines are skipped.
The line that calls them says more about who holds the memory.
"""

PICKLE_PROTOCOL = 4
"""The newest protocol that memory_viz reads."""


class TakenSnapshot(NamedTuple):
    """A snapshot from torch that has not been written yet."""

    kind: str
    """Why the snapshot was taken: "oom" or "requested"."""
    taken_at: float
    """When the snapshot was taken, in seconds since the epoch."""
    pause_seconds: float
    """How long torch took to create the snapshot. No Python code ran during this time."""
    content: dict[str, Any]
    request_id: str | None
    is_settled: threading.Event
    """Set when the snapshot has been written or has failed."""


class Snapshots:
    """The memory history of this process, and its snapshots in `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)  # noqa: PTH100 - see folder
        self._began_at: float | None = None
        """When the history began, in seconds since the epoch, or None if there is none."""
        self._is_ours = False
        """Whether the history was started by the probe rather than by vLLM's user."""
        self._has_failed = False
        """Whether recording a history has failed."""
        self._has_taken_oom = False
        """Whether a snapshot has been taken for an OutOfMemoryError, which happens only once."""
        self._answered_id = ""
        """The ID of the last request that was answered."""
        self._taken_oom: TakenSnapshot | None = None
        """The snapshot of an OutOfMemoryError that `tick` must write."""
        self._reports: dict[str, dict[str, Any]] = {}
        """The facts about each kind of snapshot, for the probe's file."""

    def describe(self) -> dict[str, Any] | None:
        """Return the facts for the probe's file, or None if there is no history."""
        if self._began_at is None:
            return None
        return {
            "history_from": self._began_at,
            "oom": self._reports.get("oom"),
            "requested": self._reports.get("requested"),
        }

    def begin(self, owner: object) -> None:
        """Make torch record its history if CUDA is initialised and the configuration allows it.

        `owner` is the worker or core, which has the configuration.
        """
        if self._began_at is not None or self._has_failed or not can_read_torch(owner):
            return
        torch_cuda = find_torch_cuda()
        if torch_cuda is None:
            return
        if not os.access(self._folder, os.W_OK | os.X_OK):
            self._has_failed = True
            _warn("no history is kept: %s is no folder that vLLM can write", self._folder)
            return
        try:
            # If vLLM's user is already recording a history, that recording stays unchanged and is
            # used here too.
            if not is_history_on():
                self._is_ours = True
                torch_cuda.memory._record_memory_history(  # noqa: SLF001 - torch's documented name
                    "all", context="alloc", stacks="python", max_entries=MAX_HISTORY_EVENTS
                )
        except Exception as error:  # noqa: BLE001 - vLLM serves without a history
            self._has_failed = True
            _warn("no history is kept: %s", f"{type(error).__name__}: {error}")
            return
        self._began_at = time.time()

    def end(self) -> None:
        """Make torch stop recording its history, unless vLLM's user started the recording."""
        if self._is_ours:
            find_cuda().memory._record_memory_history(None)  # noqa: SLF001 - torch's documented name
        self._has_failed = True
        self._began_at = None

    def take_oom(self, owner: object) -> TakenSnapshot | None:
        """Take the snapshot for an OutOfMemoryError; `tick` writes it later.

        Taking a snapshot here is safe. torch calls its observers without holding the allocator's
        lock. Returns None if no history is being recorded. Also returns None after the first
        OutOfMemoryError.
        """
        if self._began_at is None or self._has_taken_oom or not can_read_torch(owner):
            return None
        self._has_taken_oom = True
        self._taken_oom = _take("oom", None)
        return self._taken_oom

    def tick(
        self, probe_folder: str, name: str, rank: int | None, owner: object
    ) -> TakenSnapshot | None:
        """Write and return the snapshot from `take_oom` or, failing that, one that was requested.

        The file's name contains this process's `name` and `rank`. Returns None if there is nothing
        to write.
        """
        self.begin(owner)
        snapshot = self._taken_oom or self._take_requested(probe_folder, owner)
        if snapshot is not None:
            self._taken_oom = None
            self._save(snapshot, name if rank is None else f"rank{rank}-{name}")
        return snapshot

    def _save(self, snapshot: TakenSnapshot, place: str) -> None:
        """Write the snapshot, and keep the facts about it for the probe's file."""
        path = os.path.join(self._folder, f"{snapshot.kind}-{place}.pickle")  # noqa: PTH118
        report: dict[str, Any] = {
            "t": snapshot.taken_at,
            "file": path,
            "bytes": None,
            "pause_seconds": snapshot.pause_seconds,
            "request": snapshot.request_id,
            "problem": None,
            "largest": [],
        }
        self._reports[snapshot.kind] = report
        try:
            report["largest"] = list_largest(snapshot.content)
            _prune(self._folder, MAX_KEPT_SNAPSHOTS - 1)
            report["bytes"] = _write(path, snapshot.content)
        except Exception as error:  # noqa: BLE001 - without the snapshot the probe goes on
            report["problem"] = f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]
            _warn("no snapshot: %s", report["problem"])
        # In JSON, a non-ASCII letter in a path takes up to six bytes. A report with many such
        # letters may be too long.
        while report["largest"] and len(json.dumps(report)) > MAX_REPORT_BYTES:
            report["largest"].pop()

    def _take_requested(self, probe_folder: str, owner: object) -> TakenSnapshot | None:
        """Take the snapshot requested in the probe's folder.

        Returns None if there is no request.
        """
        if self._began_at is None or not can_read_torch(owner):
            return None
        request = read_request(probe_folder, REQUEST_NAME, FORMAT_FIELD)
        is_new = bool(request) and request["id"] != self._answered_id
        if not is_new or time.time() > request["until"]:
            return None
        self._answered_id = request["id"]
        return _take("requested", request["id"])


def find_torch_cuda() -> Any:  # noqa: ANN401 - torch's
    """Return torch.cuda if CUDA is initialised or this thread is initialising it, else None."""
    module = read_own(sys.modules.get("torch"), "cuda")
    # While torch initialises CUDA, it runs the calls queued until then, including ours.
    is_initialising = getattr(getattr(module, "_tls", None), "is_initializing", False)
    return module if is_initialising else find_cuda()


def _take(kind: str, request_id: str | None) -> TakenSnapshot:
    taken_at = time.time()
    start_seconds = time.perf_counter()
    content = find_cuda().memory._snapshot()  # noqa: SLF001 - torch's documented name
    pause_seconds = time.perf_counter() - start_seconds
    return TakenSnapshot(kind, taken_at, pause_seconds, content, request_id, threading.Event())


class Holding:
    """The memory that one line of code holds."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.n_blocks = 0
        self.since_seconds: float | None = float("inf")
        """When the line's oldest block was allocated, in seconds since the epoch. The value is None
        if the history no longer shows it.
        """

    def add(self, block: dict[str, Any], allocated_seconds: float | None) -> None:
        """Add a block.

        The time is None for blocks allocated before the oldest event in the history.
        """
        self.size_bytes += block["size"]
        self.n_blocks += 1
        if allocated_seconds is None or self.since_seconds is None:
            self.since_seconds = None
        else:
            self.since_seconds = min(self.since_seconds, allocated_seconds)


def list_largest(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of code that hold the most torch memory, largest first.

    For memory allocated before the history began, `file` and `line` are None.
    """
    allocated_seconds = _list_allocation_times(snapshot)
    holdings: dict[tuple[str | None, int | None], Holding] = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                place = _find_place(block.get("frames") or ())
                holding = holdings.setdefault(place, Holding())
                holding.add(block, allocated_seconds.get(block.get("address")))
    largest = sorted(holdings.items(), key=lambda item: -item[1].size_bytes)[:MAX_LARGEST]
    return [
        {
            "file": file,
            "line": line,
            "bytes": holding.size_bytes,
            "count": holding.n_blocks,
            "since": holding.since_seconds,
        }
        for (file, line), holding in largest
    ]


def _list_allocation_times(snapshot: dict[str, Any]) -> dict[int | None, float]:
    """Return when each address was last allocated, in seconds since the epoch."""
    times: dict[int | None, float] = {}
    for trace in snapshot["device_traces"]:
        for event in trace:
            if event["action"] == "alloc" and "time_us" in event:
                times[event["addr"]] = event["time_us"] / 1e6
    return times


def _find_place(frames: Any) -> tuple[str | None, int | None]:  # noqa: ANN401 - torch's
    """Return the path and line number of the innermost frame outside torch.

    If all frames are in torch, the innermost frame is used. The file and the line are None if there
    are no frames.
    """
    own_frames = (frame for frame in frames if not TORCH_CODE.search(frame["filename"]))
    frame = next(own_frames, frames[0] if frames else None)
    if frame is None:
        return None, None
    return frame["filename"][-MAX_PATH_CHARACTERS:], frame["line"]


class BoundedFile:
    """A file that a pickler writes to.

    The file raises an error if a snapshot is too large or too slow. The error aborts the snapshot.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.size_bytes = 0
        self._file = file
        self._end_seconds = time.monotonic() + MAX_WRITE_SECONDS

    def write(self, chunk: bytes) -> int:
        """Write a chunk; raise ValueError or TimeoutError if a limit is exceeded."""
        self.size_bytes += len(chunk)
        if self.size_bytes > MAX_SNAPSHOT_BYTES:
            raise ValueError(f"it has more than {MAX_SNAPSHOT_BYTES >> 20} MiB")
        if time.monotonic() > self._end_seconds:
            raise TimeoutError(f"it takes more than {MAX_WRITE_SECONDS:.0f} s")
        return self._file.write(chunk)


def _write(path: str, snapshot: dict[str, Any]) -> int:
    """Write the snapshot to a file and return its size in bytes.

    The file is written atomically, and only this user may read it.
    """
    unfinished = f"{path}.tmp"
    try:
        # Any old file is removed first. A pipe in its place would block, and a link would be
        # followed.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)  # noqa: PTH108
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o600), "wb") as file:  # noqa: PTH123
            bounded_file = BoundedFile(file)
            pickle.Pickler(bounded_file, PICKLE_PROTOCOL).dump(snapshot)
        os.replace(unfinished, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)  # noqa: PTH108
        raise
    return bounded_file.size_bytes


def _prune(folder: str, max_files: int) -> None:
    """Remove the oldest snapshots until `max_files` are left."""
    with os.scandir(folder) as entries:
        files = sorted(_list_snapshots(entries), reverse=True)
    for _, path in files[max_files:]:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def _list_snapshots(entries: Iterator[os.DirEntry[str]]) -> Iterator[tuple[float, str]]:
    """Yield the time and path of each snapshot, finished or not."""
    for entry in islice(entries, MAX_ENTRIES):
        # Another process may have removed the file in the meantime.
        with contextlib.suppress(OSError):
            if FILE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                yield entry.stat(follow_symlinks=False).st_mtime, entry.path


def _warn(text: str, detail: str) -> None:
    logging.getLogger("vllm.headroom_probe").warning(f"headroom probe: {text}", detail)  # noqa: G004
