"""What is kept, of which life of which engine, and how it is taken up again in another process."""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.leak.baseline import Baselines
from vllm_headroom.derive.leak.gpus import Tracks
from vllm_headroom.derive.leak.inside import moved
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.leak.load import LoadState
from vllm_headroom.derive.page_facts import finished, life, named
from vllm_headroom.model import EnginePage, Failure, Snapshot

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
