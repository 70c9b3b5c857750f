"""A file of state, in a folder that is one daemon's at a time: always the old state or the new one, as a whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.leak.inside import moved
from vllm_headroom.derive.leak.leak import LeakMemory, LoadState, Tracks
from vllm_headroom.derive.life.lives import Lives
from vllm_headroom.derive.per_request import Baselines
from vllm_headroom.derive.readings import finished, life, named
from vllm_headroom.expose.view import KeptHistory
from vllm_headroom.model import EnginePage, Failure, Snapshot
from vllm_headroom.trace.recorder import make, put

COUNTED_SECONDS: Final = 300.0
"""A counter alone vouches for a gap of this length. Nothing is said of growth before ten minutes of work, and a new
engine does not catch up with ten minutes of work in five, less its start."""


class Identity(Struct, frozen=True, kw_only=True):
    """What names an engine and its life: its models, when it started and how far it has counted, where it says so."""

    models: tuple[str, ...]
    life: str | None
    finished_total: float | None


def identity(page: EnginePage | Failure) -> Identity | None:
    """Return whose page it is; None while no engine on it has a name."""
    if isinstance(page, Failure) or not named(page):
        return None
    models = sorted({engine.model_name for engine in named(page)})
    return Identity(models=tuple(models), life=life(page), finished_total=finished(page))


def foreign(saved: Identity, now: Identity, gap_seconds: float) -> str | None:
    """Return why this is not the life that was saved; None when it is.

    Without a start time on both sides the counter has to vouch: it must be known, go on and not for too long.
    """
    if now.models != saved.models:
        return f"it is of another model ({', '.join(saved.models)})"
    if now.life != saved.life:
        return "it is of another engine, or of the time before the engine's restart"
    if now.life is not None:
        return None
    if saved.finished_total is None or now.finished_total is None or now.finished_total < saved.finished_total:
        return "the engine tells no start time and its count of requests does not go on from there"
    if gap_seconds > COUNTED_SECONDS:
        return (
            f"the engine tells no start time and {gap_seconds:.0f} s are too long a gap to go by its count of requests"
        )
    return None


FORMAT: Final = 10
"""To be raised when the fields of a state, or what they mean, change."""

LOAD_GAP_SECONDS: Final = 60.0
"""Load that was not seen for longer than one of its minutes cannot be said to have been level."""

STALE_SECONDS: Final = 86400.0
"""As long as the detector itself remembers a device that it does not see."""

FUTURE_SECONDS: Final = 300.0
"""Clocks of machines differ by less; beyond that the age of the file is not known."""


class Memory(Struct, frozen=True, kw_only=True):
    """The states that survive, under the names of their derivations."""

    leak: LeakMemory = field(default_factory=LeakMemory)
    baseline: Baselines = field(default_factory=Baselines)


class SavedState(Struct, frozen=True, kw_only=True):
    """A memory with the engine it is of, and when it was saved: in seconds since the epoch and on the clock it uses."""

    version: str
    saved_at_seconds: float
    monotonic_seconds: float
    identity: Identity
    memory: Memory


def visible(snapshot: Snapshot) -> set[str]:
    """Return the UUIDs of the GPUs that NVML shows."""
    return {gpu.reading.uuid for gpu in snapshot.devices}


def taken_up(saved: SavedState, snapshot: Snapshot) -> Memory:
    """Return the memory as if this process had slept since it was saved, for the GPUs that are visible.

    The monotonic clock starts anew with each machine, and the downtime is a gap on it.
    """
    here = visible(snapshot)
    gap = max(0.0, snapshot.time_seconds - saved.saved_at_seconds)
    shift = snapshot.monotonic_seconds - gap - saved.monotonic_seconds
    leak, baseline = saved.memory.leak, saved.memory.baseline
    gpus, load = {uuid: track for uuid, track in leak.gpus.items() if uuid in here}, leak.load
    if load.began_seconds is not None:
        load = replace(load, began_seconds=load.began_seconds + shift)
    return Memory(
        leak=LeakMemory(
            load=load if gap <= LOAD_GAP_SECONDS else LoadState(),
            gpus=_moved(gpus, shift),
            host=_moved(leak.host, shift),
            inside={uuid: moved(track, shift) for uuid, track in leak.inside.items() if uuid in here},
            sleep=replace(leak.sleep, since_seconds=None),
            asleep=_moved({uuid: track for uuid, track in leak.asleep.items() if uuid in here}, shift),
        ),
        baseline=replace(baseline, bands={uuid: bands for uuid, bands in baseline.bands.items() if uuid in here}),
    )


def refusal(saved: SavedState, snapshot: Snapshot) -> str | None:
    """Return why the saved state cannot be this engine's; None when it is, or when that is not known yet."""
    age = snapshot.time_seconds - saved.saved_at_seconds
    if age > STALE_SECONDS:
        return f"it is {age / 3600:.0f} h old"
    if age < -FUTURE_SECONDS:
        return f"it is from the future, by {-age:.0f} s: a clock was wrong"
    now = identity(snapshot.engines)
    if now is not None and (reason := foreign(saved.identity, now, age)):
        return reason
    gpus = saved.memory.leak.gpus
    if gpus and tells_gpus(saved, snapshot) and not visible(snapshot) & set(gpus):
        return f"it is of other GPUs ({', '.join(gpus)})"
    return None


