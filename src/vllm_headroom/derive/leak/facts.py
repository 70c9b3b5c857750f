"""The readings of a series, and what the detector remembers about the series.

A series is the memory of one GPU, or of all processes of one role. A block is a span of readings,
and its floor is its lowest reading. A track is everything that is remembered about one series.
"""

from collections.abc import Iterator
from enum import IntEnum
from itertools import accumulate
from typing import Final

from msgspec import Struct, field

from vllm_headroom.units import MIB

RISE_BYTES: Final = MIB
"""A smaller rise is ignored. The smallest step of any allocator is 2 MiB (cudaMalloc, torch's small
pool).
"""

OUT_OF_MEMORY_BYTES: Final = 100 * MIB
"""If less memory than this is free, allocations start to fail. Segments are 20 MiB or larger."""


LARGE_BYTES: Final = 64 * MIB
"""A fall or rise larger than this exceeds the allocator's usual fluctuation."""


class Observation(Struct, frozen=True, kw_only=True):
    """One reading of a series, with the engine's load and its run at that time."""

    seconds: float
    """The time of the reading, on the monotonic clock."""

    held_bytes: int | None
    """The memory that is held, or None if it is currently unknown."""

    finished_total: float | None = None
    """The engine's count of finished requests, or None if unknown."""
    running: float | None = None
    """The number of running requests, or None if unknown."""

    run_id: str | None = None
    """The identity of the engine's run, or None if unknown."""

    neighbours: int | None = None
    """The number of processes on the device, including the engine's. It is None if the memory of
    the engine's processes is known. In that case, the number does not matter.
    """

    awake: bool | None = None
    """Whether the engine is awake, or None if the page does not report it."""
    room_bytes: int | None = None
    """The memory that this series can still take, or None if unknown."""

    bound_bytes: int = 0
    """The memory that all configured pools together may fill."""


class Certainty(IntEnum):
    """How certain the detector is that there is a leak."""

    NONE = 0
    GROWING = 1
    LEAKING = 2


class Block(Struct, frozen=True, gc=False):
    """A block of readings: its time, the work done, and its lowest memory.

    The time is the end of the block. While the block is open, the time is its start. There are
    hundreds of blocks, so gc=False keeps the garbage collector from visiting them.
    """

    seconds: float
    """The time of the block, on the track's clock."""

    requests: float
    """The requests finished since the track began."""

    busy_seconds: float = 0.0
    """The time since the stretch of comparable readings began. Blocks with neither work nor growth
    are excluded.
    """

    floor_bytes: float = 0.0
    """The block's floor: the lowest memory held during the block."""

    peak_running: float = 0.0
    """The highest number of running requests up to this block."""


class Ring(Struct, frozen=True, kw_only=True):
    """The newest blocks of one length.

    A ring also has the verdict reached when its newest block ended. The rings are ordered by the
    length of their blocks. Several blocks of one ring make up one block of the next ring.
    """

    parts: int = 0
    """How many parts of the incomplete block have ended."""

    floor_bytes: float = 0.0
    """The lowest memory held during these parts."""

    blocks: tuple[Block, ...] = ()
    """The complete blocks, with the oldest first."""
    highest_bytes: float = 0.0
    """The highest floor of all older blocks, which the ring no longer contains."""

    verdict: Certainty = Certainty.NONE


def find_retained(blocks: tuple[Block, ...]) -> tuple[float, ...]:
    """Return each block's retained memory: the lowest floor in that block and all later ones."""
    # The result is a running minimum, starting from the newest block.
    return tuple(accumulate((block.floor_bytes for block in reversed(blocks)), min))[::-1]


def list_falls(rings: tuple[Ring, ...]) -> Iterator[tuple[Block, float]]:
    """Yield each block after which memory was released, with the number of bytes released."""
    now_bytes = rings[0].blocks[-1].floor_bytes
    for ring in rings:
        # A ring with longer blocks does not cover the last few minutes. `now_bytes` is used for
        # those minutes.
        for block, retained_bytes in zip(ring.blocks, find_retained(ring.blocks), strict=True):
            fall_bytes = block.floor_bytes - min(retained_bytes, now_bytes)
            if fall_bytes > 0:
                yield block, fall_bytes


