"""Record allocations with tracemalloc and torch, on request and for a limited time."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections import defaultdict
from typing import Any

from vllm_headroom_probe.folder import replace
from vllm_headroom_probe.gpu import can_ask_torch, find_cuda

REQUEST = "record.json"
LONGEST_SECONDS = 3600
UNATTENDED_SECONDS = 60
"""The requester touches the request every few seconds; without it the recording ends."""
FRAMES = 8
STACKS = 20
LARGEST_BYTES = 256 * 1024
LARGEST_REQUEST_BYTES = 4096
MOST_MEMORY_BYTES = 128 << 20
"""Of tracemalloc, for about a million allocations: copying them at the end holds the GIL for about a second."""


class Recording:
    """The recording in this process, if any."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._asked: dict[str, Any] = {}
        self._answered = ""
        self._began = 0.0
        self._notes: list[str] = []
        self._host = self._gpu = False

    def tick(self, name: str, role: str, worker: object) -> None:
        """Start, continue or end the recording that the folder's request asks for."""
        asked = _read_request(self._folder)
        if self._asked and asked.get("id") != self._asked["id"]:
            self.forget()
        if (
            not self._asked
            and asked
            and asked["id"] != self._answered
            and time.time() < asked["until"]
        ):
            self._begin(asked, worker)
        elif self._asked and (time.time() >= self._until or self._is_costly()):
            answer = self._end() | {"id": self._asked["id"], "pid": os.getpid(), "role": role}
            self._answered, self._asked = self._asked["id"], {}
            replace(self._folder, f"{name}.record.json", answer, LARGEST_BYTES)

    @property
    def _until(self) -> float:
        return float(min(self._asked["until"], self._began + LONGEST_SECONDS))

    def forget(self) -> None:
        """Stop recording without an answer."""
        self._asked = {}
        self._off()

    def _off(self) -> None:
        if self._host:
            tracemalloc.stop()
        if self._gpu:
            find_cuda().memory._record_memory_history(None)  # noqa: SLF001 - torch's documented name
        self._host = self._gpu = False

    def _begin(self, asked: dict[str, Any], worker: object) -> None:
        self._asked, self._began, self._notes = asked, time.time(), []
        if asked.get("host") and tracemalloc.is_tracing():
            self._notes.append("tracemalloc was on before and was left alone")
        elif asked.get("host"):
            tracemalloc.start(FRAMES)
            self._host = True
        if asked.get("gpu") and find_cuda() is not None and not can_ask_torch(worker):
            self._notes.append(
                "GPU memory is not recorded where vLLM may sleep: it could stop the engine"
            )
        elif asked.get("gpu") and find_cuda() is not None:
            find_cuda().memory._record_memory_history("state", context="state", stacks="python")  # noqa: SLF001
            self._gpu = True

    def _is_costly(self) -> bool:
        if not self._host or tracemalloc.get_tracemalloc_memory() <= MOST_MEMORY_BYTES:
            return False
        self._notes.append(f"ended early: the recording itself took {MOST_MEMORY_BYTES >> 20} MiB")
        return True

    def _end(self) -> dict[str, Any]:
        """Return the stacks that allocated most of what is still held since the start."""
        cpu_seconds, began = time.thread_time(), time.perf_counter()
        memory_bytes = tracemalloc.get_tracemalloc_memory() if self._host else 0
        traced = tracemalloc.take_snapshot() if self._host else None
        blocks = find_cuda().memory._snapshot() if self._gpu else None  # noqa: SLF001
        pause_seconds = time.perf_counter() - began
        self._off()
        host, gpu = (
            _list_host_stacks(traced) if traced else [],
            _list_gpu_stacks(blocks) if blocks else [],
        )
        return {
            "headroom_record": 1,
            "began": self._began,
            "ended": time.time(),
            "cost": {
                "pause_seconds": pause_seconds,
                "cpu_seconds": time.thread_time() - cpu_seconds,
                "memory_bytes": memory_bytes,
            },
            "host": host,
            "gpu": gpu,
            "note": "; ".join(self._notes) or None,
        }


def _read_request(folder: str) -> dict[str, Any]:
    """Return the request in the folder, empty without a valid one."""
    try:
        content, written = _read(os.path.join(folder, REQUEST))  # noqa: PTH118 - see folder
        asked = json.loads(content)
        attended = abs(time.time() - written) < UNATTENDED_SECONDS
        usable = (
            asked["headroom_record"] == 1
            and isinstance(asked["id"], str)
            and asked["until"] + 0 > 0
            and attended
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return {**asked, "id": asked["id"][:64]} if usable else {}


def _read(path: str) -> tuple[bytes, float]:
    """Return a file's first bytes and its time of change; raise OSError for a link, and do not wait for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, LARGEST_REQUEST_BYTES), os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _list_host_stacks(traced: tracemalloc.Snapshot) -> list[dict[str, Any]]:
    found = []
    for statistic in traced.statistics("traceback"):
        stack = [
            f"{frame.filename}:{frame.lineno}"[-200:] for frame in reversed(statistic.traceback)
        ]
        if not any(os.path.dirname(__file__) in line for line in stack):  # noqa: PTH120
            found.append({"bytes": statistic.size, "count": statistic.count, "stack": stack})
        if len(found) == STACKS:
            break
    return found


def _list_gpu_stacks(blocks: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stacks of torch's blocks; a block from before the recording has none."""
    held: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for segment in blocks["segments"]:
        for block in segment["blocks"]:
            frames = block.get("frames") or ()
            if block["state"] == "active_allocated" and frames:
                stack = tuple(
                    f"{frame['filename']}:{frame['line']}"[-200:] for frame in frames[:FRAMES]
                )
                held[stack].append(block["size"])
    most = sorted(held.items(), key=lambda item: -sum(item[1]))[:STACKS]
    return [
        {"bytes": sum(sizes), "count": len(sizes), "stack": list(stack)} for stack, sizes in most
    ]