def tells_gpus(saved: SavedState, snapshot: Snapshot) -> bool:
    """Return whether it can be told which of its GPUs are here: one that does not open yet may be any of them."""
    missing = saved.memory.leak.gpus.keys() - visible(snapshot)
    return not missing or not (isinstance(snapshot.gpus, Failure) or "" in visible(snapshot))


def _moved(tracks: Tracks, shift: float) -> Tracks:
    return {name: replace(track, clock=track.clock + shift) for name, track in tracks.items()}


class Lock:
    """A folder that this process has to itself from when it is free until the process ends; `is_ours` tells which.

    It is the folder itself that is locked: that takes no room, and nothing can be put in the place of a file. Where it
    cannot be opened or its file system knows no locks there is none: what is kept is worth more.
    """

    def __init__(self) -> None:
        self.is_ours = False
        self._descriptor: int | None = None

    def take(self, folder: Path) -> bool:
        """Return whether the folder, which is made, is this process's now.

        One that was deleted is locked to no end: the folder that has its name now may be another's.
        """
        if self._descriptor is not None and not _leads_to(folder, self._descriptor):
            os.close(self._descriptor)
            self.is_ours, self._descriptor = False, None
        if not self.is_ours:
            self.is_ours, self._descriptor = _locked(folder)
        return self.is_ours


def _leads_to(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _locked(folder: Path) -> tuple[bool, int | None]:
    """Return whether a folder may be written to, and what locks it."""
    try:
        make(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # stays open: closed, it would be free
    except OSError:
        return True, None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False, None
    except OSError:
        os.close(descriptor)
        return True, None
    return True, descriptor


MOST_BYTES: Final = 64 * 2**20
"""A hundred times the state of eight GPUs: what is larger is not ours and would only fill memory."""

T = TypeVar("T")


class Unusable(Exception):  # noqa: N818 - it says what the file is
    """A file that holds no state for this daemon; its text says why."""


class File(Generic[T]):
    """The file `name` of a folder, which holds a value of `kind`, a struct.

    `number` is that of its format, to be raised when the fields of what is kept, or what they mean, change.
    """

    def __init__(self, name: str, kind: type[T], number: int) -> None:
        self.name = name
        self._kind = kind
        self._format = number

    def encode(self, saved: T) -> bytes:
        """Return the file's content; raises ValueError when a value is not finite."""
        document = {**msgspec.to_builtins(saved, str_keys=True), "format": self._format}
        return _canonical({**document, "checksum": _checksum(document)})

    def decode(self, content: bytes) -> T:
        """Return what `encode` was given; raises Unusable."""
        try:
            document = json.loads(content)
            written = document.pop("format"), document.pop("checksum")
            if written[0] != self._format:
                raise Unusable(f"it is of format {written[0]!r:.20}, this version reads {self._format}")
            if written[1] != _checksum({**document, "format": self._format}):
                raise Unusable("it is damaged: its checksum is another")
            return msgspec.convert(document, self._kind, str_keys=True)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Unusable("it is damaged: it is no complete state") from None

    def read(self, folder: Path) -> T | None:
        """Return the saved state, None where there is none; raises Unusable and OSError.

        A link, a pipe or a device in its place is not followed, opened or waited for: it is no state of ours.
        """
        try:
            with open(folder / self.name, "rb", opener=_unfollowed) as stream:
                status = os.fstat(stream.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise Unusable("it is no file but a pipe or a device")
                if status.st_size > MOST_BYTES:
                    raise Unusable("it is too large to be a state")
                content = stream.read(MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise Unusable("it is no file but a link or a socket") from None
            raise
        return self.decode(content)

    def write(self, folder: Path, saved: T) -> None:
        """Replace the saved state at once, and durably; makes the folder; raises OSError and what `encode` raises."""
        content = self.encode(saved)
        make(folder)
        put(folder / self.name, folder / f"{self.name}.new", (content,))
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def set_aside(self, folder: Path) -> None:
        """Rename the saved state, adding `.bad` to its name, over an older one; raises OSError."""
        (folder / self.name).replace(folder / f"{self.name}.bad")


def _unfollowed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(document)).hexdigest()


STATE: Final = File("state.json", SavedState, FORMAT)
LIVES: Final = File("lives.json", Lives, 2)
"""Apart from what the leak detector learned, which is of one life: this goes on when that is set aside."""

HISTORY: Final = File("history.json", KeptHistory, 3)
"""Apart from the rest: it is of whatever engine was there, and only shown."""
