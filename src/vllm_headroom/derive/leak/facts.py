"""The detector's memory of one series: blocks of readings, work, verdict and alarm."""

from enum import IntEnum
from typing import Final

from msgspec import Struct, field

from vllm_headroom.units import MIB

RISE_BYTES: Final = MIB
"""The least rise. It is below every allocator's smallest step, which is 2 MiB (cudaMalloc, torch's
small pool)."""

OUT_OF_MEMORY_BYTES: Final = 100 * MIB
"""What is left when allocations begin to fail: segments are 20 MiB and larger."""


class Certainty(IntEnum):
    """How certain the detector is of a leak."""

    NONE = 0
    GROWING = 1
    LEAKING = 2


class Block(Struct, frozen=True, gc=False):
    """A block of readings: an instant, the work done until then, and the least memory held in it.

    The instant is the end of a closed block, and the begin of the open one. There are hundreds:
    gc=False saves the garbage collector's overhead.
    """

    seconds: float
    """In the time of the track."""

    requests: float
    """Requests finished since the track began."""

    busy_seconds: float = 0.0
    """Time of this stretch until then, without blocks that had neither work nor growth."""

    floor_bytes: float = 0.0
    """The least held in the block."""

    peak_running: float = 0.0
    """The most requests that ever ran at once until then."""


class Ring(Struct, frozen=True, kw_only=True):
    """The newest blocks of one length, and the verdict on them when the last one ended."""

    parts: int = 0
    """How many blocks of the ring below the present block has so far."""

    floor_bytes: float = 0.0
    """The least held in these parts."""

    blocks: tuple[Block, ...] = ()
    highest_bytes: float = 0.0
    """The highest floor before these blocks."""

    verdict: Certainty = Certainty.NONE


class Work(Struct, frozen=True, kw_only=True):
    """The requests of one run of the engine, estimated while its counter cannot be read."""

    requests: float = 0.0
    """Requests finished since the track began."""

    requests_per_second: float = 0.0
    """Averaged over minutes."""

    counter_total: float | None = None
    """The engine's counter when it was last read; None before that."""

    requests_at_counter: float = 0.0
    """`requests` at that time."""

    lower_since_seconds: float | None = None
    """When a lower counter was first read, None while it is not lower."""

    run_id: str | None = None
    peak_running: float = 0.0
    """The most requests that ran at once."""


class Occupancy(Struct, frozen=True, kw_only=True):
    """Whether the engine's memory is there, and whether others are on the device."""

    is_asleep: bool = False
    rested_seconds: float | None = None
    """How long requests ran while most of the memory was gone; None while it is there."""

    neighbours: int | None = None
    crowded_since_seconds: float | None = None
    """When another process came, None without one."""


class Step(Struct, frozen=True, gc=False):
    """What was not given back of a large rise, which a transient peak may contain."""

    seconds: float
    size_bytes: float
    top_bytes: float
    """What was held after the step."""


class TrackHistory(Struct, frozen=True, kw_only=True):
    """The memory of one stretch of comparable readings."""

    anchor: Block | None = None
    """Where the stretch began, with the floor of its first block."""

    origin: Block | None = None
    """The block from which work is counted: the stretch's first one, or the last in which the most
    requests that ever ran at once reached twice those of the origin before it."""

    busy_seconds: float = 0.0
    held_bytes: float | None = None
    """The newest reading, None after a pause."""

    peak_bytes: float = 0.0
    """The most that was held."""

    capacity_bytes: float = 0.0
    """The most that the engine could hold if others did not change, 0 where the room is unknown."""

    open_block: Block | None = None
    rings: tuple[Ring, ...] = ()
    """The shortest blocks first."""

    steps: tuple[Step, ...] = ()


class LeakAlarm(Struct, frozen=True, kw_only=True):
    """The alarm of one leak, which is held until its growth has ended."""

    began: Block
    """Where its growth began."""

    newest_rise: Block
    sum_of_squares: float
    """The sum of its squared rises, in square bytes."""


class Estimate(Struct, frozen=True, kw_only=True):
    """The growth rate and the time left; None where unknown."""

    bytes_per_second: float
    lower: float
    """Lower bound of the 95 % interval, in bytes per second."""

    upper: float
    """Upper bound of the 95 % interval, in bytes per second."""

    bytes_per_request: float | None
    by_requests: bool
    """Whether requests, rather than time, drive the growth."""

    leaked_bytes: float
    pace: float | None
    """The expected bytes per second until the device is full, at the expected load."""

    fastest: float | None
    """The highest bytes per second until the device is full."""

    oom_seconds: float | None = None
    oom_seconds_lower: float | None = None


class TrackClock(Struct, frozen=True, kw_only=True):
    """The time of a track."""

    snapshot_seconds: float
    """Monotonic time of the snapshot that last moved the track's time."""

    now_seconds: float = 0.0
    """The track's own time since it began, which only moves forward."""

    doubted_seconds: float | None = None
    """A distant snapshot time that is not trusted yet."""


class Track(Struct, frozen=True, kw_only=True):
    """The detector's memory of one series: bounded, and saved in the state file."""

    clock: TrackClock
    work: Work = field(default_factory=Work)
    presence: Occupancy = field(default_factory=Occupancy)
    history: TrackHistory = field(default_factory=TrackHistory)
    bound_bytes: int = 0
    """What configured pools may fill."""

    verdict: Certainty = Certainty.NONE
    estimate: Estimate | None = None
    alarm: LeakAlarm | None = None
    previous_alarm_seconds: float | None = None
    """The newest rise of the alarm before, in the track's time."""


def start_track(snapshot_seconds: float) -> Track:
    """Return an empty track at a snapshot's monotonic time."""
    return Track(clock=TrackClock(snapshot_seconds=snapshot_seconds))
