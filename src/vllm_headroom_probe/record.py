"""Record allocations with tracemalloc and torch, on request and for a limited time."""

from __future__ import annotations

import json
import os
import sys
import time
import tracemalloc
from collections import defaultdict
from typing import Any, NamedTuple

from vllm_headroom_probe.folder import write_document
from vllm_headroom_probe.gpu import can_read_torch, find_cuda

REQUEST_NAME = "record.json"
"""The file in the shared folder through which a command requests a recording."""

FORMAT_FIELD = "headroom_record"
"""The field that identifies a request for a recording. Its value is the version of the format."""

MAX_RECORDING_SECONDS = 3600
"""The maximum duration of a recording, regardless of the request."""

UNATTENDED_SECONDS = 60
"""If a request's file is not touched for this long, the request lapses. Its recording then ends.
The command touches its request every few seconds.
"""

MAX_RECORDED_FRAMES = 8
"""The number of frames recorded per stack."""

MAX_STACKS = 20
"""The number of stacks in an answer. These are the stacks that hold the most memory."""

MAX_LINE_CHARACTERS = 200
"""The number of characters kept from a frame. These are the end of its path, and its line number.
"""

MAX_ANSWER_BYTES = 256 * 1024
"""The maximum size of an answer file."""

MAX_REQUEST_BYTES = 4096
"""The maximum number of bytes read from a request file."""

MAX_ID_CHARACTERS = 64
"""The number of characters kept from a request's ID."""

MAX_TRACER_BYTES = 128 << 20
"""The maximum amount of memory for tracemalloc itself. This is enough for about a million
allocations. Copying them at the end holds the GIL for about a second.
"""


class RequestFile(NamedTuple):
    """The start of a request file."""

    content: bytes
    changed_at: float
    """The time of the file's last modification (mtime), in seconds since the epoch."""


