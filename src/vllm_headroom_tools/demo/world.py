"""The simulated world: one GPU, the engine on it, and the scenarios."""

from math import ceil, cos, exp, inf, log1p, pi, sqrt
from random import Random
from typing import Final

from msgspec import Struct

from vllm_headroom.units import DAY_SECONDS, GIB, MIB

Bounds = tuple[float, float]
"""A lower and an upper bound; values are drawn uniformly from the range between them."""


class Visits(Struct, frozen=True):
    """A recurring event: a burst of load, a neighbour, a hang or a sleep."""

    pause_seconds: Bounds
    """The time between the end of one visit and the start of the next."""

    stay_seconds: Bounds

    size: Bounds = (1.0, 1.0)
    """For a burst, the factor that multiplies the load. For a neighbour, its GPU memory in bytes.
    """


class Scenario(Struct, frozen=True, kw_only=True):
    """The events that occur in a simulation in addition to normal operation."""

    name: str
    leak_bytes_per_request: float = 0.0
    bursts: Visits | None = None
    neighbours: Visits | None = None

    restart_after_seconds: Bounds | None = None
    """How long the engine serves until it exits.

    None if the engine exits only when memory runs out.
    """

    loading_seconds: Bounds = (40.0, 70.0)

    is_cold: bool = False
    """Whether the engine starts when the demo starts. Otherwise, it has already served for an hour.
    """

    hangs: Visits | None = None
    """The hangs of the engine. During a hang, the engine takes no steps and its page does not
    change.
    """

    sleeps: Visits | None = None

    has_mig: bool = False
    """Whether the engine runs on the first of two MIG instances."""

    excess_mib: int = 0
    """GPU memory that the engine takes beyond its budget after its first finished request."""

    excess_after_seconds: float = -inf
    """How long after the start of the demo the engine stays within its budget."""

    host_leak_bytes_per_request: float = 0.0

    offloaded_bytes_per_request: float = 0.0
    """The host memory that each request takes in the configured KV cache offload."""

    strands_after_seconds: float = inf
    """From this time after the demo's start, aborted requests keep their KV cache."""

    page_fails_after_seconds: float = inf
    """From this time after the demo's start, the engine's page responds with an error."""


TABLE: Final[dict[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="healthy"),
        # 12.8 MB per 1,000 requests, from the post-mortem that led to this project.
        Scenario(name="leak", leak_bytes_per_request=12_800.0),
        Scenario(name="burst", bursts=Visits((1_200.0, 2_400.0), (20.0, 45.0), (4.0, 6.0))),
        Scenario(
            name="neighbour",
            neighbours=Visits((300.0, 1_500.0), (1_200.0, 3_600.0), (1.0 * GIB, 3.0 * GIB)),
        ),
        Scenario(name="restart", restart_after_seconds=(6_300.0, 8_100.0)),
        Scenario(name="crash", restart_after_seconds=(600.0, 1_800.0)),
        Scenario(name="hang", hangs=Visits((900.0, 1_500.0), (300.0, 600.0))),
        Scenario(
            name="slow-start",
            is_cold=True,
            loading_seconds=(720.0, 1_800.0),
            restart_after_seconds=(7_200.0, 10_800.0),
        ),
        Scenario(name="sleep", sleeps=Visits((900.0, 1_500.0), (600.0, 1_200.0))),
        Scenario(name="mig", has_mig=True),
        # The excess is 5.9 % of the budget. A public report found an excess of 4.4 to 5.4 % on 16
        # engines.
        Scenario(name="over-budget", excess_mib=4_400),
        Scenario(name="low-memory", excess_mib=5_450, excess_after_seconds=600.0),
        # At 10 requests per second, this is 16 MB per second.
        Scenario(name="host-leak", host_leak_bytes_per_request=1_600_000.0),
        # At this rate, the offload grows by 4 MB per second and is full in less than two hours.
        Scenario(name="filling", offloaded_bytes_per_request=400_000.0),
        Scenario(name="stranded", strands_after_seconds=600.0),
        Scenario(name="blind", page_fails_after_seconds=600.0),
    )
}


def make_random(seed: int, purpose: str) -> Random:
    """Return a random number generator for one purpose.

    Each purpose has a separate generator. Another draw for one purpose therefore does not change
    the other draws.
    """
    return Random(f"{seed}:{purpose}")  # noqa: S311 - a simulation that must repeat, not a secret


