"""The input and the memory of the detector for one series of memory readings."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from math import exp, log
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.readings import count_finished, count_running, identify_run, is_page_awake
from vllm_headroom.model import Gpu, Snapshot

MIB = 2**20

Peaks = tuple[tuple[float, float], ...]
"""(seconds, requests) whenever more ran at once than ever before."""


class Certainty(IntEnum):
    """How certain the detector is of a leak."""

    NONE = 0
    GROWING = 1
    LEAKING = 2


class Observation(Struct, frozen=True, kw_only=True):
    """One reading: monotonic seconds, bytes held (None: unknown now), finished requests and who is observed.

    `finished_total` is the engine's counter and `running` its requests, None while its page fails or has none. `life`
    identifies the run of the engine, `neighbours` is the number of processes where their memory cannot be
    distinguished. `room_bytes` is what is left on the device.
    """

    seconds: float
    held_bytes: int | None
    finished_total: float | None = None
    running: float | None = None
    life: str | None = None
    neighbours: int | None = None
    awake: bool | None = None
    room_bytes: int | None = None


def find_room(gpu: Gpu) -> int | None:
    """Return what is left to the engine on a device: free memory, limited to what it may still take."""
    memory = gpu.reading.memory
    if memory is None:
        return None
    granted_bytes = None if gpu.inside is None else gpu.inside.granted_bytes
    if granted_bytes is None or gpu.engine_bytes is None:
        return memory.left_bytes
    return min(memory.left_bytes, max(0, granted_bytes - gpu.engine_bytes))


class Point(Struct, frozen=True, gc=False):
    """A closed block of readings: its end on the three axes, and the least held in it.

    `busy_seconds` counts only time with work or growth. There are hundreds, of plain numbers: gc=False saves the
    collector's overhead.
    """

    seconds: float
    requests: float
    busy_seconds: float
    floor_bytes: float


class Block(Struct, frozen=True):
    """Readings being gathered: where the block began, the least and most held, and the parts so far."""

    seconds: float
    requests: float
    floor_bytes: float
    ceiling_bytes: float
    parts: int


class BlockLevel(Struct, frozen=True, kw_only=True):
    """The evidence at one block length.

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
    verdict: Certainty = Certainty.NONE


class Work(Struct, frozen=True, kw_only=True):
    """Requests finished since the track began, estimated while the engine's counter cannot be read.

    `rate` is requests per second, averaged over minutes; `finished_total` is the highest counter of this run, and
    `base_requests` the requests then; `below_since` is when a lower one was first read instead. `mileage` holds
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
    """The growth rate and the time left; times in seconds, None where unknown.

    The interval is of 95 %. `by_requests` is whether requests, rather than time, drive the growth. `pace` and `fastest`
    are the expected and the highest bytes per second until the device is full, at the expected load; None without load.
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


class FastRise(Struct, frozen=True, kw_only=True):
    """Rises without a fall: the newest readings, some seconds apart, as blocks of one.

    None counts before `quiet_until`; `alarm_until` is when their alarm ends, 0 without one.
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
    """A large rise between two readings: when it was seen, and what was held before and after."""

    seconds: float
    bottom_bytes: float
    top_bytes: float


class Track(Struct, frozen=True, kw_only=True):
    """The detector's memory of one series: bounded, and saved in the state file.

    `seconds` is the track's time, which only moves forward; `clock` is the snapshot time of the last move, and
    `doubted_clock` a distant one that is not trusted yet. `anchor_*` is where this stretch of comparable readings
    began, `begun_bytes` what was held in its first block. `history` holds (requests, busy seconds, grown bytes) at 8 %
    steps since the anchor, `rises` the newest rises of the shortest level, `grown_bytes` their clipped sum. `first` is
    the block from which work is counted: the first one, or the last in which the most requests that ever ran at once
    reached twice the `first_load` of the one before. `peaks` are those of load, newest last, as far back as load was
    comparable. `most_bytes` is the most the engine could hold if others did not change. `crowded_since` is when a
    neighbour came, `sure_seconds` when an alarm was last certain with little time left.
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
    levels: tuple[BlockLevel, ...] = ()
    history: tuple[tuple[float, float, float], ...] = ()
    rises: tuple[float, ...] = ()
    grown_bytes: float = 0.0
    held_bytes: float | None = None
    steps: tuple[Step, ...] = ()
    run: FastRise = field(default_factory=FastRise)
    projected: Certainty = Certainty.NONE
    sure_seconds: float | None = None
    flush: Flush | None = None
    verdict: Certainty = Certainty.NONE
    estimate: Estimate | None = None