class Growth(Struct, frozen=True, kw_only=True):
    """The growth in a window.

    Growth is the retained memory above the highest earlier floor.
    """

    blocks: tuple[Block, ...]
    """The last block before the window, followed by the blocks of the window."""

    retained_bytes: tuple[float, ...]
    """The retained memory at each of these blocks. It never falls from one block to the next."""

    rises_bytes: tuple[float, ...]
    """Rise i is from block i to block i + 1. A rise is 0 if memory did not rise."""

    grown_bytes: float
    """The sum of the rises."""
    typical_step_bytes: float
    """The typical size of a rise: the sum of squared rises divided by their sum. Small rises
    therefore hardly matter.
    """

    lasted_seconds: float
    rise_count: int
    """The number of blocks in which memory rose by at least RISE_BYTES."""

    rise_odds: float
    """The log likelihood ratio of a leak, judged by how often memory rose. The alternative is
    benign rises (new maxima and first uses).
    """


class FinishedWork(Struct, frozen=True, kw_only=True):
    """The requests that have finished in one run.

    While the engine's counter cannot be read, this number is estimated.
    """

    requests: float = 0.0
    """The requests finished since the track began."""

    requests_per_second: float = 0.0
    """The average request rate over the last few minutes."""

    counter_total: float | None = None
    """The last value of the engine's counter, or None before the first reading."""

    requests_at_counter: float = 0.0
    """The value of `requests` when the counter was last read."""

    lower_since_seconds: float | None = None
    """When a counter below `counter_total` was first read, on the track's clock. The time is None
    while the counter is not below `counter_total`.
    """

    run_id: str | None = None
    """The identity of the run, or None if unknown."""
    peak_running: float = 0.0
    """The highest number of running requests so far."""


class Occupancy(Struct, frozen=True, kw_only=True):
    """Whether the engine holds its usual memory, and whether other processes are on the device."""

    is_asleep: bool = False
    rested_seconds: float | None = None
    """How long the engine has rested, or None while it holds its usual memory. The engine rests
    while most of its memory is released although it is working.
    """

    neighbours: int | None = None
    """The usual number of processes on the device. The number is None if the engine's memory is
    known without counting processes.
    """
    crowded_since_seconds: float | None = None
    """When an additional process appeared, on the track's clock. The time is None if there is no
    additional process.
    """


class MemoryStep(Struct, frozen=True, gc=False):
    """A large rise in memory, without the part that has been released since."""

    seconds: float
    """When the rise occurred, on the track's clock."""
    size_bytes: float
    """The part of the rise that is still held."""
    top_bytes: float
    """The height of memory after the step, without the part that has been released since."""


class TrackHistory(Struct, frozen=True, kw_only=True):
    """The readings from one stretch of time, during which all readings are comparable."""

    anchor: Block | None = None
    """The start of the stretch, with the floor of its first block. It is None before the first
    reading.
    """

    origin: Block | None = None
    """The block from which work is counted, or None before the first block. This is usually the
    first block of the stretch. After load has doubled, this is the block in which load last
    doubled.
    """

    busy_seconds: float = 0.0
    """The time since the stretch began, excluding blocks with neither work nor growth."""
    held_bytes: float | None = None
    """The newest reading, or None after a pause in the readings."""

    peak_bytes: float = 0.0
    """The highest reading."""

    capacity_bytes: float = 0.0
    """The most memory that was ever available, or 0 if the room is unknown. Available memory is
    held plus free memory at one point in time.
    """

    open_block: Block | None = None
    """The shortest block while it is still incomplete, or None after a pause."""
    rings: tuple[Ring, ...] = ()
    """The rings, ordered by the length of their blocks, with the shortest first."""

    steps: tuple[MemoryStep, ...] = ()
    """The newest large rises, with the oldest first."""


class Stretch(Struct, frozen=True, kw_only=True):
    """A period of growth without a pause or a release."""

    bytes_per_second: float
    """The growth rate over the last two hours of the stretch."""
    began_seconds: float
    """When the stretch began, on the track's clock."""
    ended_seconds: float
    """When memory last rose during the stretch, on the track's clock."""

    longest_seconds: float
    """The length of the alarm's longest stretch so far."""


GROWTH_HOURS: Final = 24
"""Growth is remembered for this many hours. One day is used because load has a daily cycle."""


class Reached(Struct, frozen=True, kw_only=True):
    """The highest memory reached so far in the current run."""

    base: Block
    """The first block of the run."""
    peak: Block
    """The block with the highest memory. Once memory has fallen with load, only the blocks after
    that fall are considered.
    """

    growth_bytes: tuple[float, ...] = (0.0,) * GROWTH_HOURS
    """The highest growth above the base in each of the last 24 hours. The index is the hour on the
    track's clock modulo 24.
    """

    hour: int
    """The current hour on the track's clock."""
    hour_begin: Block
    """The first block of the current hour on the track's clock."""

    released_bytes: float = 0.0
    """The highest memory of which most of the growth was later released, or 0 if there is none."""

    highest_rate: float = 0.0
    """The request rate in the busiest hour up to the peak, in requests per second."""
    lowest_rate: float | None = None
    """The request rate in the quietest hour since the peak, in requests per second. The rate is
    None until a whole hour has ended since the peak.
    """


