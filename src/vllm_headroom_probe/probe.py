"""Write the process's memory every few seconds on a thread that stops for good before it becomes a burden."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_headroom_probe import engine as vllm
from vllm_headroom_probe.folder import prune, read_start, replace
from vllm_headroom_probe.gpu import WorkerGpu
from vllm_headroom_probe.host import read_host
from vllm_headroom_probe.record import Recording

T = TypeVar("T")

INTERVAL_SECONDS = 5.0
SLOW_SECONDS = 0.05
"""CPU time of a reading, or the time of the allocator's call if longer: both hold the GIL."""
TOO_SLOW, FORGIVEN = 2.5, 0.01
"""The third slow reading stops the probe; a hundred fast ones cancel a slow one, so that weeks of service do not."""
FORK_SECONDS = 0.2
OOM_SECONDS = 0.05
"""The longest wait of a fork, or of an OutOfMemoryError, for a write, which takes 0.1 ms."""


def try_look(look: Callable[[], T | None]) -> T | None:
    """Return what a reading finds; None where vLLM or torch differs from the known versions."""
    try:
        return look()
    except Exception:  # noqa: BLE001 - any change there makes the fact absent, and vLLM serves on
        return None


class Probe:
    """One process's probe: `engine` finds vLLM's objects, `record` records allocations on request."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.engine, self.gpu, self.record = vllm.EngineObjects(), WorkerGpu(), Recording(folder)
        self._thread: threading.Thread | None = None
        self._wake, self._written = threading.Event(), threading.Event()
        self._rests = False
        self._stopped: str | None = None
        self._due = time.monotonic() + INTERVAL_SECONDS
        self._name, self._fixed, self._last = "", dict[str, Any](), dict[str, Any]()
        self._oom: dict[str, Any] | None = None
        self._slow = self._longest_seconds = self._cpu_seconds = 0.0

    def start(self) -> None:
        """Start the thread, also after `rest`; one that did not end is hanging, and no other is started."""
        if self._thread is not None and self._thread.is_alive():
            self._give_up("a write hung while vLLM forked")
        if self._stopped is None:
            self._rests = False
            self._wake.clear()
            self._thread = threading.Thread(target=self._run, name="headroom-probe", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """End the thread for a fork, waiting at most FORK_SECONDS."""
        self._rests = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(FORK_SECONDS)

    def note_oom(self, device: int, asked: int, total: int, free: int) -> None:
        """Write what is known before torch raises an OutOfMemoryError."""
        worker = self.engine.worker
        on_it = getattr(vllm.read_own(worker, "device"), "index", None) == device
        gpu = try_look(lambda: self.gpu.device(worker) if on_it else None) or {}
        requests = try_look(lambda: vllm.count_requests(self.engine.core)) or {}
        self._oom = {
            "t": time.time(),
            "uuid": gpu.get("uuid"),
            "asked": asked,
            "free": free,
            "total": total,
            **{name: gpu.get(name) for name in ("allocated", "reserved")},
            **{name: requests.get(name) for name in ("running", "waiting")},
            "seen": 1 + (self._oom or {}).get("seen", 0),
        }
        self._written.clear()
        self._wake.set()
        if self._stopped is None and self._thread is not None and self._thread.is_alive():
            self._written.wait(OOM_SECONDS)

    def _run(self) -> None:
        try:
            while not self._rests and self._stopped is None:
                self._wake.wait(max(0.0, self._due - time.monotonic()))
                self._wake.clear()
                if not self._rests:
                    self._tick()
                    self._due = time.monotonic() + INTERVAL_SECONDS
        except OSError as error:
            self._stop(f"{error.filename or self.folder}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - an error of the probe ends the probe, never vLLM
            self._stop(f"{type(error).__name__}: {error}")

    def _tick(self) -> None:
        began = time.thread_time()
        self.gpu.call_seconds = 0.0
        document = self._look()
        seconds = max(time.thread_time() - began, self.gpu.call_seconds)
        self._longest_seconds = max(self._longest_seconds, seconds)
        self._slow = self._slow + 1 if seconds > SLOW_SECONDS else max(0.0, self._slow - FORGIVEN)
        costs = {"longest_seconds": self._longest_seconds, "cpu_seconds": self._cpu_seconds}
        self._last = document | {"cost": {"last_seconds": seconds} | costs}
        replace(self.folder, f"{self._name}.json", self._last)
        self._written.set()
        self.record.tick(self._name, document["role"], self.engine.worker)
        self._cpu_seconds += time.thread_time() - began
        if self._slow > TOO_SLOW:
            self._stop(
                f"three looks took more than {SLOW_SECONDS * 1000:.0f} ms, one {self._longest_seconds:.3f} s"
            )

    def _look(self) -> dict[str, Any]:
        """Return the current facts; None where unknown."""
        if not self._fixed:
            self._fixed = self._identity()
        if not self.engine.is_known:
            try_look(self.engine.search_main)
        worker, core = try_look(lambda: self.engine.worker), try_look(lambda: self.engine.core)
        device = try_look(lambda: self.gpu.device(worker))
        name = multiprocessing.current_process().name
        return {
            **self._fixed,
            "sequence": self._last.get("sequence", 0) + 1,
            "t": time.time(),
            "role": try_look(lambda: vllm.find_role(self.engine, name)) or "other",
            "process_name": name[:64],
            "stopped": None,
            **(try_look(lambda: vllm.read_ranks(self.engine)) or {}),
            "devices": [] if device is None else [device],
            "parts": try_look(lambda: self.gpu.parts(worker)),
            "scheduler": try_look(lambda: vllm.read_scheduler(core)),
            "host": try_look(read_host),
            "oom": self._oom,
        }

    def _identity(self) -> dict[str, Any]:
        """Return the constant facts; prune the folder and set the file's name."""
        prune(self.folder)
        since_boot, began = read_start()
        self._name = f"{os.getpid()}-{int(began)}"
        with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123 - see folder
            boot_id = file.read().strip()
        versions = {
            each: vllm.read_own(sys.modules.get(each), "__version__") for each in ("vllm", "torch")
        }
        return {
            "headroom_probe": 1,
            "interval_seconds": INTERVAL_SECONDS,
            "pid": os.getpid(),
            "started_at": began,
            "started_since_boot": since_boot,
            "boot_id": boot_id,
            **{
                each: None if version is None else str(version)[:64]
                for each, version in versions.items()
            },
        }

    def _stop(self, why: str) -> None:
        """Stop for good, with the reason in the file if it can be written."""
        self._give_up(why)
        with contextlib.suppress(Exception):
            if self._last:
                replace(
                    self.folder,
                    f"{self._name}.json",
                    self._last | {"t": time.time(), "stopped": self._stopped},
                )

    def _give_up(self, why: str) -> None:
        self._stopped = " ".join(why.split())[:200]
        with contextlib.suppress(Exception):
            logging.getLogger("vllm.headroom_probe").warning(
                "headroom probe: stopped for good: %s", self._stopped
            )
        with contextlib.suppress(Exception):
            self.record.forget()
