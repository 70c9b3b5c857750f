"""The saved state of an engine, and whether it belongs to the running engine."""

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import start_track
from vllm_headroom.derive.leak.inside import move_inside_track, move_track
from vllm_headroom.derive.leak.leak import LeakMemory, Tracks
from vllm_headroom.derive.leak.precedent import end_run
from vllm_headroom.derive.pages import count_finished, list_named
from vllm_headroom.derive.per_request import Baselines
from vllm_headroom.derive.run_identity import identify_run
from vllm_headroom.derive.stability import LoadState
from vllm_headroom.model import EnginePage, Failure, Snapshot
from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS

LONGEST_COUNTED_GAP_SECONDS: Final = 300.0
"""The longest gap after which the request count alone can identify the run. Growth is judged only
once an engine has worked for ten minutes. Within this gap, a new engine cannot catch up with the
former one's requests. The new engine would have to finish ten minutes of requests after its start.
"""

LONGEST_LOAD_GAP_SECONDS: Final = 60.0
"""The load is averaged per minute. After a gap of more than a minute, the load may have changed."""

STALE_STATE_SECONDS: Final = DAY_SECONDS
"""The maximum age of a state that is restored. The detector also remembers an invisible device for
this long.
"""

FUTURE_SECONDS: Final = 300.0
"""The maximum expected difference between the clocks of two machines. A file from further in the
future is refused, because its age is unknown.
"""

UNUSABLE_COUNT: Final = (
    "the engine reports no start time, and its count of requests is unknown or lower than before"
)


class Identity(Struct, frozen=True, kw_only=True):
    """The identity of an engine run."""

    models: tuple[str, ...]
    run_id: str | None
    """The start time of the engine's server, from `identify_run`. None if the engine does not
    report its start time.
    """
    finished_total: float | None
    """How many requests the engine has finished, or None if unknown."""


class DerivationStates(Struct, frozen=True, kw_only=True):
    """The saved states, named after their derivations."""

    leak: LeakMemory = field(default_factory=LeakMemory)
    baseline: Baselines = field(default_factory=Baselines)


class SavedState(Struct, frozen=True, kw_only=True):
    """The content of the leak detector's state file."""

    version: str
    """The version of vllm-headroom that saved the state."""
    saved_at_seconds: float
    """When the state was saved, in seconds since the epoch."""
    monotonic_seconds: float
    """When the state was saved, on the monotonic clock of the machine that saved it."""
    identity: Identity
    memory: DerivationStates


def identify_engine(page: EnginePage | Failure) -> Identity | None:
    """Return the identity of the engine on the page.

    Returns None while no engine on the page has a name.
    """
    if isinstance(page, Failure):
        return None
    models = {engine.model_name for engine in list_named(page)}
    if not models:
        return None
    return Identity(
        models=tuple(sorted(models)),
        run_id=identify_run(page),
        finished_total=count_finished(page),
    )


def explain_mismatch(saved: Identity, current: Identity, gap_seconds: float) -> str | None:
    """Return why the running engine is not the saved one.

    `gap_seconds` is the time since the state was saved. If the engine does not report its start
    time, the gap must be short. The number of finished requests must also be at least the saved
    number. Returns None if it is the same run.
    """
    if current.models != saved.models:
        return f"it is of another model ({', '.join(saved.models)})"
    if current.run_id != saved.run_id:
        return "it is of another engine, or from before the engine's restart"
    # An equal start time is stronger evidence than any count.
    if current.run_id is not None:
        return None
    if saved.finished_total is None or current.finished_total is None:
        return UNUSABLE_COUNT
    if current.finished_total < saved.finished_total:
        return UNUSABLE_COUNT
    if gap_seconds > LONGEST_COUNTED_GAP_SECONDS:
        return (
            f"the engine reports no start time, and after {gap_seconds:.0f} s its count of requests"
            " proves nothing"
        )
    return None


def explain_refusal(saved: SavedState, snapshot: Snapshot) -> str | None:
    """Return why the saved state must not be restored.

    Returns None in three cases:

    - The state may belong to this engine.
    - The page does not name an engine yet.
    - A saved GPU may not have been opened yet.
    """
    age_seconds = snapshot.time_seconds - saved.saved_at_seconds
    if age_seconds > STALE_STATE_SECONDS:
        return f"it is {age_seconds / HOUR_SECONDS:.0f} h old"
    if age_seconds < -FUTURE_SECONDS:
        return f"it is from the future, by {-age_seconds:.0f} s: a clock was wrong"
    identity = identify_engine(snapshot.engines)
    if identity is not None:
        mismatch = explain_mismatch(saved.identity, identity, age_seconds)
        if mismatch is not None:
            return mismatch
    # One visible saved GPU is enough, because the others may not have been opened yet.
    saved_uuids = saved.memory.leak.gpus.keys()
    is_any_visible = not saved_uuids.isdisjoint(list_visible(snapshot))
    if saved_uuids and not is_any_visible and is_gpu_list_known(saved, snapshot):
        return f"it is of other GPUs ({', '.join(saved_uuids)})"
    return None


