"""The readings of one series, and what the detector remembers: blocks, work, verdict and alarm."""

from collections.abc import Iterator
from enum import IntEnum
from itertools import accumulate
from typing import Final

from msgspec import Struct, field

from vllm_headroom.units import MIB

RISE_BYTES: Final = MIB
"""A smaller rise does not count. This is below the smallest step of every allocator, 2 MiB
(cudaMalloc, torch's small pool).
"""

OUT_OF_MEMORY_BYTES: Final = 100 * MIB
"""With less free memory than this, allocations begin to fail, because segments are 20 MiB and
larger.
"""


LARGE_BYTES: Final = 64 * MIB
"""A larger fall or rise is more than the usual fluctuation of the allocator."""


class Observation(Struct, frozen=True, kw_only=True):
    """One reading of a series, with the load and the run of the engine that it belongs to."""

    seconds: float
    """Monotonic time."""

    held_bytes: int | None
    """None where it is unknown now."""

    finished_total: float | None = None
    """The engine's count of finished requests; None where unknown."""
    running: float | None = None
    """The number of running requests; None where unknown."""

    run_id: str | None = None
    """Identifies the run of the engine; None where unknown."""

    neighbours: int | None = None
    """The number of processes on the device, the engine's included, where the memory of each is
    unknown; None where the engine's memory is known."""

    awake: bool | None = None
    """None where the page does not report it."""
    room_bytes: int | None = None
    """The memory that is left for this series; None where unknown."""

    bound_bytes: int = 0
    """The memory that all configured pools together may fill."""


class Certainty(IntEnum):
    """How certain the detector is of a leak."""

    NONE = 0
    GROWING = 1
    LEAKING = 2


class Block(Struct, frozen=True, gc=False):
    """A block of readings: its instant, the work done until then, and the least memory held in it.

    The instant is the end of a closed block, and the start of the open block. There are hundreds of
    blocks, so gc=False saves the overhead of the garbage collector.
    """

    seconds: float
    """The instant, in the time of the track."""

    requests: float
    """Requests finished since the track began."""

    busy_seconds: float = 0.0
    """The time since the stretch began, excluding blocks that had neither work nor growth."""

    floor_bytes: float = 0.0
    """The block's floor: the least memory that was held in it."""

    peak_running: float = 0.0
    """The highest number of running requests until then."""


class Ring(Struct, frozen=True, kw_only=True):
    """The newest blocks of one length, and the verdict on them when the newest one ended.

    A block of a ring consists of several blocks of the ring with the next shorter blocks, which are
    its parts.
    """

    parts: int = 0
    """How many parts of the block that is not complete yet have ended."""

    floor_bytes: float = 0.0
    """The least memory that was held in these parts."""

    blocks: tuple[Block, ...] = ()
    """The complete blocks, the oldest first."""
    highest_bytes: float = 0.0
    """The highest floor of the older blocks that were dropped."""

    verdict: Certainty = Certainty.NONE


def find_retained(blocks: tuple[Block, ...]) -> tuple[float, ...]:
    """Return, for each block, the lowest floor from that block on."""
    # A running minimum, from the newest block backwards.
    return tuple(accumulate((block.floor_bytes for block in reversed(blocks)), min))[::-1]


def list_falls(rings: tuple[Ring, ...]) -> Iterator[tuple[Block, float]]:
    """Yield each block of which a part was given back later, with the bytes given back."""
    now_bytes = rings[0].blocks[-1].floor_bytes
    for ring in rings:
        # A longer ring lacks the newest minutes: `now_bytes` has them.
        for block, retained_bytes in zip(ring.blocks, find_retained(ring.blocks), strict=True):
            fall_bytes = block.floor_bytes - min(retained_bytes, now_bytes)
            if fall_bytes > 0:
                yield block, fall_bytes


