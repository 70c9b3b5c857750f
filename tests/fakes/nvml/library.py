"""Builds the fake NVML library, steers it while it runs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import uuid4

import pynvml
import pytest

GIB: Final = 2**30
MIB: Final = 2**20
SONAME: Final = "libnvidia-ml.so.1"
SOURCE: Final = Path(__file__).with_name("libnvidia-ml.c")


def build(folder: Path, *, no_v2: bool = False) -> Path:
    """Compile the library into `folder` and return its path; skip the test where there is no C compiler.

    `no_v2` leaves out nvmlDeviceGetMemoryInfo_v2, as drivers before 510 do.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler named cc: the fake NVML library cannot be built")
    folder.mkdir(parents=True, exist_ok=True)
    library, unfinished = folder / SONAME, folder / f"{SONAME}.{uuid4()}"
    options = ["-O1", "-fPIC", "-shared", "-pthread", f"-Wl,-soname,{SONAME}", *(["-DNO_V2"] if no_v2 else [])]
    subprocess.run([compiler, *options, "-o", str(unfinished), str(SOURCE)], check=True)
    return unfinished.replace(library)


def built(*, no_v2: bool = False) -> Path:
    """Return the path of a library that is compiled once per version of its source."""
    version = hashlib.sha256(SOURCE.read_bytes() + SOURCE.with_name("ledger.h").read_bytes()).hexdigest()[:12]
    name = f"fake-nvml-{os.getuid()}-{version}{'-no-v2' if no_v2 else ''}"
    library = Path(tempfile.gettempdir()) / name / SONAME
    return library if library.exists() else build(library.parent, no_v2=no_v2)


@dataclass(slots=True, kw_only=True)
class FakeDevice:
    """A GPU or a MIG instance; what is None is not supported.

    `memory_bytes` is total, used and reserved; `errors` and `hangs` map a C function, or "all", to a code or seconds.
    `processes` and `clients`, those of MPS, map pids to bytes, None where these are not reported.
    `ecc` is whether ECC is on now and after the next reset, `rows` whether a row remapping is pending and has failed.
    `linked` is whether NVLink connects it with all others for which that is so too.
    """

    uuid: str
    name: str | None = "NVIDIA H100 80GB HBM3"
    total_bytes: int | None = 80 * GIB
    used_bytes: int = 0
    reserved_bytes: int = 600 * MIB
    utilization_percent: int | None = None
    temperature_celsius: int | None = None
    power_milliwatts: int | None = None
    ecc: tuple[bool, bool] | None = None
    rows: tuple[bool, bool] | None = None
    pages_pending: bool | None = None
    linked: bool = True
    processes: dict[int, int | None] = field(default_factory=dict)
    clients: dict[int, int | None] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    hangs: dict[str, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the facts as lines of the control file."""
        facts = {
            "name": self.name,
            "memory": self.total_bytes and f"{self.total_bytes} {self.used_bytes} {self.reserved_bytes}",
            "utilization": self.utilization_percent,
            "temperature": self.temperature_celsius,
            "power": self.power_milliwatts,
            "ecc": self.ecc and _flags(*self.ecc),
            "rows": self.rows and _flags(*self.rows),
            "pages": None if self.pages_pending is None else _flags(self.pages_pending),
            "linked": _flags(self.linked),
        }
        return [
            *(f"{fact} {value}" for fact, value in facts.items() if value is not None),
            *(f"process {pid} {'N/A' if used is None else used}" for pid, used in self.processes.items()),
            *(f"client {pid} {'N/A' if used is None else used}" for pid, used in self.clients.items()),
            *_faults(self.errors, self.hangs),
        ]


@dataclass(slots=True, kw_only=True)
class FakeInstance(FakeDevice):
    """A MIG instance; `gpu_instance` is its GPU instance id."""

    gpu_instance: int
    name: str | None = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    total_bytes: int | None = 10 * GIB
    reserved_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class FakeGpu(FakeDevice):
    """A GPU; `mig` is None where MIG is not supported; `xids` holds every XID so far, with its GPU instance or None."""

    mig: bool | None = None
    instances: list[FakeInstance] = field(default_factory=list)
    xids: list[tuple[int, int | None]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the facts as lines of the control file, those of the instances last."""
        lines = [f"gpu {self.uuid}", *FakeDevice.lines(self)]
        if self.mig is not None:
            lines.append(f"mig {'on' if self.mig else 'off'}")
        lines += [f"xid {xid}" if instance is None else f"xid {xid} {instance}" for xid, instance in self.xids]
        for instance in self.instances:
            lines += [f"instance {instance.uuid} {instance.gpu_instance}", *instance.lines()]
        return lines


class FakeNvml:
    """What the library says: change the fields, then `write`; a reader sees all of the change or nothing of it."""

    def __init__(self, folder: Path, gpus: list[FakeGpu] | None = None, *, no_v2: bool = False) -> None:
        self.gpus = gpus if gpus is not None else [FakeGpu(uuid="GPU-0000")]
        self.driver: str | None = "580.95.05"
        self.errors: dict[str, int] = {}
        self.hangs: dict[str, float] = {}
        self._folder = folder
        self._file = folder / "nvml.txt"
        self._calls = folder / "nvml-calls.txt"
        self._built = built(no_v2=no_v2)
        self.write()

    def write(self) -> None:
        """Make the library say what the fields say, from its next call on."""
        lines = [f"calls {self._calls}", *([f"driver {self.driver}"] if self.driver else [])]
        lines += _faults(self.errors, self.hangs)
        lines += [line for gpu in self.gpus for line in gpu.lines()]
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.replace(self._file)

    def calls(self) -> list[str]:
        """Return every call so far as "FUNCTION UUID", "-" for a call without a device."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def forget_calls(self) -> None:
        """Begin to record calls again."""
        self._calls.unlink(missing_ok=True)

    def environment(self) -> dict[str, str]:
        """Return the variables that make a new process use this library."""
        return {"LD_LIBRARY_PATH": str(self._built.parent), "NVML_FAKE_FILE": str(self._file)}

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this process use the library for the rest of the test: a fresh copy, so that no state is inherited."""
        copy = shutil.copy(self._built, self._folder / SONAME)
        monkeypatch.setenv("NVML_FAKE_FILE", str(self._file))
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(copy)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def _faults(errors: dict[str, int], hangs: dict[str, float]) -> list[str]:
    return [
        *(f"error {function} {code}" for function, code in errors.items()),
        *(f"hang {function} {seconds}" for function, seconds in hangs.items()),
    ]


def _flags(*flags: bool) -> str:
    return " ".join(str(int(flag)) for flag in flags)