def draw_poisson(random: Random, mean: float) -> int:
    """Return a Poisson-distributed count with this mean, by Knuth's algorithm.

    The mean must be below 700, because exp(-mean) becomes 0 above that.
    """
    limit = exp(-mean)
    product = random.random()
    events = 0
    while product > limit:
        product *= random.random()
        events += 1
    return events


class Drift:
    """A value that drifts around 0.

    The drift is a first-order autoregressive process with one step per second. `deviation` is the
    standard deviation of the value. The value returns to 0 with the time constant `memory_seconds`.
    """

    def __init__(self, random: Random, *, deviation: float, memory_seconds: float) -> None:
        self._random = random
        self._persistence = exp(-1.0 / memory_seconds)
        self._shock = deviation * sqrt(1.0 - self._persistence**2)
        self._value = 0.0

    def step(self) -> float:
        """Advance by one second and return the value."""
        self._value = self._persistence * self._value + self._random.gauss(0.0, self._shock)
        return self._value


class Recurring:
    """Something that arrives, stays and leaves repeatedly; if `visits` is None, it never arrives.

    `number` counts the visits from 1. `size`, `came_seconds` and `leaves_seconds` describe the
    latest visit, which may still be in the future.
    """

    def __init__(self, random: Random, visits: Visits | None) -> None:
        self.number = 0
        self.size = 0.0
        self.came_seconds = 0.0
        self.leaves_seconds = 0.0
        self._seconds = 0.0
        self._random = random
        self._visits = visits

    def advance(self, seconds: float) -> None:
        """Advance to a time that is not in the past.

        When a visit has ended, the next one is planned.
        """
        self._seconds = seconds
        if self._visits is None:
            return
        if self.number == 0 or seconds >= self.leaves_seconds:
            self.number += 1
            pause_seconds = self._random.uniform(*self._visits.pause_seconds)
            self.came_seconds = self.leaves_seconds + pause_seconds
            stay_seconds = self._random.uniform(*self._visits.stay_seconds)
            self.leaves_seconds = self.came_seconds + stay_seconds
            self.size = self._random.uniform(*self._visits.size)

    @property
    def is_here(self) -> bool:
        """Return whether a visit is in progress."""
        return self.came_seconds <= self._seconds < self.leaves_seconds


REQUESTS_PER_SECOND: Final = 10.0
"""The normal load."""

MAX_RUNNING: Final = 256
"""vLLM's max_num_seqs."""

BLOCK_TOKENS: Final = 16
KV_BLOCKS: Final = 28_849
"""The number of KV cache blocks. A block takes 2 MiB (for an 8B model with 128 KiB per token).

This many blocks fit in the budget alongside the weights, graphs and activations.
"""

CAPACITY_TOKENS: Final = KV_BLOCKS * BLOCK_TOKENS
PROMPT_TOKENS: Final = 1_550
GENERATED_TOKENS: Final = 400
MEAN_REQUEST_TOKENS: Final = PROMPT_TOKENS + GENERATED_TOKENS // 2
"""The average number of tokens of a running request. 256 such requests almost fill the cache."""

SMALL_SEGMENT_MIB: Final = 2
LARGE_SEGMENT_MIB: Final = 20
ACTIVATIONS_MIB: Final = 1_400
"""The memory that vLLM's profile run reserves for activations; the allocator never exceeds it."""

WEIGHTS_MIB: Final = 15_316
"""An 8B model in 16 bits."""

KV_MIB: Final = 2 * KV_BLOCKS
GRAPHS_MIB: Final = 620
BUDGET_MIB: Final = WEIGHTS_MIB + KV_MIB + GRAPHS_MIB + ACTIVATIONS_MIB
"""The budget: 92 % (gpu_memory_utilization) of 81,559 MiB. The KV cache gets what the other parts
leave.
"""

OUTSIDE_MIB: Final = 560 + 220
"""The memory of the CUDA context and NCCL, which vLLM's budget does not include.

It is already allocated when vLLM measures the free memory.
"""

TOTAL_BYTES: Final = 81_559 * MIB
RESERVED_BYTES: Final = 600 * MIB
MAX_USED_BYTES: Final = TOTAL_BYTES - RESERVED_BYTES - 50 * MIB
"""Above this, the next allocation exceeds the free memory and fails."""

HOST_LIMIT_BYTES: Final = 64 * GIB
"""The memory limit of the engine's container, in scenarios with a limit."""

