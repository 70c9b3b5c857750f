"""Run the probe on a thread, and stop it before it becomes a burden."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_headroom_probe import engine as vllm
from vllm_headroom_probe.folder import prune, read_start, write_document
from vllm_headroom_probe.gpu import WorkerGpu, read_pinned
from vllm_headroom_probe.host import read_host
from vllm_headroom_probe.record import Recording

if TYPE_CHECKING:
    from vllm_headroom_probe.peaks import Peaks
    from vllm_headroom_probe.snapshot import Snapshots

T = TypeVar("T")

INTERVAL_SECONDS = 5.0
"""The time between two readings."""

SLOW_READING_SECONDS = 0.05
"""A reading is slow if it takes more CPU time than this. It is also slow if the call to the
allocator takes longer. Both hold the GIL.
"""

MAX_SLOW_READINGS = 2.5
"""The probe stops when the count of slow readings exceeds this number. This happens at the third
slow reading.
"""

FORGIVEN_PER_READING = 0.01
"""How much a fast reading reduces the count of slow ones. A hundred fast readings cancel a slow
one. Slow readings therefore do not add up over weeks of service.
"""

MAX_FORK_WAIT_SECONDS = 0.2
"""The maximum time that a fork in vLLM waits for the thread to end."""

MAX_OOM_WAIT_SECONDS = 0.05
"""The maximum time that an OutOfMemoryError waits for the file. Writing the file takes 0.1 ms."""

MAX_SNAPSHOT_WAIT_SECONDS = 12.0
"""The maximum time that an OutOfMemoryError waits for the snapshot to be written. Writing itself
ends after 10 s.
"""

MAX_NAME_CHARACTERS = 64
"""Names of processes and versions of packages are cut to this many characters."""

MAX_REASON_CHARACTERS = 200
"""The number of characters of the reason for stopping that are written to the file."""


def read_or_none(read: Callable[[], T | None]) -> T | None:
    """Return what `read` returns, or None if it raises.

    It may raise in an unknown torch version.
    """
    try:
        return read()
    except Exception:  # noqa: BLE001 - with any error the fact is absent, and vLLM continues to serve
        return None


class Probe:
    """One process's probe."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.engine = vllm.EngineObjects()
        self.gpu = WorkerGpu()
        self.recording = Recording(folder)
        self.peaks = _build_peaks()
        self.snapshots = _build_snapshots()
        # The fields of the thread.
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_written = threading.Event()
        self._is_paused = False
        self._stop_reason: str | None = None
        self._due_seconds = time.monotonic() + INTERVAL_SECONDS
        # The fields of the file.
        self._name = ""
        """The file's name without `.json`; empty before the first reading."""
        self._identity: dict[str, Any] = {}
        """The facts that never change; empty before the first reading."""
        self._document: dict[str, Any] = {}
        """The content of the file as last written."""
        self._oom: dict[str, Any] | None = None
        """The newest OutOfMemoryError, or None if there was none."""
        # The fields about the probe's cost.
        self._slow_readings = 0.0
        """The number of slow readings, minus those cancelled by fast readings."""
        self._longest_seconds = 0.0
        """The duration of the slowest reading."""
        self._cpu_seconds = 0.0
        """The CPU time of all readings."""

    def start(self) -> None:
        """Start the thread, or restart it after `pause`.

        A thread that did not end during `pause` is hanging. In that case, the probe stops instead
        of starting another thread.
        """
        if self._thread is not None and self._thread.is_alive():
            self._mark_stopped("a write hung while vLLM forked")
        if self._stop_reason is None:
            self._is_paused = False
            self._wake.clear()
            self._thread = threading.Thread(target=self._run, name="headroom-probe", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """End the thread for a fork, within MAX_FORK_WAIT_SECONDS."""
        self._is_paused = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(MAX_FORK_WAIT_SECONDS)

    def begin_history(self, frame: FrameType | None) -> None:
        """Make torch record its memory history, if snapshots are requested.

        torch calls this when it initialises CUDA. `frame` is the caller's frame. One of the frames
        above the caller holds the worker or core, which has the configuration.
        """
        if self.snapshots is not None:
            self.engine.search(frame)
            self.snapshots.begin(self.engine.worker or self.engine.core)

    def report_oom(
        self, device: int, requested_bytes: int, total_bytes: int, free_bytes: int
    ) -> None:
        """Write torch's figures to the file before torch raises an OutOfMemoryError.

        torch calls this in the thread that needs the memory. This thread waits at most
        MAX_OOM_WAIT_SECONDS for the write. Nothing is written if the probe is not running.
        """
        worker = self.engine.worker
        gpu: dict[str, Any] = {}
        if getattr(vllm.read_own(worker, "device"), "index", None) == device:
            gpu = read_or_none(lambda: self.gpu.read_device(worker)) or {}
        requests = read_or_none(lambda: vllm.count_requests(self.engine.core)) or {}
        previous_oom = self._oom or {}
        self._oom = {
            "t": time.time(),
            "uuid": gpu.get("uuid"),
            "asked": requested_bytes,
            "free": free_bytes,
            "total": total_bytes,
            "allocated": gpu.get("allocated"),
            "reserved": gpu.get("reserved"),
            "running": requests.get("running"),
            "waiting": requests.get("waiting"),
            "seen": previous_oom.get("seen", 0) + 1,
        }
        peaks = self.peaks
        if peaks is not None:
            self._oom["step"] = read_or_none(peaks.describe_current)
        self._is_written.clear()
        is_running = (
            self._stop_reason is None and self._thread is not None and self._thread.is_alive()
        )
        snapshots = self.snapshots
        taken_snapshot = None
        if is_running and snapshots is not None:
            owner = worker or self.engine.core
            taken_snapshot = read_or_none(lambda: snapshots.take_oom(owner))
        self._wake.set()
        if is_running:
            self._is_written.wait(MAX_OOM_WAIT_SECONDS)
        if taken_snapshot is not None:
            taken_snapshot.is_settled.wait(MAX_SNAPSHOT_WAIT_SECONDS)

    def _run(self) -> None:
        """Read and write once per interval until paused or stopped.

        Any error stops the probe.
        """
        try:
            while not self._is_paused and self._stop_reason is None:
                self._wake.wait(max(0.0, self._due_seconds - time.monotonic()))
                self._wake.clear()
                if not self._is_paused:
                    self._tick()
                    self._due_seconds = time.monotonic() + INTERVAL_SECONDS
        except OSError as error:
            self._stop(f"{error.filename or self.folder}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - an error of the probe ends the probe, never vLLM
            self._stop(f"{type(error).__name__}: {error}")

    def _tick(self) -> None:
        """Read the facts, write the file and continue any recording.

        If readings are slow, the probe stops.
        """
        start_seconds = time.thread_time()
        self.gpu.call_seconds = 0.0
        document = self._read_document()
        cpu_seconds = time.thread_time() - start_seconds
        reading_seconds = max(cpu_seconds, self.gpu.call_seconds)
        self._rate_reading(reading_seconds)
        document["cost"] = {
            "last_seconds": reading_seconds,
            "longest_seconds": self._longest_seconds,
            "cpu_seconds": self._cpu_seconds,
        }
        self._document = document
        write_document(self.folder, f"{self._name}.json", document)
        self._is_written.set()
        self.recording.tick(self._name, document["role"], self.engine.worker)
        if self.snapshots is not None:
            self._tick_snapshots(self.snapshots)
        self._cpu_seconds += time.thread_time() - start_seconds
        if self._slow_readings > MAX_SLOW_READINGS:
            self._stop(
                f"three looks took more than {SLOW_READING_SECONDS * 1000:.0f} ms,"
                f" one {self._longest_seconds:.3f} s"
            )

    def _tick_snapshots(self, snapshots: Snapshots) -> None:
        """Begin the history, or write a snapshot and add it to the probe's file."""
        owner = self.engine.worker or self.engine.core
        rank = self._document.get("rank")
        snapshot = read_or_none(lambda: snapshots.tick(self.folder, self._name, rank, owner))
        if snapshot is None:
            return
        try:
            self._document["snapshot"] = snapshots.describe()
            write_document(self.folder, f"{self._name}.json", self._document)
        finally:
            snapshot.is_settled.set()

    def _rate_reading(self, reading_seconds: float) -> None:
        """Increase the count of slow readings.

        A fast reading reduces the count a little.
        """
        self._longest_seconds = max(self._longest_seconds, reading_seconds)
        if reading_seconds > SLOW_READING_SECONDS:
            self._slow_readings += 1
        else:
            self._slow_readings = max(0.0, self._slow_readings - FORGIVEN_PER_READING)

    def _read_document(self) -> dict[str, Any]:
        """Return the file's content with the current facts; unknown facts are None."""
        if not self._identity:
            self._identity = self._read_identity()
        if not self.engine.is_complete:
            read_or_none(self.engine.search_main)
        worker = read_or_none(lambda: self.engine.worker)
        core = read_or_none(lambda: self.engine.core)
        device = read_or_none(lambda: self.gpu.read_device(worker))
        peaks = self.peaks
        if peaks is not None:
            read_or_none(lambda: peaks.attach(worker))
        process_name = multiprocessing.current_process().name
        return {
            **self._identity,
            "sequence": self._document.get("sequence", 0) + 1,
            "t": time.time(),
            "role": read_or_none(lambda: vllm.find_role(self.engine, process_name)) or "other",
            "process_name": process_name[:MAX_NAME_CHARACTERS],
            "stopped": None,
            **(read_or_none(lambda: vllm.read_ranks(self.engine)) or {}),
            "devices": [] if device is None else [device],
            "parts": read_or_none(lambda: self.gpu.read_parts(worker)),
            "scheduler": read_or_none(lambda: vllm.read_scheduler(core)),
            "host": read_or_none(read_host),
            "pinned": read_or_none(read_pinned),
            "oom": self._oom,
            **({} if peaks is None else {"peaks": read_or_none(peaks.describe)}),
            **self._describe_snapshots(),
        }

    def _describe_snapshots(self) -> dict[str, Any]:
        """Return the facts about the memory history, or an empty dictionary if there is none."""
        facts = None if self.snapshots is None else self.snapshots.describe()
        return {} if facts is None else {"snapshot": facts}

    def _read_identity(self) -> dict[str, Any]:
        """Return the facts that never change, remove old files, and set the file's name.

        Raises OSError or ValueError if /proc or the folder cannot be read.
        """
        prune(self.folder)
        started_since_boot, started_at = read_start()
        self._name = f"{os.getpid()}-{int(started_at)}"
        with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123 - see folder
            boot_id = file.read().strip()
        return {
            "headroom_probe": 1,
            "interval_seconds": INTERVAL_SECONDS,
            "pid": os.getpid(),
            "started_at": started_at,
            "started_since_boot": started_since_boot,
            "boot_id": boot_id,
            "vllm": _read_version("vllm"),
            "torch": _read_version("torch"),
        }

    def _stop(self, reason: str) -> None:
        """Stop for good, and write the reason to the file if possible."""
        self._mark_stopped(reason)
        with contextlib.suppress(Exception):
            if self._document:
                document = self._document | {"t": time.time(), "stopped": self._stop_reason}
                write_document(self.folder, f"{self._name}.json", document)

    def _mark_stopped(self, reason: str) -> None:
        """Set the reason, which ends the thread; log it, and end all recordings."""
        self._stop_reason = " ".join(reason.split())[:MAX_REASON_CHARACTERS]
        with contextlib.suppress(Exception):
            logger = logging.getLogger("vllm.headroom_probe")
            logger.warning("headroom probe: stopped for good: %s", self._stop_reason)
        with contextlib.suppress(Exception):
            self.recording.discard()
        with contextlib.suppress(Exception):
            if self.peaks is not None:
                self.peaks.detach()
        with contextlib.suppress(Exception):
            if self.snapshots is not None:
                self.snapshots.end()


def _build_peaks() -> Peaks | None:
    """Return the object that measures peaks of steps, or None if it is not configured."""
    if os.environ.get("HEADROOM_PROBE_PEAKS") != "on":
        return None
    # The import is here, so that the probe loads it only if it is configured.
    from vllm_headroom_probe.peaks import Peaks  # noqa: PLC0415

    return Peaks()


def _build_snapshots() -> Snapshots | None:
    """Return the object that manages torch's memory history, or None if it is not configured."""
    folder = os.environ.get("HEADROOM_PROBE_SNAPSHOT")
    if not folder:
        return None
    # The import is here, so that the probe loads it only if it is configured.
    from vllm_headroom_probe.snapshot import Snapshots  # noqa: PLC0415

    return Snapshots(folder)


def _read_version(package: str) -> str | None:
    """Return a package's version, or None if this process has not imported the package."""
    version = vllm.read_own(sys.modules.get(package), "__version__")
    return None if version is None else str(version)[:MAX_NAME_CHARACTERS]
