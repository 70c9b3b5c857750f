"""The walk through all alerts: for each an event that should raise it, and cards of several sizes and shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from alerts.tests.engines import CARD_GIB, GIB, Engine, Phase
from alerts.tests.situations import Situation, at_work, down, gone, idle, loading, rest

EVENT: Final = 60
"""The minute of the event."""

LONG_EVENT: Final = 600
LONG_MINUTES: Final = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A card of a size, the share of it that is the budget, and the GiB that the engine holds beside that budget."""

    name: str
    card: float = CARD_GIB
    share: float = 0.92
    outside: float = 2.0

    @property
    def free(self) -> float:
        """Return the GiB that are free when the engine first serves."""
        return self.card * (1 - self.share) - self.outside


BOXES: Final = (
    Box(name="0.85", share=0.85),
    Box(name="0.92"),
    Box(name="0.95", share=0.95),
    Box(name="10 GB slice", card=9.75, outside=0.5),
    Box(name="L4", card=22.5, outside=0.7),
)
ANY: Final = (replace(BOXES[1], name="any"),)

Series = tuple[str, str]
TARGET: Final = 'job="{namespace}/vllm-headroom",namespace="{namespace}",pod="m-0",instance="m-0:9839"'
GPU: Final = f'{TARGET},gpu="0",uuid="GPU-0"'
RANK: Final = f'{TARGET},model_name="m",engine="0"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happens; `phases` are of the only engine, and `full` is how many minutes later the card is full."""

    text: str
    phases: Callable[[Box], Sequence[Phase]]
    boxes: Sequence[Box] = ANY
    more: Callable[[Box], Sequence[Series]] = lambda _: ()
    full: int | None = None
    replicas: int = 1
    beside: int = 0
    """Replicas of the same model that go on at work."""

    gpus: int = 1
    is_long: bool = False

    @property
    def minute(self) -> int:
        """Return when it happens."""
        return LONG_EVENT if self.is_long else EVENT

    def situation(self, key: str, box: Box) -> Situation:
        """Return the event on one card as a situation."""
        engines = [
            Engine(
                name=f"m-{i}",
                model="m",
                phases=tuple(self.phases(box)),
                card=box.card,
                share=box.share,
                gpus=self.gpus,
            )
            for i in range(self.replicas)
        ]
        engines += [replace(engines[0], name=f"beside-{i}", phases=(_work(box, 240),)) for i in range(self.beside)]
        return Situation(name=f"walk {key} {box.name}", engines=engines, more=list(self.more(box)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An alert on the walk: the event that should raise it, what keeps it silent, and the verdict."""

    alert: str
    event: str
    silent: str
    verdict: str = "keep"


def _work(box: Box, minutes: int = EVENT, **more: object) -> Phase:
    return at_work(minutes, **({"outside": box.outside} | more))


def _then(box: Box, *phases: Phase) -> Sequence[Phase]:
    """Return work, these phases, and work that fills the time."""
    return rest(_work(box), *phases, outside=box.outside)


def _leak(box: Box) -> Sequence[Phase]:
    """Fill the rest of the card in two hours: growing after 20 minutes, leaking after 60, as the sidecar says."""

    def part(begin: int, end: int, state: str) -> Phase:
        outside = (box.outside + box.free * begin / 120, box.outside + box.free * end / 120)
        left = ((120 - begin) * 60.0, (120 - end) * 60.0)
        return at_work(end - begin, outside=outside, leak=state, left=None if state == "stable" else left)

    return _then(
        box,
        part(0, 20, "stable"),
        part(20, 60, "growing"),
        part(60, 120, "leaking"),
        loading(10, ended=("out_of_memory",)),
    )


def _lines(metric: str, labels: str, *runs: tuple[float, int], interval: int = 1) -> Series:
    """Return a series of levels and their minutes."""
    values = " ".join(f"{value:.4f}x{minutes // interval - 1}" for value, minutes in runs)
    return f"{metric}{{{labels}}}", values


AFTER: Final = 180
LONG_AFTER: Final = LONG_MINUTES - LONG_EVENT
TEN: Final = 10
"""The interval in minutes of the long play."""


def _since(metric: str, labels: str, before: float, after: float) -> Series:
    """Return a series that has one level before the event and another from it on."""
    return _lines(metric, labels, (before, EVENT), (after, AFTER))


def _from(metric: str, labels: str, value: float) -> Series:
    """Return a series that begins with the event."""
    return f"{metric}{{{labels}}}", f"_x{EVENT - 1} {value:.4f}x{AFTER - 1}"


def _counted(metric: str, labels: str, rate: float, *, begins: int = 0) -> Series:
    """Return a counter in the long play, which grows from its beginning on by so much in ten minutes."""
    start = f"0x{begins // TEN - 1} " if begins else ""
    return f"{metric}{{{labels}}}", f"{start}0+{rate:.4f}x{(LONG_MINUTES - begins) // TEN - 1}"


EVENTS: Final[dict[str, Event]] = {
    "leak": Event(
        text="a leak fills what is free in two hours; `growing` after 20 minutes, `leaking` after 60",
        phases=_leak,
        boxes=BOXES,
        full=120,
    ),
    "over budget": Event(
        text="it holds all of the card but 0.8 % from its first request on",
        phases=lambda box: rest(loading(EVENT), outside=box.card * (1 - box.share - 0.008), burst=0.1),
        boxes=BOXES,
    ),
    "rise": Event(
        text="a burst takes nine tenths of what is free, each minute",
        phases=lambda box: _then(box, _work(box, AFTER, burst=0.9 * box.free)),
        boxes=BOXES,
    ),
    "peak": Event(
        text="one burst leaves 50 MiB",
        phases=lambda box: _then(box, _work(box, 1, burst=box.free - 0.05)),
        boxes=BOXES,
    ),
    "step": Event(
        text="a step leaves 300 MiB, or a third of what was free",
        phases=lambda box: _then(box, _work(box, AFTER, outside=box.outside + box.free - min(0.29, box.free / 3))),
        boxes=BOXES,
    ),
    "neighbour": Event(
        text="another process takes all that is free but 200 MiB",
        phases=lambda box: _then(box, _work(box, AFTER, others=max(box.free - 0.2, box.free / 2))),
        boxes=BOXES,
    ),
    "peaks": Event(
        text="with the probe: what a step may take falls below the largest peak",
        phases=lambda box: _then(box, _work(box, AFTER)),
        boxes=BOXES,
        more=lambda _: [
            _since("headroom_engine_peak_bytes", f'{GPU},work="prompt_logprobs"', GIB, GIB),
            _since("headroom_engine_peak_spread_bytes", f'{GPU},work="prompt_logprobs"', 0.1 * GIB, 0.1 * GIB),
            _since("headroom_engine_peak_room_bytes", GPU, 2 * GIB, 0.5 * GIB),
        ],
    ),
    "outside torch": Event(
        text="with the probe: three quarters of what is free go to others than torch",
        phases=lambda box: _then(box, _work(box, AFTER, outside=box.outside + 0.75 * box.free)),
        boxes=BOXES,
        more=lambda box: [
            _since(
                "headroom_memory_discrepancy_bytes", f'{GPU},basis="probe"', 0.6 * GIB, (0.6 + 0.75 * box.free) * GIB
            )
        ],
    ),
    "sleep": Event(
        text="it sleeps and keeps a third of the card",
        phases=lambda box: _then(box, Phase(minutes=100, state="asleep", held=box.card / 3)),
        boxes=BOXES,
    ),
    "residue": Event(
        text="each sleep keeps a tenth of the card more",
        phases=lambda box: rest(
            _work(box, 20),
            Phase(minutes=20, state="asleep", held=0.1 * box.card),
            _work(box, 20),
            Phase(minutes=20, state="asleep", held=0.2 * box.card),
            outside=box.outside,
        ),
        boxes=BOXES,
        more=lambda box: [
            (
                f"headroom_sleep_residue_bytes{{{GPU}}}",
                f"_x19 {0.1 * box.card * GIB:.0f}x39 {0.2 * box.card * GIB:.0f}x{AFTER - 1}",
            )
        ],
    ),
    "left behind": Event(
        text="processes of an exited engine keep a fifth of the card",
        phases=lambda box: _then(box, _work(box, AFTER)),
        boxes=BOXES,
        more=lambda box: [_from("headroom_gpu_memory_left_behind_bytes", GPU, 0.2 * box.card * GIB)],
    ),
    "not released": Event(
        text="it exits, no process of it is left, and nine tenths of the card stay in use",
        phases=lambda box: _then(box, down(AFTER, "gone", held=0, others=0.9 * box.card)),
        boxes=BOXES,
        more=lambda box: [
            _since("headroom_gpu_memory_held_bytes", f'{GPU},holder="unattributed"', 0, 0.9 * box.card * GIB)
        ],
    ),
    "allocator": Event(
        text="with the probe: torch counts a retry and an OutOfMemoryError, and the engine serves on",
        phases=lambda box: _then(box, _work(box, AFTER, ooms=1)),
    ),
    "host leak": Event(
        text="the sidecar reports that a process leaks host memory, with 40 minutes left",
        phases=lambda box: _then(box, _work(box, AFTER)),
        more=lambda _: [
            _since("headroom_host_leak_state", f'{TARGET},process="engine_core",state="leaking"', 0, 1),
            _from("headroom_host_time_to_oom_seconds", TARGET, 2400),
        ],
    ),
    "host step": Event(
        text="host memory rises in one step to 97 % of its limit",
        phases=lambda box: _then(box, _work(box, AFTER, host=62)),
    ),
    "kernel": Event(
        text="the kernel kills a process, and the engine serves on",
        phases=lambda box: _then(box, _work(box, AFTER, kills=1)),
    ),
    "shared memory": Event(
        text="files in /dev/shm grow by 1.5 GiB an hour",
        phases=lambda box: (
            _work(box, LONG_EVENT),
            _work(box, LONG_AFTER, shm=(1.0, 1.0 + 1.5 * LONG_AFTER / 60)),
        ),
        is_long=True,
    ),
    "unified": Event(
        text="on unified memory the page cache leaves 300 MiB in blocks, and processes wait for memory",
        phases=lambda box: _then(box, _work(box, AFTER)),
        more=lambda _: [
            _since("headroom_unified_memory_free_blocks_bytes", GPU, 8 * GIB, 0.3 * GIB),
            _since("headroom_memory_pressure_ratio", TARGET, 0, 0.2),
        ],
    ),
    "exit": Event(
        text="it exits with requests in it, and is not started again; another replica serves",
        phases=lambda box: _then(box, down(AFTER, "gone")),
        beside=1,
    ),
    "death": Event(
        text="it runs out of memory with requests in it, and serves again after 2 minutes; another replica serves",
        phases=lambda box: _then(box, loading(2, ended=("out_of_memory",))),
        beside=1,
    ),
    "loop": Event(
        text="it exits every 10 minutes",
        phases=lambda box: _then(
            box, *(phase for _ in range(9) for phase in (loading(3, ended=("gone",)), _work(box, 7)))
        ),
    ),
    "outages": Event(
        text="the model is lost for 15 minutes of each half hour",
        phases=lambda box: _then(
            box, *(phase for _ in range(5) for phase in (loading(15, ended=("gone",)), _work(box, 15)))
        ),
    ),
    "half lost": Event(
        text="all of four replicas crash and load for half an hour",
        phases=lambda box: _then(box, loading(30, ended=("gone",))),
        replicas=4,
    ),
    "hang": Event(
        text="the sidecar reports `stalled`",
        phases=lambda box: _then(box, Phase(minutes=AFTER, state="stalled", running=20)),
    ),
    "start": Event(
        text="a restarted engine loads and never serves; it is known to load in 10 minutes",
        phases=lambda box: (
            loading(10),
            _work(box, 40),
            idle(10, outside=box.outside),
            loading(AFTER, ended=("replaced",)),
        ),
    ),
    "thrashing": Event(
        text="running requests are preempted three times a minute, with a queue",
        phases=lambda box: _then(box, _work(box, AFTER, running=50, waiting=200, kv=0.99, preempted=3)),
    ),
    "stranded": Event(
        text="idle, and a tenth of the KV cache stays in use",
        phases=lambda box: _then(box, idle(AFTER, outside=box.outside, kv=0.1)),
        more=lambda _: [_since("headroom_engine_kv_cache_stranded_ratio", RANK, 0, 0.1)],
    ),
    "blocks": Event(
        text="at each of three idle times more of the KV cache is held by nobody",
        phases=lambda box: _then(box, _work(box, AFTER)),
        more=lambda _: [
            _lines(
                "headroom_engine_kv_cache_stranded_ratio",
                RANK,
                *((0, EVENT), (0.01, 30), (0.02, 30), (0.03, 120)),
            )
        ],
    ),
    "blocks under load": Event(
        text="without an idle minute the KV cache fills from a tenth within three hours",
        phases=lambda box: (
            _work(box, running=8, kv=0.1),
            _work(box, 120, running=8, kv=(0.1, 0.985)),
            _work(box, 60, running=8, kv=0.985),
        ),
    ),
    "prefix": Event(
        text="a tenth of 1,000 prompt tokens a second is found in the prefix cache",
        phases=lambda box: (_work(box, LONG_EVENT), _work(box, LONG_AFTER)),
        more=lambda _: [
            _counted("headroom_engine_prefix_cache_queries_total", RANK, 600_000, begins=LONG_EVENT),
            _counted("headroom_engine_prefix_cache_hits_total", RANK, 60_000, begins=LONG_EVENT),
        ],
        is_long=True,
    ),
    "no prefix": Event(
        text="none of 1,000 prompt tokens a second is found in the prefix cache",
        phases=lambda box: (_work(box, LONG_EVENT), _work(box, LONG_AFTER)),
        more=lambda _: [
            _counted("headroom_engine_prefix_cache_queries_total", RANK, 600_000, begins=LONG_EVENT),
            _counted("headroom_engine_prefix_cache_hits_total", RANK, 0, begins=LONG_EVENT),
        ],
        is_long=True,
    ),
    "bus": Event(
        text="a GPU falls off the bus, and the engine exits",
        phases=lambda box: _then(box, down(AFTER, "gone", gpu_up=False, xids=1)),
        gpus=2,
    ),
    "one GPU": Event(
        text="a GPU does not answer, and the engine seems to serve",
        phases=lambda box: _then(box, _work(box, AFTER, gpu_up=False)),
        gpus=2,
    ),
    "xid": Event(
        text="the driver reports XID 79, and the engine serves",
        phases=lambda box: _then(box, _work(box, AFTER, xids=1)),
    ),
    "heat": Event(
        text="a GPU has 92 °C",
        phases=lambda box: _then(box, _work(box, AFTER)),
        more=lambda _: [_since("headroom_gpu_temperature_celsius", GPU, 70, 92)],
    ),
    "unreachable": Event(
        text="the sidecar does not answer; its target stays",
        phases=lambda box: _then(box, Phase(minutes=AFTER, up=False)),
    ),
    "no target": Event(
        text="all targets of a job are gone, with requests in the engine",
        phases=lambda box: (_work(box), gone(minutes=AFTER)),
    ),
    "sidecar": Event(
        text="the sidecar is killed every 6 minutes",
        phases=lambda box: _then(box, _work(box, AFTER, sidecar=6)),
    ),
    "source": Event(
        text="the driver does not answer, and the engine serves",
        phases=lambda box: _then(box, _work(box, AFTER, nvml=False)),
    ),
    "blind": Event(
        text="the page that the sidecar reads has no series of a known engine",
        phases=lambda box: _then(box, _work(box, AFTER)),
        more=lambda _: [
            _since("headroom_input_available", f'{TARGET},input="{name}"', 1, 0)
            for name in ("requests_running", "requests_waiting", "kv_cache_usage")
        ],
    ),
    "stale": Event(
        text="the newest sample gets no younger",
        phases=lambda box: _then(box, _work(box, AFTER)),
        more=lambda _: [(f"headroom_sample_age_seconds{{{TARGET}}}", f"1x{EVENT - 1} 0+60x{AFTER - 1}")],
    ),
    "renamed": Event(
        text="after an upgrade one input is not on the engine's page any more",
        phases=lambda box: _then(box, _work(box, AFTER)),
        more=lambda _: [
            _since("headroom_input_available", f'{TARGET},input="requests_running"', 1, 1),
            _since("headroom_input_available", f'{TARGET},input="kv_cache_usage"', 1, 0),
        ],
    ),
}

STEPS: Final[Sequence[Step]] = (
    Step(
        alert="HeadroomModelDown",
        event="half lost",
        silent="the last replica was stopped, or was idle when it went",
        verdict="changed: a replica that loads after a crash excuses nothing",
    ),
    Step(
        alert="HeadroomReplicasLost",
        event="half lost",
        silent="fewer than half of the replicas, or one",
        verdict="changed: a replica that loads after a crash counts as lost",
    ),
    Step(alert="HeadroomModelCrashLoop", event="outages", silent="lost for less than half an hour in six hours in all"),
    Step(
        alert="HeadroomMemoryDiscrepancy",
        event="over budget",
        silent="less than 3 % or 1 GiB beyond the budget, or a fiftieth of the card is free",
        verdict="changed: from the first request on",
    ),
    Step(
        alert="HeadroomMemoryDiscrepancyHigh",
        event="over budget",
        silent="a hundredth of the card is free, and the largest rise fits",
        verdict="changed: from the first request on",
    ),
    Step(alert="HeadroomGpuMemoryGrowing", event="leak", silent="the detector stays at `stable`"),
    Step(alert="HeadroomGpuMemoryLeak", event="leak", silent="more than a day is left"),
    Step(alert="HeadroomOutOfMemorySoon", event="leak", silent="`growing` turns to `leaking` with nothing left"),
    Step(alert="HeadroomAllocatorRetries", event="allocator", silent="no probe; or the engine starts, or had a page"),
    Step(alert="HeadroomAllocatorOutOfMemory", event="allocator", silent="no probe; or the engine had a page"),
    Step(alert="HeadroomOutsideTorchGrowing", event="outside torch", silent="no probe; or less than 1.5 % of the card"),
    Step(alert="HeadroomHostMemoryLeak", event="host leak", silent="the detector stays at `stable`"),
    Step(alert="HeadroomHostMemoryRunsOut", event="host leak", silent="no limit is known"),
    Step(alert="HeadroomHostOutOfMemorySoon", event="host leak", silent="no limit is known, or an hour is left"),
    Step(alert="HeadroomHostOomKill", event="kernel", silent="the engine ends of it and had its page"),
    Step(alert="HeadroomSharedMemoryGrowing", event="shared memory", silent="uneven, or less than 4 GiB a day"),
    Step(alert="HeadroomUnifiedMemoryCached", event="unified", silent="no process waits for memory"),
    Step(alert="HeadroomHostMemoryLow", event="host step", silent="a twentieth of the limit, or 4 GiB, is left"),
    Step(alert="HeadroomGpuMemoryLow", event="step", silent="512 MiB, or half of what was free at first, are left"),
    Step(
        alert="HeadroomPeakDoesNotFit",
        event="peaks",
        silent="no probe with its option; the peak fits; a kind that was seen too seldom",
    ),
    Step(alert="HeadroomGpuMemoryPeak", event="peak", silent="256 MiB, or half of what was free at first, are left"),
    Step(alert="HeadroomGpuMemoryTight", event="rise", silent="two thirds of what is free hold the largest rise"),
    Step(
        alert="HeadroomNeighbourGrowing",
        event="neighbour",
        silent="less than 1 GiB, as where no more was free; a slice has no neighbours",
    ),
    Step(
        alert="HeadroomNeighbourFillsGpu",
        event="neighbour",
        silent="less than 1 GiB, as where no more was free; a slice has no neighbours",
    ),
    Step(alert="HeadroomSleepKeepsMemory", event="sleep", silent="less than a fifth of the card, or 3 GiB"),
    Step(alert="HeadroomSleepResidueGrowing", event="residue", silent="less than 5 % of the card, or 1 GiB, more"),
    Step(alert="HeadroomMemoryLeftBehind", event="left behind", silent="less than 1 GiB"),
    Step(alert="HeadroomMemoryNotReleased", event="not released", silent="a process of the engine is left"),
    Step(
        alert="HeadroomEngineDown",
        event="exit",
        silent="it was stopped, or loads at once",
    ),
    Step(
        alert="HeadroomEngineDied",
        event="death",
        silent="no request was in it, or another alert has paged for it",
        verdict="changed: it lasts ten minutes, so that it is delivered",
    ),
    Step(alert="HeadroomEngineCrashLoop", event="loop", silent="fewer than three exits in 90 minutes"),
    Step(alert="HeadroomEngineStalled", event="hang", silent="a witness other than the page says that it works"),
    Step(alert="HeadroomEngineStuckStarting", event="start", silent="it exits first, which CrashLoop counts"),
    Step(alert="HeadroomKvCacheThrashing", event="thrashing", silent="one preemption a minute, or batch"),
    Step(alert="HeadroomKvCacheStranded", event="stranded", silent="never idle for a minute, and no probe"),
    Step(alert="HeadroomKvBlocksLeak", event="blocks", silent="never idle, and no probe"),
    Step(alert="HeadroomKvBlocksLeakSuspected", event="blocks under load", silent="the load is not level"),
    Step(alert="HeadroomQueueBacklog", event="thrashing", silent="ten wait, or fewer than run; or batch"),
    Step(alert="HeadroomPrefixCacheNotPaying", event="prefix", silent="less than 100 tokens a second"),
    Step(alert="HeadroomPrefixCacheCannotHit", event="no prefix", silent="less than 100 tokens a second"),
    Step(alert="HeadroomEngineLostGpu", event="bus", silent="the engine serves"),
    Step(alert="HeadroomGpuLost", event="one GPU", silent="the engine had its page"),
    Step(alert="HeadroomGpuXid", event="xid", silent="an XID of an application, or the engine had its page"),
    Step(alert="HeadroomGpuHot", event="heat", silent="below 87 °C for a moment in five minutes"),
    Step(alert="HeadroomDown", event="unreachable", silent="the target is gone too, which is Absent's"),
    Step(alert="HeadroomAbsent", event="no target", silent="all engines were idle when they went"),
    Step(alert="HeadroomSidecarRestarts", event="sidecar", silent="fewer than four restarts in an hour"),
    Step(alert="HeadroomSourceDown", event="source", silent="the engine is down, loads or hangs"),
    Step(alert="HeadroomSidecarBlind", event="blind", silent="one input is there"),
    Step(alert="HeadroomSampleStale", event="stale", silent="two minutes or less"),
    Step(alert="HeadroomInputMissing", event="renamed", silent="it never was on the page"),
)

REMOVED: Final = (
    (
        "HeadroomMemoryPerRequestHigh",
        "a running request costs a tenth more than it did",
        "all that is held counts, pool included: above a share of 0.91 the card is full before, and it wanted a day",
        "removed: HeadroomGpuMemoryGrowing and HeadroomMemoryDiscrepancy compare the part that can grow",
    ),
)
"""Alerts that are no more, with their event, why they could not fire in time, and what fires now."""