class Growth(Struct, frozen=True, kw_only=True):
    """The growth in a window: the retained memory above all that was held before the window."""

    blocks: tuple[Block, ...]
    """The block before the window, and the blocks of the window."""

    retained_bytes: tuple[float, ...]
    """The retained memory at each of these blocks: it never falls."""

    rises_bytes: tuple[float, ...]
    """The rise from block i to block i + 1; 0 where there was none."""

    grown_bytes: float
    """The sum of the rises."""
    typical_step_bytes: float
    """The typical size of a rise: the sum of the squares divided by the sum, so that small rises
    hardly count."""

    lasted_seconds: float
    rise_count: int
    """How many blocks rose by at least RISE_BYTES."""

    rise_odds: float
    """The log likelihood ratio of a leak against records and first uses, by how often it rose."""


class FinishedWork(Struct, frozen=True, kw_only=True):
    """The requests finished in one run; estimated while the engine's counter cannot be read."""

    requests: float = 0.0
    """Requests finished since the track began."""

    requests_per_second: float = 0.0
    """The average of the newest minutes."""

    counter_total: float | None = None
    """The engine's counter when it was last read; None before the first reading."""

    requests_at_counter: float = 0.0
    """`requests` when the counter was last read."""

    lower_since_seconds: float | None = None
    """When a counter was first read that is lower than `counter_total`, in the track's time; None
    while the counter is not lower."""

    run_id: str | None = None
    """Identifies the run; None where unknown."""
    peak_running: float = 0.0
    """The highest number of running requests so far."""


class Occupancy(Struct, frozen=True, kw_only=True):
    """Whether the engine's memory is present, and whether other processes are on the device."""

    is_asleep: bool = False
    rested_seconds: float | None = None
    """How long the engine has rested: it is awake and at work while most of its memory is gone.
    None while the memory is present.
    """

    neighbours: int | None = None
    """The usual number of processes on the device; None where the engine's memory is known without
    counting them.
    """
    crowded_since_seconds: float | None = None
    """When an additional process appeared, in the track's time; None without one."""


class MemoryStep(Struct, frozen=True, gc=False):
    """A large rise of memory, without the part that was given back since."""

    seconds: float
    """When it came, in the track's time."""
    size_bytes: float
    """The part of the rise that is still held."""
    top_bytes: float
    """The memory that was held after the step, without the part that was given back since."""


class TrackHistory(Struct, frozen=True, kw_only=True):
    """The readings of one stretch, within which they are comparable."""

    anchor: Block | None = None
    """The start of the stretch, with the floor of its first block; None before the first reading.
    """

    origin: Block | None = None
    """The block from which work is counted; None before the first block. It is the first block of
    the stretch. Once load has doubled since the origin, the block in which that happened becomes
    the origin.
    """

    busy_seconds: float = 0.0
    """The time since the stretch began, excluding blocks that had neither work nor growth."""
    held_bytes: float | None = None
    """The newest reading; None after a pause."""

    peak_bytes: float = 0.0
    """The highest reading."""

    capacity_bytes: float = 0.0
    """The most memory that was ever available to the engine: what it held and what was free at one
    time; 0 where the room is unknown.
    """

    open_block: Block | None = None
    """The shortest block that is not complete; None after a pause."""
    rings: tuple[Ring, ...] = ()
    """The ring of the shortest blocks is first."""

    steps: tuple[MemoryStep, ...] = ()
    """The newest large rises, the oldest first."""


class Stretch(Struct, frozen=True, kw_only=True):
    """Growth without a pause or a release in it."""

    bytes_per_second: float
    """The rate in its newest two hours."""
    began_seconds: float
    """When it began, in the track's time."""
    ended_seconds: float
    """When memory last rose in it, in the track's time."""

    longest_seconds: float
    """The length of the longest stretch of the alarm so far."""


GROWTH_HOURS: Final = 24
"""For how many hours growth is remembered: a day, because load has a daily cycle."""


class Reached(Struct, frozen=True, kw_only=True):
    """What the present run has held so far."""

    base: Block
    """The first block of the run."""
    peak: Block
    """The highest block. Once memory has followed load down, the highest block since then."""

    growth_bytes: tuple[float, ...] = (0.0,) * GROWTH_HOURS
    """The highest growth above the base in each of the newest 24 hours; the index is the hour of
    the track's time modulo 24.
    """

    hour: int
    """The present hour of the track's time."""
    hour_begin: Block
    """The block with which the present hour began."""

    highest_rate: float = 0.0
    """The request rate, in requests per second, of the busiest hour up to the peak."""
    lowest_rate: float | None = None
    """The request rate, in requests per second, of the quietest hour since the peak; None until
    such an hour has ended.
    """