class Precedent(Struct, frozen=True, kw_only=True):
    """Growth in an earlier run or on an earlier day that was not a leak."""

    run_id: str | None
    """The identity of that run, or None if unknown."""
    base_bytes: float
    """The memory that was held at the start of the run."""

    growth_bytes: tuple[float, ...]
    """The highest growth within each hour, as in `Reached`."""

    follows_load: bool
    """Whether memory was released when load fell. If False, memory levelled off instead."""
    room_bytes: float | None
    """The room left when the growth was highest, or None if unknown."""


class LeakAlarm(Struct, frozen=True, kw_only=True):
    """The alarm on one leak.

    The alarm continues until the growth has ended.
    """

    began: Block
    """The block in which the growth began."""

    newest_rise: Block
    """The block of the newest rise."""

    peak: Block
    """The block with the highest memory during the alarm. Once growth has slowed down considerably,
    later blocks are ignored even if they are higher.
    """
    sum_of_squares: float
    """The sum of the squared rises, in bytes squared. The typical size of a rise is computed from
    it.
    """

    low: Block | None = None
    """The block in which most of the growth was first released. The block is None if most of the
    growth was never released. In a leak, later low points are higher than this block.
    """
    stretch: Stretch | None = None
    """The newest stretch of growth, or None while no stretch is long enough."""


class Estimate(Struct, frozen=True, kw_only=True):
    """The growth rate and the time until memory is full.

    A field is None if its value is unknown.
    """

    bytes_per_second: float
    """The growth rate in the window that was judged."""
    lower: float
    """The lower end of the 95 % interval, in bytes per second."""

    upper: float
    """The upper end of the 95 % interval, in bytes per second."""

    bytes_per_request: float | None
    by_requests: bool
    """Whether the growth is driven by requests rather than by time."""

    leaked_bytes: float
    """How much the memory has grown so far."""
    pace: float | None
    """The expected growth rate until the device is full, in bytes per second. It is None if the
    estimate shows no growth.
    """

    fastest: float | None
    """The highest plausible growth rate until the device is full, in bytes per second."""

    oom_seconds: float | None = None
    """The expected time until out-of-memory."""
    oom_seconds_lower: float | None = None
    """A lower bound on the time until out-of-memory."""


class TrackClock(Struct, frozen=True, kw_only=True):
    """The time of a track."""

    snapshot_seconds: float
    """The monotonic time of the snapshot that last advanced the track's clock."""

    now_seconds: float = 0.0
    """The time since the track began, on the track's own clock. It never goes backwards."""

    doubted_seconds: float | None = None
    """The time of the last snapshot if it was far from the previous one. A distant time is not
    trusted until a second reading confirms it.
    """


class Track(Struct, frozen=True, kw_only=True):
    """Everything that the detector remembers about one series.

    The track has a limited size, and is saved in the state file.
    """

    clock: TrackClock
    work: FinishedWork = field(default_factory=FinishedWork)
    presence: Occupancy = field(default_factory=Occupancy)
    history: TrackHistory = field(default_factory=TrackHistory)
    bound_bytes: int = 0
    """The memory that all configured pools together may fill."""

    verdict: Certainty = Certainty.NONE
    estimate: Estimate | None = None
    """The growth rate and the time until memory is full. The estimate is None while the verdict is
    NONE, or while the engine rests without an alarm.
    """
    alarm: LeakAlarm | None = None
    """The current alarm, or None if there is none."""
    reached: Reached | None = None
    """The highest memory that this run has reached, or None before its first block."""
    precedent: Precedent | None = None
    """Growth that was not a leak, or None until growth of this kind has been observed."""

    is_excused: bool = False
    """Whether the verdict would be higher than GROWING if there were no precedent."""

    previous_alarm_seconds: float | None = None
    """When memory last rose during the previous alarm, on the track's clock.

    The time is None if there was no previous alarm.
    """


def start_track(snapshot_seconds: float) -> Track:
    """Return an empty track that begins at a snapshot's monotonic time."""
    return Track(clock=TrackClock(snapshot_seconds=snapshot_seconds))
