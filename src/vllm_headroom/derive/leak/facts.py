"""The input and the memory of the detector for one series of memory readings."""

from collections.abc import Iterator
from enum import IntEnum
from math import log
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.readings import count_finished, count_running, identify_run, is_page_awake
from vllm_headroom.model import Gpu, Snapshot

MIB: Final = 2**20

RISE_BYTES: Final = MIB
"""Below every allocator's smallest step, which is 2 MiB (cudaMalloc, torch's small pool)."""

OUT_OF_MEMORY_BYTES: Final = 100 * MIB
"""What is left when allocations begin to fail: segments are 20 MiB and larger."""


class Certainty(IntEnum):
    """How certain the detector is of a leak."""

    NONE = 0
    GROWING = 1
    LEAKING = 2


class Observation(Struct, frozen=True, kw_only=True):
    """One reading: monotonic seconds, bytes held (None: unknown now), finished requests and who is observed.

    `run_id` identifies the run of the engine, `neighbours` is the number of processes where their memory cannot be
    distinguished. `room_bytes` is what is left on the device, `bound_bytes` what configured pools may fill in all.
    """

    seconds: float
    held_bytes: int | None
    finished_total: float | None = None
    running: float | None = None
    run_id: str | None = None
    neighbours: int | None = None
    awake: bool | None = None
    room_bytes: int | None = None
    bound_bytes: int = 0


class Point(Struct, frozen=True, gc=False):
    """A closed block of readings: its end, the requests, busy seconds and peak load until then, the least held in it.

    Time without work or growth is not busy. There are hundreds: gc=False saves the collector's overhead.
    """

    seconds: float
    requests: float
    busy_seconds: float = 0.0
    floor_bytes: float = 0.0
    load: float = 0.0


class Ring(Struct, frozen=True, kw_only=True):
    """The newest blocks of one length, the highest floor before them, and the verdict when the last one ended.

    `parts` are the blocks of the ring below in the present block, and `floor_bytes` the least held in them.
    """

    parts: int = 0
    floor_bytes: float = 0.0
    points: tuple[Point, ...] = ()
    highest_bytes: float = 0.0
    verdict: Certainty = Certainty.NONE


class Work(Struct, frozen=True, kw_only=True):
    """Requests finished since the track began, estimated while the engine's counter cannot be read.

    `rate` is requests per second, averaged over minutes; `finished_total` is the highest counter of this run, and
    `base_requests` the requests then; `below_since` is when a lower one was first read instead.
    """

    requests: float = 0.0
    rate: float = 0.0
    finished_total: float | None = None
    base_requests: float = 0.0
    below_since: float | None = None
    run_id: str | None = field(default=None, name="life")  # its name in the state file


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


class Step(Struct, frozen=True, gc=False):
    """What was not given back of a large rise, which a transient peak may contain: when, its size and its top."""

    seconds: float
    size_bytes: float
    top_bytes: float


class LeakAlarm(Struct, frozen=True, kw_only=True):
    """A leak, from its first alarm: where its growth began, its newest rise, and the sum of the squared rises."""

    began: Point
    newest: Point
    squares: float


class Track(Struct, frozen=True, kw_only=True):
    """The detector's memory of one series: bounded, and saved in the state file.

    `seconds` is the track's time, which only moves forward; `clock` is the snapshot time of the last move, and
    `doubted_clock` a distant one that is not trusted yet. `anchor` is where this stretch of comparable readings began,
    `first` the block from which work is counted: the first one, or the last in which the most requests that ever ran at
    once reached twice those of the one before. `block` is the present one, with the time and requests of its begin.
    `most_bytes` is the most the engine could hold if others did not change, `bound_bytes` what configured pools may
    fill. `rested` is how long requests ran while most of the memory was gone, `crowded_since` when a neighbour came,
    `risen_seconds` the newest rise of the last alarm.
    """

    clock: float
    doubted_clock: float | None = None
    seconds: float = 0.0
    work: Work = field(default_factory=Work)
    anchor: Point | None = None
    first: Point | None = None
    load: float = 0.0
    busy_seconds: float = 0.0
    top_bytes: float = 0.0
    most_bytes: float = 0.0
    rested: float | None = None
    asleep: bool = False
    neighbours: int | None = None
    crowded_since: float | None = None
    block: Point | None = None
    rings: tuple[Ring, ...] = ()
    held_bytes: float | None = None
    steps: tuple[Step, ...] = ()
    bound_bytes: int = 0
    incident: LeakAlarm | None = None
    risen_seconds: float | None = None
    verdict: Certainty = Certainty.NONE
    estimate: Estimate | None = None


def observe_page(snapshot: Snapshot) -> Observation:
    """Return the observation of a snapshot's engine, without any memory."""
    page = snapshot.page
    return Observation(
        seconds=snapshot.monotonic_seconds,
        held_bytes=None,
        finished_total=count_finished(page),
        running=count_running(page),
        run_id=identify_run(page),
        awake=is_page_awake(page),
    )


def observe_gpus(snapshot: Snapshot, gpus: tuple[Gpu, ...]) -> Iterator[tuple[Gpu, Observation]]:
    """Yield each GPU with its observation; the room is free memory, limited to what the engine may still take."""
    seen = observe_page(snapshot)
    bound_bytes = sum(pool.size_bytes for pool in snapshot.pools if pool.role is None)
    for gpu in gpus:
        room_bytes = None if gpu.reading.memory is None else gpu.reading.memory.left_bytes
        granted_bytes = None if gpu.inside is None else gpu.inside.granted_bytes
        if room_bytes is not None and granted_bytes is not None and gpu.engine_bytes is not None:
            room_bytes = min(room_bytes, max(0, granted_bytes - gpu.engine_bytes))
        neighbours = gpu.process_count if gpu.engine_bytes is None else None
        memory = {
            "held_bytes": gpu.held_bytes,
            "room_bytes": room_bytes,
            "bound_bytes": bound_bytes,
        }
        yield gpu, replace(seen, neighbours=neighbours, **memory)


def count_folds(first: Point, before: Point, after: Point) -> float:
    """Return how many times the work done since the first block grew e-fold, by time or by requests."""
    by_time = log(
        (after.seconds - first.seconds + 60.0) / max(60.0, before.seconds - first.seconds + 60.0)
    )
    by_requests = log(
        (after.requests - first.requests + 50.0)
        / max(50.0, before.requests - first.requests + 50.0)
    )
    return max(by_time, by_requests, 1e-9)