def is_gpu_list_known(saved: SavedState, snapshot: Snapshot) -> bool:
    """Return whether each saved GPU is known to be either present or missing."""
    visible_uuids = list_visible(snapshot)
    if saved.memory.leak.gpus.keys() <= visible_uuids:
        return True
    # A GPU that is not open yet has no UUID. A GPU without a UUID may be any of the missing GPUs.
    return not isinstance(snapshot.gpus, Failure) and "" not in visible_uuids


def list_visible(snapshot: Snapshot) -> set[str]:
    """Return the UUIDs of the GPUs in the last reading.

    A GPU that is not open yet has the UUID "".
    """
    return {gpu.reading.uuid for gpu in snapshot.devices}


def restore_memory(saved: SavedState, snapshot: Snapshot) -> DerivationStates:
    """Return the saved states, moved to this machine's clock and without invisible GPUs.

    All monotonic times are shifted. The time since the save becomes a gap without samples.
    """
    gap_seconds = max(0.0, snapshot.time_seconds - saved.saved_at_seconds)
    # The monotonic clock may have restarted, or may belong to another machine.
    shift_seconds = snapshot.monotonic_seconds - gap_seconds - saved.monotonic_seconds
    visible_uuids = list_visible(snapshot)
    leak = saved.memory.leak
    baseline = saved.memory.baseline
    # The mean over a minute without samples would be wrong.
    load = leak.load
    if gap_seconds > LONGEST_LOAD_GAP_SECONDS:
        load = LoadState()
    elif load.minute_began_seconds is not None:
        load = replace(load, minute_began_seconds=load.minute_began_seconds + shift_seconds)
    return DerivationStates(
        leak=LeakMemory(
            load=load,
            gpus=_shift_tracks(_keep_visible(leak.gpus, visible_uuids), shift_seconds),
            host=_shift_tracks(leak.host, shift_seconds),
            inside={
                uuid: move_inside_track(track, shift_seconds)
                for uuid, track in leak.inside.items()
                if uuid in visible_uuids
            },
            # It is unknown whether the engine was asleep during the gap.
            sleep=replace(leak.sleep, since_seconds=None),
            asleep=_shift_tracks(_keep_visible(leak.asleep, visible_uuids), shift_seconds),
        ),
        baseline=replace(
            baseline,
            bands={uuid: bands for uuid, bands in baseline.bands.items() if uuid in visible_uuids},
        ),
    )


def restore_precedents(saved: SavedState, snapshot: Snapshot) -> LeakMemory:
    """Return a leak state with the precedents from an earlier run of the same models.

    A precedent is growth that was not a leak. In the next run, the same growth does not indicate a
    leak. If a series' run ended in an alarm, the series has no precedent. A series whose run ended
    with memory nearly full has no precedent either. The result is empty in three cases:

    - The state is too old.
    - The state is from the future.
    - The state belongs to other models.

    Precedents from another machine match no GPU here, because the UUIDs differ.
    """
    identity = identify_engine(snapshot.engines)
    age_seconds = snapshot.time_seconds - saved.saved_at_seconds
    is_of_now = -FUTURE_SECONDS <= age_seconds <= STALE_STATE_SECONDS
    if identity is None or identity.models != saved.identity.models or not is_of_now:
        return LeakMemory()
    leak = saved.memory.leak
    return LeakMemory(
        gpus=_start_next_runs(leak.gpus, snapshot.monotonic_seconds),
        host=_start_next_runs(leak.host, snapshot.monotonic_seconds),
    )


def _start_next_runs(tracks: Tracks, monotonic_seconds: float) -> Tracks:
    """Return, for each track with a precedent, an empty track with this precedent."""
    next_tracks: Tracks = {}
    for name, track in tracks.items():
        precedent = end_run(track)
        if precedent is not None:
            next_tracks[name] = replace(start_track(monotonic_seconds), precedent=precedent)
    return next_tracks


def _keep_visible(tracks: Tracks, visible_uuids: set[str]) -> Tracks:
    return {uuid: track for uuid, track in tracks.items() if uuid in visible_uuids}


def _shift_tracks(tracks: Tracks, shift_seconds: float) -> Tracks:
    return {name: move_track(track, shift_seconds) for name, track in tracks.items()}