def observe_gpus(snapshot: Snapshot, gpus: tuple[Gpu, ...]) -> Iterator[tuple[Gpu, Observation]]:
    """Yield each GPU with its observation."""
    page = snapshot.page
    finished_total, running, named, is_awake = (
        count_finished(page),
        count_running(page),
        identify_run(page),
        is_page_awake(page),
    )
    for gpu in gpus:
        seen = Observation(
            seconds=snapshot.monotonic_seconds,
            held_bytes=gpu.held_bytes,
            finished_total=finished_total,
            running=running,
            life=named,
            neighbours=gpu.process_count if gpu.engine_bytes is None else None,
            awake=is_awake,
            room_bytes=find_room(gpu),
        )
        yield gpu, seen


BLOCK_SECONDS: Final = 30.0
PARTS: Final = (1, 4, 4, 2, 2, 4)
"""How many blocks of the level below make one: 30 s, 2, 8, 16, 32 and 128 minutes. Longer ones see past the sawtooth
of a garbage collector, whose period must fit into a block."""

THRESHOLDS: Final = (16.7, 15.3, 13.9, 13.2, 12.5, 11.1)
"""ln(1000 days x blocks a day x 6 levels): under the null a false alarm takes e^threshold blocks (e-detectors)."""

RISE_BYTES: Final = MIB
"""Below every allocator's smallest step, which is 2 MiB (cudaMalloc, torch's small pool)."""

RECORDS: Final = 6.0
"""Independent sources of records and first uses: the chance of one in a block is at most this times ln(n1/n0)."""

CHANCE_IN_A_LEAK: Final = 0.8
LEAST_CHANCE: Final = 0.10
"""Real benign steps come in clusters, so no rise is assumed to be rarer than this."""

BACKGROUND_PER_SECOND: Final = 0.15 / 3600
USELESS_CHANCE: Final = 0.75
"""Blocks in which a rise is this likely anyway are no evidence: this covers the warm-up."""

SPARE: Final = 4.0
NEWEST_POINTS: Final = 62
"""Two hours of the second level, the longest an alarm may have to wait, and no more than memory allows."""

MISSES_THAT_END_IT: Final = (6, 6, 5, 2, 1, 1)
"""Blocks without a rise that end a verdict, by level: within about an hour of the last rise, which may have come
early in its block, at the levels whose blocks allow it."""


def compute_chance(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Return the chance that a healthy engine's floor rises between two (seconds, requests) since the anchor.

    The n-th of exchangeable demands is a record with chance 1/n (Rényi), and an event of log-uniform rarity is first
    seen at rate 1/n, so J sources give at most J ln(n1/n0); idle processes age by time instead.
    """
    background = 1.0 - exp(-BACKGROUND_PER_SECOND * (last[0] - first[0]))
    return max(RECORDS * count_folds(first, last), LEAST_CHANCE, background)


def count_folds(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Return how many times the work done grew e-fold between two (seconds, requests) since the anchor."""
    return max(log((last[0] + 60.0) / (first[0] + 60.0)), log((last[1] + 50.0) / (first[1] + 50.0)))


def weigh(level: BlockLevel, point: Point, rise_chance: float, threshold: float) -> BlockLevel:
    """Return the level with the evidence of its ended block; its reference must be known."""
    assert level.reference_bytes is not None  # noqa: S101 - the caller sets it with the first block
    rose = point.floor_bytes >= level.reference_bytes + RISE_BYTES
    score = level.score
    if rise_chance < USELESS_CHANCE:
        odds = CHANCE_IN_A_LEAK / rise_chance if rose else (1 - CHANCE_IN_A_LEAK) / (1 - rise_chance)
        score = min(threshold + SPARE, max(0.0, score + log(odds)))
    return replace(
        level,
        block=None,
        reference_bytes=max(level.reference_bytes, point.floor_bytes),
        score=score,
        points=(*level.points, point)[-NEWEST_POINTS:],
        began=level.began if score > 0 and level.began is not None else point,
        misses=0 if rose else level.misses + 1,
    )


def find_stretch(level: BlockLevel) -> tuple[Point, ...]:
    """Return the newest blocks since the score was last 0."""
    began = level.began
    return () if began is None else tuple(point for point in level.points if point.seconds >= began.seconds)


def settle(level: BlockLevel, judged: Certainty, threshold: float, most_misses: int, floor_bytes: float) -> BlockLevel:
    """Return the level with its verdict, which rises with the evidence and ends with the growth or the evidence."""
    ended = level.misses >= most_misses or level.score < threshold / 2 or _is_given_back(level, floor_bytes)
    verdict = Certainty.NONE if ended else max(level.verdict, judged)
    return level if verdict is level.verdict else replace(level, verdict=verdict)


def _is_given_back(level: BlockLevel, floor_bytes: float) -> bool:
    """Return whether less is left than half of what grew."""
    if level.reference_bytes is None or level.began is None:
        return False
    return floor_bytes < (level.began.floor_bytes + level.reference_bytes) / 2
