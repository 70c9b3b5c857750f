"""What the detector is told and what it remembers of one series of memory readings."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct, field

from vllm_headroom.model import Gpu

MIB = 2**20

Peaks = tuple[tuple[float, float], ...]
"""(seconds, requests) whenever more ran at once than ever before."""


class Verdict(IntEnum):
    """How sure the detector is of a leak."""

    NONE = 0
    GROWING = 1
    LEAKING = 2


class Observation(Struct, frozen=True, kw_only=True):
    """One reading: monotonic seconds, bytes held (None: not known now), finished requests and who is observed.

    `finished_total` is the engine's own counter and `running` its requests, None while its page fails or has none.
    `life` names this life of the engine, `neighbours` the number of processes where other processes' memory cannot be
    told apart. `room_bytes` is what is left on the device.
    """

    seconds: float
    held_bytes: int | None
    finished_total: float | None = None
    running: float | None = None
    life: str | None = None
    neighbours: int | None = None
    awake: bool | None = None
    room_bytes: int | None = None


def room(gpu: Gpu) -> int | None:
    """Return what is left to the engine on a device: what is free, but no more than is left of what it may take."""
    memory = gpu.reading.memory
    if memory is None:
        return None
    granted_bytes = None if gpu.inside is None else gpu.inside.granted_bytes
    if granted_bytes is None or gpu.engine_bytes is None:
        return memory.left_bytes
    return min(memory.left_bytes, max(0, granted_bytes - gpu.engine_bytes))


class Point(Struct, frozen=True, gc=False):
    """A closed block of readings: when it ended on the three axes, and the least that was held in it.

    `busy_seconds` counts only time in which work was done or memory grew. There are hundreds, of numbers alone: what
    the collector of cycles would keep for each is saved.
    """

    seconds: float
    requests: float
    busy_seconds: float
    floor_bytes: float


class Block(Struct, frozen=True):
    """Readings that are still being gathered: where the block began, the least and the most held, its parts so far."""

    seconds: float
    requests: float
    floor_bytes: float
    ceiling_bytes: float
    parts: int


class Level(Struct, frozen=True, kw_only=True):
    """The evidence at one length of blocks.

    `reference_bytes` is the highest floor so far, `score` the CUSUM of the log likelihood ratio of "it rose", `points`
    the newest 62 blocks, `began` the first since the score was last 0.
    """

    block: Block | None = None
    reference_bytes: float | None = None
    score: float = 0.0
    points: tuple[Point, ...] = ()
    began: Point | None = None
    misses: int = 0
    below_since: float | None = None
    verdict: Verdict = Verdict.NONE


class Work(Struct, frozen=True, kw_only=True):
    """Requests finished since the track began, also while the engine's counter cannot be read.

    `rate` is requests per second, averaged over minutes; `finished_total` is the highest counter of this life, and
    `base_requests` the requests then; `below_since` is when a lower one was first read in its place. `mileage` holds
    (seconds, requests) every quarter of an hour for a day.
    """

    requests: float = 0.0
    rate: float = 0.0
    finished_total: float | None = None
    base_requests: float = 0.0
    below_since: float | None = None
    life: str | None = None
    mileage: tuple[tuple[float, float], ...] = ()


class Estimate(Struct, frozen=True, kw_only=True):
    """How fast it grows and how long that can last; times in seconds, None where it cannot be said.

    The interval is of 95 %. `by_requests` tells whether requests or time drive the growth. `pace` and `fastest` are the
    bytes per second to reckon with until it is full, and at most, at the load to expect; None where that is none.
    """

    bytes_per_second: float
    lower: float
    upper: float
    bytes_per_request: float | None
    by_requests: bool
    leaked_bytes: float
    pace: float | None
    fastest: float | None
    oom_seconds: float | None = None
    oom_seconds_lower: float | None = None


class Run(Struct, frozen=True, kw_only=True):
    """Rises without a fall: the newest readings of them, some seconds apart, as blocks of one.

    None counts before `quiet_until`; `alarm_until` is when an alarm of them ends, 0 without one.
    """

    points: tuple[Point, ...] = ()
    quiet_until: float = 0.0
    alarm_until: float = 0.0


class Flush(Struct, frozen=True):
    """The allocator gave back its cache: when, and what was held before and after."""

    seconds: float
    height_bytes: float
    valley_bytes: float


class Step(Struct, frozen=True, gc=False):
    """A large rise from one reading to the next: when it was seen, what was held before and what after."""

    seconds: float
    bottom_bytes: float
    top_bytes: float


class Track(Struct, frozen=True, kw_only=True):
    """Everything remembered of one series: bounded, and explicit enough to be saved.

    `seconds` is the track's own time, which only moves forward; `clock` the snapshot time it was last moved by, and
    `doubted_clock` one far from it that is not believed yet. `anchor_*` is where this stretch of comparable
    readings began, `begun_bytes` what was held in its first block. `history` holds (requests, busy seconds, grown
    bytes) at 8 % steps since the anchor, `rises` the newest rises of the shortest level, `grown_bytes` their
    clipped sum. `first` is the block that work is counted from: the first one, or the last in which the most
    requests that ever ran at once came to twice the `first_load` of the one before. `peaks` are those of load, the
    newest last, as far back as load was alike. `most_bytes` is what the engine could hold at most, had others stood
    still. `crowded_since` is when a neighbour came, `sure_seconds` when an alarm was last sure with little time left.
    """

    clock: float
    doubted_clock: float | None = None
    seconds: float = 0.0
    work: Work = field(default_factory=Work)
    anchor_seconds: float | None = None
    anchor_requests: float = 0.0
    begun_bytes: float = 0.0
    first: Point | None = None
    first_load: float = 0.0
    peaks: Peaks = ()
    busy_seconds: float = 0.0
    top_bytes: float = 0.0
    most_bytes: float = 0.0
    resting_since: float | None = None
    asleep: bool = False
    neighbours: int | None = None
    crowded_since: float | None = None
    levels: tuple[Level, ...] = ()
    history: tuple[tuple[float, float, float], ...] = ()
    rises: tuple[float, ...] = ()
    grown_bytes: float = 0.0
    held_bytes: float | None = None
    steps: tuple[Step, ...] = ()
    run: Run = field(default_factory=Run)
    projected: Verdict = Verdict.NONE
    sure_seconds: float | None = None
    flush: Flush | None = None
    verdict: Verdict = Verdict.NONE
    estimate: Estimate | None = None