OFFLOAD_GIB: Final = 24
"""vLLM's kv_offloading_size in the scenario in which the offload fills up."""

MAX_LEAKED_HOST_BYTES: Final = HOST_LIMIT_BYTES - 10 * GIB
"""If more host memory has leaked, the kernel kills the engine core. The processes need the rest of
the limit.
"""

WARM_SECONDS: Final = 3_600
"""The time for which the engine has been serving when the demo begins."""

NEIGHBOUR_CONTEXT_MIB: Final = 450


class SimulatedRun:
    """One run of the engine, from start to exit: its queue, counters and memory.

    Times are in seconds since the demo began. `number` counts the runs from 0. `first_pid` is the
    API server's pid. The engine core and the worker have the next two pids.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        *,
        started_seconds: float,
        serving_seconds: float,
        excess_mib: int = 0,
        excess_after_seconds: float = -inf,
    ) -> None:
        self.number = number
        self._excess_mib = excess_mib
        self._excess_after_seconds = excess_after_seconds
        self.first_pid = 4_100 + 37 * number
        self.started_seconds = started_seconds
        self.serving_seconds = serving_seconds
        self.is_asleep = False
        self.leaked_bytes = 0.0
        self.leaked_host_bytes = 0.0
        self.offloaded_bytes = 0.0
        self.kv_used_ratio = 0.0
        self.running = 0
        self.waiting = 0
        self.finished_total = 0
        self.preemptions_total = 0
        self.steps_total = 0
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.prefix_hits_total = 0
        self._stranded_tokens = 0.0
        self._preempted = 0
        """The number of waiting requests that were preempted; their prompts have already been
        counted.
        """

        self._max_running = 0
        self._random = make_random(seed, f"traffic {number}")
        self._length = Drift(self._random, deviation=0.05, memory_seconds=20.0)
        self._tokens_per_request = float(MEAN_REQUEST_TOKENS)

    def sleep(self, *, asleep: bool) -> None:
        """Put the engine to sleep or wake it up.

        vLLM ends all requests before it sleeps.
        """
        if asleep and not self.is_asleep:
            self.running = 0
            self.waiting = 0
            self._preempted = 0
            self.kv_used_ratio = 0.0
        self.is_asleep = asleep

    def strand(self) -> None:
        """Abort all requests without freeing their part of the cache."""
        self._stranded_tokens += self.running * self._tokens_per_request
        self.running = 0
        self.waiting = 0
        self._preempted = 0

    def step(
        self,
        arrived: int,
        leak_bytes_per_request: float = 0.0,
        host_leak_bytes_per_request: float = 0.0,
        offloaded_bytes_per_request: float = 0.0,
    ) -> None:
        """Serve for one second in which `arrived` requests arrive, or refuse them during sleep."""
        if self.is_asleep:
            return
        # The latency is 8 s at the normal load of 80 running requests.
        latency_seconds = 6.4 * (1.0 + self.running / 320.0)
        finished = min(self.running, draw_poisson(self._random, self.running / latency_seconds))
        self.generation_tokens_total += int(self.running * GENERATED_TOKENS / latency_seconds)
        if self.running:
            self.steps_total += 50
        self.finished_total += finished
        self.leaked_bytes += finished * leak_bytes_per_request
        self.leaked_host_bytes += finished * host_leak_bytes_per_request
        offloaded_bytes = self.offloaded_bytes + finished * offloaded_bytes_per_request
        self.offloaded_bytes = min(offloaded_bytes, OFFLOAD_GIB * GIB)
        self.running -= finished
        self.waiting += arrived
        # The scheduler fills up to 98 % of the cache, at current request sizes. If the requests
        # outgrow the cache, the code below preempts some of them.
        fitting = int(0.98 * CAPACITY_TOKENS / self._tokens_per_request)
        free_places = min(fitting, MAX_RUNNING) - self.running
        admitted = max(0, min(self.waiting, free_places))
        resumed = min(admitted, self._preempted)
        self.waiting -= admitted
        self.running += admitted
        self._preempted -= resumed
        tokens = (admitted - resumed) * PROMPT_TOKENS
        self.prompt_tokens_total += tokens
        hit_ratio = min(1.0, max(0.0, self._random.gauss(0.4, 0.05)))
        self.prefix_hits_total += int(tokens * hit_ratio)
        self._tokens_per_request = MEAN_REQUEST_TOKENS * (1.0 + self._length.step())
        evicted = max(0, self.running - int(CAPACITY_TOKENS / self._tokens_per_request))
        self.running -= evicted
        self.waiting += evicted
        self._preempted += evicted
        self.preemptions_total += evicted
        held_tokens = self.running * self._tokens_per_request + self._stranded_tokens
        self.kv_used_ratio = min(1.0, held_tokens / CAPACITY_TOKENS)
        self._max_running = max(self._max_running, self.running)

    def count_gpu_bytes(self, seconds: float) -> int:
        """Return the worker's GPU memory at this time in bytes.

        The result is 0 before the worker starts. Even a healthy engine keeps taking memory that it
        never frees. The growth of a healthy engine is modelled on PyTorch's caching allocator and
        on lazily loaded kernels. The allocator has segments of 2 MiB and 20 MiB
        (c10/core/AllocatorConfig.h). The n-th request needs something new with a probability that
        falls as 1/n. This growth therefore fades, unlike the growth of a leak.
        """
        if seconds < self.started_seconds:
            return 0
        if seconds < self.serving_seconds:
            loading_seconds = self.serving_seconds - self.started_seconds
            done_ratio = (seconds - self.started_seconds) / loading_seconds
            # In the first 70 % of the start, the weights are loaded. The KV cache and graphs follow
            # at the end.
            weights_mib = WEIGHTS_MIB * min(1.0, done_ratio / 0.7)
            loaded_mib = round_to_segments(weights_mib, SMALL_SEGMENT_MIB)
            return (OUTSIDE_MIB + loaded_mib) * MIB
        if self.is_asleep:
            return (OUTSIDE_MIB + GRAPHS_MIB) * MIB
        first_uses_mib = round_to_segments(40.0 * log1p(self.finished_total), LARGE_SEGMENT_MIB)
        # Scratch memory grows with the largest batch so far and is never freed.
        scratch_mib = round_to_segments(2.0 * self._max_running, LARGE_SEGMENT_MIB)
        activations_mib = min(first_uses_mib + scratch_mib, ACTIVATIONS_MIB)
        leaked_mib = round_to_segments(self.leaked_bytes / MIB, SMALL_SEGMENT_MIB)
        budget_mib = WEIGHTS_MIB + KV_MIB + GRAPHS_MIB + activations_mib
        has_excess = self.finished_total > 0 and seconds >= self._excess_after_seconds
        excess_mib = self._excess_mib if has_excess else 0
        return (OUTSIDE_MIB + budget_mib + excess_mib + leaked_mib) * MIB


def round_to_segments(mib: float, segment_mib: int) -> int:
    """Return `mib` rounded up to a multiple of the segment size."""
    return ceil(mib / segment_mib) * segment_mib


class World:
    """The simulated GPU and its engine.

    They depend only on the scenario, the seed and the time. `seconds` is the time since the demo
    began, in whole seconds. `active_requests` is the number of requests that the GPU is processing.
    During a hang, `active_requests` is 0.
    """

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self.seconds = -WARM_SECONDS
        self.active_requests = 0
        self.has_mig = scenario.has_mig
        self.has_offload = scenario.offloaded_bytes_per_request > 0
        self.has_host_limit = self.has_offload or scenario.host_leak_bytes_per_request > 0
        self.oom_kills = 0
        self.neighbours = Recurring(make_random(seed, "neighbours"), scenario.neighbours)
        self._scenario = scenario
        self._seed = seed
        self._demand = make_random(seed, "demand")
        self._drift = Drift(self._demand, deviation=0.10, memory_seconds=600.0)
        self._bursts = Recurring(make_random(seed, "bursts"), scenario.bursts)
        self._hangs = Recurring(make_random(seed, "hangs"), scenario.hangs)
        self._sleeps = Recurring(make_random(seed, "sleeps"), scenario.sleeps)
        self._fate = make_random(seed, "fate")
        if scenario.is_cold:
            started_seconds = 0.0
            serving_seconds = self._fate.uniform(*scenario.loading_seconds)
        else:
            _, longest_loading_seconds = scenario.loading_seconds
            started_seconds = -WARM_SECONDS - longest_loading_seconds
            serving_seconds = -WARM_SECONDS
        self.engine = self._start_engine(0, started_seconds, serving_seconds)
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Advance the world to this time, second by second.

        A time in the past changes nothing.
        """
        while self.seconds + 1 <= seconds:
            self._step()

    @property
    def has_processes(self) -> bool:
        """Return whether the engine's processes have been started."""
        return self.seconds >= self.engine.started_seconds

    @property
    def is_serving(self) -> bool:
        """Return whether the engine is serving requests."""
        return self.seconds >= self.engine.serving_seconds

    @property
    def has_page(self) -> bool:
        """Return whether the engine's page can be read."""
        return self.seconds < self._scenario.page_fails_after_seconds

    @property
    def engine_bytes(self) -> int:
        """Return the GPU memory of the engine's worker."""
        return self.engine.count_gpu_bytes(self.seconds)

    @property
    def neighbour_bytes(self) -> int:
        """Return the neighbour's GPU memory, which grows at the start of each visit."""
        visit = self.neighbours
        if not visit.is_here:
            return 0
        growth_seconds = 0.2 * (visit.leaves_seconds - visit.came_seconds)
        grown_ratio = min(1.0, (self.seconds - visit.came_seconds) / growth_seconds)
        growth_mib = visit.size / MIB - NEIGHBOUR_CONTEXT_MIB
        grown_mib = round_to_segments(grown_ratio * growth_mib, SMALL_SEGMENT_MIB)
        return (NEIGHBOUR_CONTEXT_MIB + grown_mib) * MIB

    @property
    def used_bytes(self) -> int:
        """Return the GPU memory in use, excluding the memory that the driver reserves.

        On a data-centre GPU, 20 MiB of the used memory belong to no process.
        """
        return 20 * MIB + self.engine_bytes + self.neighbour_bytes

    def _step(self) -> None:
        """Advance by one second; after the engine's exit, its next run begins."""
        self.seconds += 1
        for visits in (self.neighbours, self._bursts, self._hangs, self._sleeps):
            visits.advance(self.seconds)
        self.engine.sleep(asleep=self._sleeps.is_here)
        arrived = self._draw_arrivals()
        if self.seconds == self._scenario.strands_after_seconds:
            self.engine.strand()
        if self.seconds >= self._scenario.strands_after_seconds:
            arrived = 0
        hangs = self._hangs.is_here
        if self.is_serving and not hangs:
            # The hour before the demo is healthy. A leak starts when the demo starts.
            if self.seconds > 0:
                self.engine.step(
                    arrived,
                    self._scenario.leak_bytes_per_request,
                    self._scenario.host_leak_bytes_per_request,
                    self._scenario.offloaded_bytes_per_request,
                )
            else:
                self.engine.step(arrived)
        self.active_requests = 0 if hangs else self.engine.running
        is_killed = self.engine.leaked_host_bytes > MAX_LEAKED_HOST_BYTES
        self.oom_kills += is_killed
        is_full = self.used_bytes > MAX_USED_BYTES
        if is_killed or is_full or self.seconds >= self._exits_at_seconds:
            started_seconds = self.seconds + self._fate.uniform(20.0, 50.0)
            loading_seconds = self._fate.uniform(*self._scenario.loading_seconds)
            self.engine = self._start_engine(
                self.engine.number + 1, started_seconds, started_seconds + loading_seconds
            )

    def _draw_arrivals(self) -> int:
        """Return this second's number of arrivals, with a daily cycle, drift and bursts."""
        wave = 1.0 + 0.2 * cos(2.0 * pi * (self.seconds - 10_800.0) / DAY_SECONDS)
        factor = self._bursts.size if self._bursts.is_here else 1.0
        rate = REQUESTS_PER_SECOND * wave * factor * exp(self._drift.step())
        return draw_poisson(self._demand, rate)

    def _start_engine(
        self, number: int, started_seconds: float, serving_seconds: float
    ) -> SimulatedRun:
        """Start the engine's next run and return it.

        The time of its exit is random.
        """
        self._exits_at_seconds = inf
        if self._scenario.restart_after_seconds is not None:
            run_seconds = self._fate.uniform(*self._scenario.restart_after_seconds)
            self._exits_at_seconds = max(0.0, serving_seconds) + run_seconds
        return SimulatedRun(
            self._seed,
            number,
            started_seconds=started_seconds,
            serving_seconds=serving_seconds,
            excess_mib=self._scenario.excess_mib,
            excess_after_seconds=self._scenario.excess_after_seconds,
        )
