"""Files of state, replaced as a whole, in a folder that belongs to one daemon at a time."""

import errno
import fcntl
import hashlib
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.leak.inside import move_inside_track, move_track
from vllm_headroom.derive.leak.leak import LeakMemory, Tracks
from vllm_headroom.derive.life.signs import EngineRuns
from vllm_headroom.derive.per_request import Baselines
from vllm_headroom.derive.readings import count_finished, identify_run, list_named
from vllm_headroom.derive.stability import LoadState
from vllm_headroom.expose.view import SavedHistory
from vllm_headroom.model import EnginePage, Failure, Snapshot
from vllm_headroom.trace.recorder import make_folder, replace_file

COUNTED_SECONDS: Final = 300.0
"""The longest gap that a counter alone can bridge: growth is judged after ten minutes of work, and a new engine needs
longer than this to start and catch up with ten minutes of work."""


class Identity(Struct, frozen=True, kw_only=True):
    """What identifies a run of an engine: its models, its start time and its count of requests, where known."""

    models: tuple[str, ...]
    run_id: str | None = field(name="life")  # its name in files of older versions
    finished_total: float | None


def identify_engine(page: EnginePage | Failure) -> Identity | None:
    """Return the identity of the page's engine; None while no engine on it has a name."""
    if isinstance(page, Failure) or not list_named(page):
        return None
    models = sorted({engine.model_name for engine in list_named(page)})
    return Identity(
        models=tuple(models), run_id=identify_run(page), finished_total=count_finished(page)
    )


def explain_mismatch(saved: Identity, now: Identity, gap_seconds: float) -> str | None:
    """Return why this is not the saved run; None when it is. Without a start time the count of requests decides."""
    if now.models != saved.models:
        return f"it is of another model ({', '.join(saved.models)})"
    if now.run_id != saved.run_id:
        return "it is of another engine, or from before the engine's restart"
    if now.run_id is not None:
        return None
    if (
        saved.finished_total is None
        or now.finished_total is None
        or now.finished_total < saved.finished_total
    ):
        return "the engine reports no start time, and its count of requests is unknown or lower than before"
    if gap_seconds > COUNTED_SECONDS:
        return f"the engine reports no start time, and after {gap_seconds:.0f} s its count of requests proves nothing"
    return None


FORMAT: Final = 16
"""Raise it when the fields of a state, or their meaning, change."""

LOAD_GAP_SECONDS: Final = 60.0
"""After a longer gap than one of its minutes, load is not known to have been level."""

STALE_SECONDS: Final = 86400.0
"""As long as the detector remembers a device that it does not see."""

FUTURE_SECONDS: Final = 300.0
"""Clocks of machines differ by less; beyond it the age of the file is unknown."""


class Memory(Struct, frozen=True, kw_only=True):
    """The saved states, under the names of their derivations."""

    leak: LeakMemory = field(default_factory=LeakMemory)
    baseline: Baselines = field(default_factory=Baselines)


class SavedState(Struct, frozen=True, kw_only=True):
    """A memory with its engine, and the time when it was saved: since the epoch and on the monotonic clock."""

    version: str
    saved_at_seconds: float
    monotonic_seconds: float
    identity: Identity
    memory: Memory


def list_visible(snapshot: Snapshot) -> set[str]:
    """Return the UUIDs of the GPUs that NVML shows."""
    return {gpu.reading.uuid for gpu in snapshot.devices}


def restore_memory(saved: SavedState, snapshot: Snapshot) -> Memory:
    """Return the memory of the visible GPUs, moved to this machine's monotonic clock with the downtime as a gap."""
    here = list_visible(snapshot)
    gap = max(0.0, snapshot.time_seconds - saved.saved_at_seconds)
    shift = snapshot.monotonic_seconds - gap - saved.monotonic_seconds
    leak, baseline = saved.memory.leak, saved.memory.baseline
    gpus, load = {uuid: track for uuid, track in leak.gpus.items() if uuid in here}, leak.load
    if load.began_seconds is not None:
        load = replace(load, began_seconds=load.began_seconds + shift)
    return Memory(
        leak=LeakMemory(
            load=load if gap <= LOAD_GAP_SECONDS else LoadState(),
            gpus=_shift_tracks(gpus, shift),
            host=_shift_tracks(leak.host, shift),
            inside={
                uuid: move_inside_track(track, shift)
                for uuid, track in leak.inside.items()
                if uuid in here
            },
            sleep=replace(leak.sleep, since_seconds=None),
            asleep=_shift_tracks(
                {uuid: track for uuid, track in leak.asleep.items() if uuid in here}, shift
            ),
        ),
        baseline=replace(
            baseline, bands={uuid: bands for uuid, bands in baseline.bands.items() if uuid in here}
        ),
    )