class Precedent(Struct, frozen=True, kw_only=True):
    """Growth during which the engine was well, in an earlier run or on an earlier day."""

    run_id: str | None
    """Identifies the run; None where unknown."""
    base_bytes: float
    """The memory that the run held at first."""

    growth_bytes: tuple[float, ...]
    """The highest growth in each hour, as in `Reached`."""

    follows_load: bool
    """Whether memory was given back when load fell. If not, it levelled off."""
    room_bytes: float | None
    """The room that the highest growth left; None where it was unknown."""


class LeakAlarm(Struct, frozen=True, kw_only=True):
    """The alarm of one leak, which is held until the growth has ended."""

    began: Block
    """The block in which the growth began."""

    newest_rise: Block
    """The block of the newest rise."""

    peak: Block
    """The highest block. A new height does not count once growth has slowed down a lot."""
    sum_of_squares: float
    """The sum of the squared rises, in square bytes: it gives the typical size of a rise."""

    low: Block | None = None
    """The block in which most of the growth was released for the first time; None without such a
    release. Later low points must be higher.
    """
    stretch: Stretch | None = None
    """The newest stretch of growth; None while none is long enough."""


class Estimate(Struct, frozen=True, kw_only=True):
    """The growth rate and the time left; a field is None where unknown."""

    bytes_per_second: float
    """The rate in the window that was judged."""
    lower: float
    """Lower bound of the 95 % interval, in bytes per second."""

    upper: float
    """Upper bound of the 95 % interval, in bytes per second."""

    bytes_per_request: float | None
    by_requests: bool
    """Whether requests, rather than time, drive the growth."""

    leaked_bytes: float
    """By how much memory has grown so far."""
    pace: float | None
    """The expected growth, in bytes per second at the expected load, until the device is full; None
    where the estimate shows no growth.
    """

    fastest: float | None
    """The highest plausible growth, in bytes per second, until the device is full."""

    oom_seconds: float | None = None
    """The expected time until out-of-memory."""
    oom_seconds_lower: float | None = None
    """The lower bound of the time until out-of-memory."""


class TrackClock(Struct, frozen=True, kw_only=True):
    """The time of a track."""

    snapshot_seconds: float
    """Monotonic time of the snapshot that last moved the track's time."""

    now_seconds: float = 0.0
    """The track's own time since it began, which never goes back."""

    doubted_seconds: float | None = None
    """The snapshot's time where it was far from the last one; None without such a time. It is not
    trusted until a second reading confirms it.
    """


class Track(Struct, frozen=True, kw_only=True):
    """The detector's memory of one series: bounded, and saved in the state file."""

    clock: TrackClock
    work: FinishedWork = field(default_factory=FinishedWork)
    presence: Occupancy = field(default_factory=Occupancy)
    history: TrackHistory = field(default_factory=TrackHistory)
    bound_bytes: int = 0
    """The memory that configured pools may fill."""

    verdict: Certainty = Certainty.NONE
    estimate: Estimate | None = None
    """None while the verdict is NONE, and while the engine rests without an alarm."""
    alarm: LeakAlarm | None = None
    """None without an alarm."""
    reached: Reached | None = None
    """What this run has held; None before its first block."""
    precedent: Precedent | None = None
    """None before any growth during which the engine was well."""

    is_excused: bool = False
    """Whether the verdict is at most GROWING only because of the precedent."""

    previous_alarm_seconds: float | None = None
    """When memory last rose during the previous alarm, in the track's time.

    None without a previous alarm.
    """


def start_track(snapshot_seconds: float) -> Track:
    """Return an empty track at a snapshot's monotonic time."""
    return Track(clock=TrackClock(snapshot_seconds=snapshot_seconds))