class Recording:
    """The recording in this process, if any."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._request: dict[str, Any] = {}
        """The request of the current recording; empty if there is none."""
        self._answered_id = ""
        """The ID of the last request that was answered."""
        self._started_at = 0.0
        """When the recording started, in seconds since the epoch."""
        self._notes: list[str] = []
        """Remarks on the recording, for the reader of the answer."""
        self._is_host_traced = False
        self._is_gpu_traced = False

    def tick(self, name: str, role: str, worker: object) -> None:
        """Start, continue or end the recording described by the request in the folder.

        `name` and `role` are those of this process. The answer file is named after `name`.
        """
        request = read_request(self._folder, REQUEST_NAME, FORMAT_FIELD)
        if self._request and request.get("id") != self._request["id"]:
            self.discard()
        if self._request:
            is_over = time.time() >= self._end_at
            is_costly = not is_over and self._is_costly()
            if is_costly:
                taken_mib = MAX_TRACER_BYTES >> 20
                self._notes.append(f"ended early: the recording itself took {taken_mib} MiB")
            if is_over or is_costly:
                self._answer(name, role)
            return
        is_new = bool(request) and request["id"] != self._answered_id
        if is_new and time.time() < request["until"]:
            self._start(request, worker)

    @property
    def _end_at(self) -> float:
        """Return when the recording ends, in seconds since the epoch."""
        return float(min(self._request["until"], self._started_at + MAX_RECORDING_SECONDS))

    def discard(self) -> None:
        """Stop recording without an answer."""
        self._request = {}
        self._stop_tracing()

    def _stop_tracing(self) -> None:
        """Stop any tracing started by this recording."""
        if self._is_host_traced:
            tracemalloc.stop()
        if self._is_gpu_traced:
            find_cuda().memory._record_memory_history(None)  # noqa: SLF001 - torch's documented name
        self._is_host_traced = False
        self._is_gpu_traced = False

    def _start(self, request: dict[str, Any], worker: object) -> None:
        """Start tracing host memory, GPU memory or both, according to the request."""
        self._request = request
        self._started_at = time.time()
        self._notes = []
        if request.get("host"):
            self._trace_host()
        if request.get("gpu"):
            self._trace_gpu(worker)

    def _trace_host(self) -> None:
        """Start tracemalloc, unless vLLM or its user has already started it."""
        if tracemalloc.is_tracing():
            self._notes.append("tracemalloc was on before and was left alone")
        else:
            tracemalloc.start(MAX_RECORDED_FRAMES)
            self._is_host_traced = True

    def _trace_gpu(self, worker: object) -> None:
        """Make torch record its allocations; do nothing in a process without a GPU."""
        torch_cuda = find_cuda()
        if torch_cuda is None:
            return
        if is_history_on():
            self._notes.append("torch's memory history was on before and was left alone")
        elif can_read_torch(worker):
            torch_cuda.memory._record_memory_history("state", context="state", stacks="python")  # noqa: SLF001
            self._is_gpu_traced = True
        else:
            self._notes.append(
                "GPU memory is not recorded where vLLM may sleep: it could stop the engine"
            )

    def _is_costly(self) -> bool:
        """Return whether tracemalloc itself takes too much memory."""
        return self._is_host_traced and tracemalloc.get_tracemalloc_memory() > MAX_TRACER_BYTES

    def _answer(self, name: str, role: str) -> None:
        """End the recording and write its result."""
        request_id = self._request["id"]
        answer = self._end() | {"id": request_id, "pid": os.getpid(), "role": role}
        self._answered_id = request_id
        self._request = {}
        write_document(self._folder, f"{name}.record.json", answer, MAX_ANSWER_BYTES)

    def _end(self) -> dict[str, Any]:
        """End the tracing; return the stacks that allocated the most memory since it started.

        Memory that has been freed does not count.
        """
        start_cpu_seconds = time.thread_time()
        # Copying the traced allocations holds the GIL. The duration is reported as the pause.
        start_seconds = time.perf_counter()
        tracer_bytes = tracemalloc.get_tracemalloc_memory() if self._is_host_traced else 0
        host_snapshot = tracemalloc.take_snapshot() if self._is_host_traced else None
        gpu_snapshot = find_cuda().memory._snapshot() if self._is_gpu_traced else None  # noqa: SLF001
        pause_seconds = time.perf_counter() - start_seconds
        self._stop_tracing()
        host_stacks = _list_host_stacks(host_snapshot) if host_snapshot else []
        gpu_stacks = _list_gpu_stacks(gpu_snapshot) if gpu_snapshot else []
        return {
            "headroom_record": 1,
            "began": self._started_at,
            "ended": time.time(),
            "cost": {
                "pause_seconds": pause_seconds,
                "cpu_seconds": time.thread_time() - start_cpu_seconds,
                "memory_bytes": tracer_bytes,
            },
            "host": host_stacks,
            "gpu": gpu_stacks,
            "note": "; ".join(self._notes) or None,
        }


def is_history_on() -> bool:
    """Return whether torch is known to be recording its memory history already."""
    is_on = getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_isHistoryEnabled", None)
    return is_on is not None and bool(is_on())


def read_request(folder: str, name: str, format_field: str) -> dict[str, Any]:
    """Return the request from a file in the folder.

    The result is empty if there is no valid request. The result is also empty if the file was not
    touched for UNATTENDED_SECONDS.
    """
    try:
        file = _read_start(os.path.join(folder, name))  # noqa: PTH118 - see folder
        request = json.loads(file.content)
        is_attended = abs(time.time() - file.changed_at) < UNATTENDED_SECONDS
        has_id = isinstance(request["id"], str)
        has_end = request["until"] + 0 > 0  # adding 0 raises TypeError unless the value is a number
        is_known = request[format_field] == 1
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    if not (is_known and has_id and has_end and is_attended):
        return {}
    return {**request, "id": request["id"][:MAX_ID_CHARACTERS]}


def _read_start(path: str) -> RequestFile:
    """Return the start of a file and its mtime.

    A FIFO is opened without waiting. Raises OSError if the file cannot be read or is a symlink.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        content = os.read(descriptor, MAX_REQUEST_BYTES)
        return RequestFile(content, os.fstat(descriptor).st_mtime)
    finally:
        os.close(descriptor)


def _list_host_stacks(snapshot: tracemalloc.Snapshot) -> list[dict[str, Any]]:
    """Return the stacks of Python's largest allocations, except the probe's own allocations."""
    probe_folder = os.path.dirname(__file__)  # noqa: PTH120
    stacks: list[dict[str, Any]] = []
    for statistic in snapshot.statistics("traceback"):
        frames = reversed(statistic.traceback)
        stack = [_format_frame(frame.filename, frame.lineno) for frame in frames]
        if not any(probe_folder in line for line in stack):
            stacks.append({"bytes": statistic.size, "count": statistic.count, "stack": stack})
        if len(stacks) == MAX_STACKS:
            break
    return stacks


def _list_gpu_stacks(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the call stacks that allocated the most of torch's memory in use.

    A block allocated before the recording has no stack and is omitted.
    """
    sizes_bytes: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            frames = block.get("frames") or ()
            if block["state"] == "active_allocated" and frames:
                stack = tuple(
                    _format_frame(frame["filename"], frame["line"])
                    for frame in frames[:MAX_RECORDED_FRAMES]
                )
                sizes_bytes[stack].append(block["size"])
    stacks: list[dict[str, Any]] = [
        {"bytes": sum(sizes), "count": len(sizes), "stack": list(stack)}
        for stack, sizes in sizes_bytes.items()
    ]
    stacks.sort(key=lambda stack: -stack["bytes"])
    return stacks[:MAX_STACKS]


def _format_frame(file_name: str, line: int) -> str:
    return f"{file_name}:{line}"[-MAX_LINE_CHARACTERS:]