def explain_refusal(saved: SavedState, snapshot: Snapshot) -> str | None:
    """Return why the saved state is not this engine's; None when it is, or when that is unknown yet."""
    age = snapshot.time_seconds - saved.saved_at_seconds
    if age > STALE_SECONDS:
        return f"it is {age / 3600:.0f} h old"
    if age < -FUTURE_SECONDS:
        return f"it is from the future, by {-age:.0f} s: a clock was wrong"
    now = identify_engine(snapshot.engines)
    if now is not None and (reason := explain_mismatch(saved.identity, now, age)):
        return reason
    gpus = saved.memory.leak.gpus
    if gpus and is_gpu_list_known(saved, snapshot) and not list_visible(snapshot) & set(gpus):
        return f"it is of other GPUs ({', '.join(gpus)})"
    return None


def is_gpu_list_known(saved: SavedState, snapshot: Snapshot) -> bool:
    """Return whether it is known which of its GPUs are present: one that does not open yet may be any."""
    missing = saved.memory.leak.gpus.keys() - list_visible(snapshot)
    return not missing or not (isinstance(snapshot.gpus, Failure) or "" in list_visible(snapshot))


def _shift_tracks(tracks: Tracks, shift: float) -> Tracks:
    return {name: move_track(track, shift) for name, track in tracks.items()}


class FolderLock:
    """Locks a folder, once it is free, until the process exits; `is_ours` is whether it did.

    The folder itself is locked: that takes no space, and no file can be replaced. Where it cannot be opened or its file
    system has no locks, it counts as locked: keeping the state matters more.
    """

    def __init__(self) -> None:
        self.is_ours = False
        self._descriptor: int | None = None

    def take(self, folder: Path) -> bool:
        """Create the folder and return whether it is this process's; a folder that was deleted is locked again."""
        if self._descriptor is not None:
            try:
                is_same = os.path.samestat(folder.stat(), os.fstat(self._descriptor))
            except OSError as error:
                is_same = not isinstance(error, FileNotFoundError)
            if not is_same:
                os.close(self._descriptor)
                self.is_ours, self._descriptor = False, None
        if self.is_ours:
            return True
        self.is_ours = True
        with suppress(OSError):
            make_folder(folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                self.is_ours = not isinstance(error, BlockingIOError)
            else:
                self._descriptor = descriptor  # stays open: closing it would unlock
        return self.is_ours


MOST_BYTES: Final = 64 * 2**20
"""A hundred times the state of eight GPUs."""

T = TypeVar("T")


class UnusableState(Exception):  # noqa: N818 - the name describes the file
    """A file without a state for this daemon; the message has the reason."""


class StateFile(Generic[T]):
    """The file `name` of a folder, with a value of `kind`, a struct, in the format `number`; `lost` is for the log."""

    def __init__(self, name: str, kind: type[T], number: int, lost: str) -> None:
        self.name, self.lost = name, lost
        self.rejected_name = f"{name}.bad"
        self._kind = kind
        self._format = number

    def encode(self, saved: T) -> bytes:
        """Return the file's content; raises ValueError for a value that is not finite."""
        document = {**msgspec.to_builtins(saved, str_keys=True), "format": self._format}
        return _encode_canonical({**document, "checksum": _compute_checksum(document)})

    def decode(self, content: bytes) -> T:
        """Return the value of a file's content; raises UnusableState."""
        try:
            document = json.loads(content)
            written = document.pop("format"), document.pop("checksum")
            if written[0] != self._format:
                raise UnusableState(
                    f"it is of format {written[0]!r:.20}, this version reads {self._format}"
                )
            if written[1] != _compute_checksum({**document, "format": self._format}):
                raise UnusableState("it is damaged: its checksum is another")
            return msgspec.convert(document, self._kind, str_keys=True)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UnusableState("it is damaged: it is no complete state") from None

    def read(self, folder: Path) -> T | None:
        """Return the saved state, None without one; raises OSError, and UnusableState also for a link or device."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(folder / self.name, flags), "rb") as stream:
                status = os.fstat(stream.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise UnusableState("it is no file but a pipe or a device")
                if status.st_size > MOST_BYTES:
                    raise UnusableState("it is too large to be a state")
                content = stream.read(MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise UnusableState("it is no file but a link or a socket") from None
            raise
        return self.decode(content)

    def write(self, folder: Path, saved: T) -> None:
        """Replace the saved state atomically and durably; raises OSError and what `encode` raises."""
        content = self.encode(saved)
        make_folder(folder)
        replace_file(folder / self.name, folder / f"{self.name}.new", (content,))
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def set_aside(self, folder: Path) -> None:
        """Rename the file to `rejected_name`, replacing an older one; raises OSError."""
        (folder / self.name).replace(folder / self.rejected_name)


def _encode_canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _compute_checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(_encode_canonical(document)).hexdigest()


STATE: Final = StateFile("state.json", SavedState, FORMAT, "the leak detector starts afresh")
RUNS: Final = StateFile("lives.json", EngineRuns, 2, "the engine's restarts are counted afresh")
"""Separate from the leak detector's state, which is of one run: this continues when that is set aside."""

HISTORY: Final = StateFile("history.json", SavedHistory, 3, "the page draws its curves afresh")
"""Separate from the rest: it is of any engine, and only shown."""
