"""The simulated world: one GPU, the engine on it and what happens to them."""

from __future__ import annotations

from math import ceil, cos, exp, inf, log1p, pi
from random import Random
from typing import Final

from vllm_headroom.units import MIB
from vllm_headroom_tools.demo.scenario import Bounds, Drift, Recurring, Scenario, Visit, draw_poisson, make_random

REQUESTS_PER_SECOND: Final = 10.0
MOST_RUNNING: Final = 256
"""vLLM's max_num_seqs."""

BLOCK_TOKENS: Final = 16
KV_BLOCKS: Final = 28_849
"""2 MiB each (an 8B model, 128 KiB per token): what fits the budget beside weights, graphs and activations."""

CAPACITY_TOKENS: Final = KV_BLOCKS * BLOCK_TOKENS
PROMPT_TOKENS: Final = 1_550
GENERATED_TOKENS: Final = 400
LIVE_TOKENS: Final = PROMPT_TOKENS + GENERATED_TOKENS // 2
"""Tokens a running request holds on average; 256 of them all but fill the cache."""

ADMISSION_RATIO: Final = 0.98
"""No request is admitted beyond this share of the cache: the scheduler keeps room for those that run."""

HIT_RATIO: Final = 0.4
ALONE_SECONDS: Final = 6.4
"""Latency on an idle engine; with the slowdown, 8 s at the 80 running requests of ordinary load."""

STEPS_PER_SECOND: Final = 50
SLOWDOWN_RUNNING: Final = 320.0
BUSIEST_SECONDS: Final = 3 * 3600.0
DAY_SECONDS: Final = 86_400.0


class Demand:
    """Requests that clients send, with a mild daily wave that peaks three hours into the demo."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._drift = Drift(random, deviation=0.10, memory_seconds=600.0)

    def step(self, seconds: float, factor: float) -> int:
        """Return the requests that arrive in one second, at `factor` times the ordinary load."""
        wave = 1.0 + 0.2 * cos(2.0 * pi * (seconds - BUSIEST_SECONDS) / DAY_SECONDS)
        return draw_poisson(self._random, REQUESTS_PER_SECOND * wave * factor * exp(self._drift.step()))


class Traffic:
    """The queue, the running requests and the counters of one run of the engine."""

    def __init__(self, random: Random) -> None:
        self.running = 0
        self.waiting = 0
        self.finished_total = 0
        self.preemptions_total = 0
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.steps_total = 0
        self.prefix_hits_total = 0
        self.kv_used_ratio = 0.0
        self._preempted = 0
        self._random = random
        self._length = Drift(random, deviation=0.05, memory_seconds=20.0)
        self._tokens_each = float(LIVE_TOKENS)

    def step(self, arrived: int) -> int:
        """Serve for one second; return how many requests finished in it."""
        latency_seconds = ALONE_SECONDS * (1.0 + self.running / SLOWDOWN_RUNNING)
        finished = min(self.running, draw_poisson(self._random, self.running / latency_seconds))
        self.generation_tokens_total += int(self.running * GENERATED_TOKENS / latency_seconds)
        self.steps_total += STEPS_PER_SECOND if self.running else 0
        self.finished_total += finished
        self.running -= finished
        self.waiting += arrived
        self._admit()
        self._tokens_each = LIVE_TOKENS * (1.0 + self._length.step())
        evicted = max(0, self.running - int(CAPACITY_TOKENS / self._tokens_each))
        self.running -= evicted
        self.waiting += evicted
        self._preempted += evicted
        self.preemptions_total += evicted
        self.kv_used_ratio = min(1.0, self.running * self._tokens_each / CAPACITY_TOKENS)
        return finished

    def abort(self) -> None:
        """End all requests and empty the cache."""
        self.running, self.waiting, self._preempted, self.kv_used_ratio = 0, 0, 0, 0.0

    def _admit(self) -> None:
        """Admit requests by the room there is now, without foreseeing that running requests grow."""
        fitting = int(ADMISSION_RATIO * CAPACITY_TOKENS / self._tokens_each)
        admitted = max(0, min(self.waiting, min(fitting, MOST_RUNNING) - self.running))
        self.waiting -= admitted
        self.running += admitted
        again = min(admitted, self._preempted)
        self._preempted -= again
        tokens = (admitted - again) * PROMPT_TOKENS
        self.prompt_tokens_total += tokens
        self.prefix_hits_total += int(tokens * min(1.0, max(0.0, self._random.gauss(HIT_RATIO, 0.05))))


SMALL_SEGMENT_MIB: Final = 2
LARGE_SEGMENT_MIB: Final = 20
ACTIVATIONS_MIB: Final = 1_400
"""What vLLM's profile run set aside for activations: the most that the allocator takes later."""

MIB_PER_RUNNING: Final = 2.0
"""Scratch memory that grows with the batch; its peak is kept."""

FIRST_USES_MIB: Final = 40.0
"""What is needed first in each e-fold of requests."""

WEIGHTS_MIB: Final = 15_316
"""An 8B model in 16 bits."""

KV_MIB: Final = 2 * KV_BLOCKS
GRAPHS_MIB: Final = 620
BUDGET_MIB: Final = WEIGHTS_MIB + KV_MIB + GRAPHS_MIB + ACTIVATIONS_MIB
"""gpu_memory_utilization 0.92 of 81,559 MiB: vLLM gives the KV cache what the other parts leave."""

CONTEXT_MIB: Final = 560
NCCL_MIB: Final = 220
OUTSIDE_MIB: Final = CONTEXT_MIB + NCCL_MIB
"""What vLLM's budget does not count: taken before it measures the free memory."""

WEIGHTS_LOADED: Final = 0.7
"""Share of the loading time after which the weights are there; the KV cache and the graphs come at its end."""

PIDS_APART: Final = 37


class EngineRun:
    """A server of one model on one GPU; times are seconds since the demo began, and `number` counts runs from 0."""

    def __init__(self, seed: int, number: int, *, started_seconds: float, serving_seconds: float) -> None:
        self.number = number
        self.started_seconds = started_seconds
        self.serving_seconds = serving_seconds
        self.traffic = Traffic(make_random(seed, f"traffic {number}"))
        self.asleep = False
        self.leaked_bytes = 0.0
        self._most_running = 0

    @property
    def first_pid(self) -> int:
        """The pid of the API server; the engine core and the worker follow it."""
        return 4_100 + PIDS_APART * self.number

    def exists(self, seconds: float) -> bool:
        """Return whether its processes have been started."""
        return seconds >= self.started_seconds

    def serves(self, seconds: float) -> bool:
        """Return whether it answers requests."""
        return seconds >= self.serving_seconds

    def sleep(self, *, asleep: bool) -> None:
        """Go to sleep or wake up; vLLM ends all requests before it sleeps."""
        if asleep and not self.asleep:
            self.traffic.abort()
        self.asleep = asleep

    def step(self, arrived: int, leak_bytes_per_request: float) -> None:
        """Serve for one second; asleep, turn away what arrives."""
        if self.asleep:
            return
        self.leaked_bytes += self.traffic.step(arrived) * leak_bytes_per_request
        self._most_running = max(self._most_running, self.traffic.running)

    def count_gpu_bytes(self, seconds: float) -> int:
        """Return what its worker holds on the GPU."""
        if self.asleep and self.serves(seconds):
            return (OUTSIDE_MIB + GRAPHS_MIB) * MIB
        if self.serves(seconds):
            fixed_mib = OUTSIDE_MIB + WEIGHTS_MIB + KV_MIB + GRAPHS_MIB
            taken = compute_taken_mib(self.traffic.finished_total, self._most_running)
            return (fixed_mib + taken + round_to_segments(self.leaked_bytes / MIB, SMALL_SEGMENT_MIB)) * MIB
        if self.exists(seconds):
            done = (seconds - self.started_seconds) / (self.serving_seconds - self.started_seconds)
            return (
                OUTSIDE_MIB + round_to_segments(WEIGHTS_MIB * min(1.0, done / WEIGHTS_LOADED), SMALL_SEGMENT_MIB)
            ) * MIB
        return 0


def round_to_segments(mib: float, segment_mib: int) -> int:
    """Return `mib` as MiB in whole segments."""
    return ceil(mib / segment_mib) * segment_mib


def compute_taken_mib(requests: int, most_running: int) -> int:
    """Return the memory that a run of a healthy engine keeps taking and never frees, by requests and most at once.

    The picture is PyTorch's caching allocator (c10/core/AllocatorConfig.h: 2 MiB and 20 MiB segments) with lazily
    loaded kernels. What the n-th request needs first gets rarer as 1/n; a leak does not.
    """
    first_uses = round_to_segments(FIRST_USES_MIB * log1p(requests), LARGE_SEGMENT_MIB)
    return min(first_uses + round_to_segments(MIB_PER_RUNNING * most_running, LARGE_SEGMENT_MIB), ACTIVATIONS_MIB)


TOTAL_BYTES: Final = 81_559 * MIB
RESERVED_BYTES: Final = 600 * MIB
UNATTRIBUTED_BYTES: Final = 20 * MIB
"""Used on a data-centre GPU by no process."""

OUT_OF_MEMORY_BYTES: Final = TOTAL_BYTES - RESERVED_BYTES - 50 * MIB
"""Beyond this much in use the next allocation fails: it is larger than what is left."""

WARM_SECONDS: Final = 3_600
"""The engine has served this long when the demo begins."""

DOWN_SECONDS: Final[Bounds] = (20.0, 50.0)
"""With a scenario's ordinary loading time, a restart takes one to two minutes."""

NEIGHBOUR_CONTEXT_MIB: Final = 450
NEIGHBOUR_RAMP: Final = 0.2
"""Share of its stay in which the neighbour's memory grows."""


class World:
    """A function of scenario, seed and time alone; `seconds` is the time since the demo began, in whole seconds.

    `busy` is the number of requests that the GPU works on.
    """

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self.seconds = -WARM_SECONDS
        self.engine = _start_engine(scenario, seed)
        self.busy = 0
        self.neighbour: Visit | None = None
        self._scenario = scenario
        self._seed = seed
        self._demand = Demand(make_random(seed, "demand"))
        self._bursts = Recurring(make_random(seed, "bursts"), scenario.bursts)
        self._neighbours = Recurring(make_random(seed, "neighbours"), scenario.neighbours)
        self._hangs = Recurring(make_random(seed, "hangs"), scenario.hangs)
        self._sleeps = Recurring(make_random(seed, "sleeps"), scenario.sleeps)
        self._fate = make_random(seed, "fate")
        self._ends_seconds = self._draw_end(max(0.0, self.engine.serving_seconds))
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Let the world go on to that time; a time that has passed changes nothing."""
        while self.seconds + 1 <= seconds:
            self._step()

    @property
    def serves(self) -> bool:
        """Whether the engine answers."""
        return self.engine.serves(self.seconds)

    @property
    def engine_bytes(self) -> int:
        """GPU memory of the engine's worker."""
        return self.engine.count_gpu_bytes(self.seconds)

    @property
    def neighbour_bytes(self) -> int:
        """GPU memory of the other process; 0 while there is none."""
        if self.neighbour is None:
            return 0
        visit = self.neighbour
        stay_seconds = visit.leaves_seconds - visit.came_seconds
        grown = min(1.0, (self.seconds - visit.came_seconds) / (NEIGHBOUR_RAMP * stay_seconds))
        growth_mib = visit.size / MIB - NEIGHBOUR_CONTEXT_MIB
        return (NEIGHBOUR_CONTEXT_MIB + round_to_segments(grown * growth_mib, SMALL_SEGMENT_MIB)) * MIB

    @property
    def used_bytes(self) -> int:
        """GPU memory in use, without what the driver reserves."""
        return UNATTRIBUTED_BYTES + self.engine_bytes + self.neighbour_bytes

    def _step(self) -> None:
        self.seconds += 1
        burst = self._bursts.find_visit(self.seconds)
        arrived = self._demand.step(self.seconds, 1.0 if burst is None else burst.size)
        self.neighbour = self._neighbours.find_visit(self.seconds)
        hangs = self._hangs.find_visit(self.seconds) is not None
        self.engine.sleep(asleep=self._sleeps.find_visit(self.seconds) is not None)
        if self.serves and not hangs:
            leaking = self.seconds > 0
            self.engine.step(arrived, self._scenario.leak_bytes_per_request if leaking else 0.0)
        self.busy = 0 if hangs else self.engine.traffic.running
        if self.seconds >= self._ends_seconds or self.used_bytes > OUT_OF_MEMORY_BYTES:
            started = self.seconds + self._fate.uniform(*DOWN_SECONDS)
            serving = started + self._fate.uniform(*self._scenario.loading_seconds)
            self.engine = EngineRun(
                self._seed, self.engine.number + 1, started_seconds=started, serving_seconds=serving
            )
            self._ends_seconds = self._draw_end(serving)

    def _draw_end(self, serving_seconds: float) -> float:
        span = self._scenario.restart_after_seconds
        return inf if span is None else serving_seconds + self._fate.uniform(*span)


def _start_engine(scenario: Scenario, seed: int) -> EngineRun:
    if scenario.cold:
        loading = make_random(seed, "first load").uniform(*scenario.loading_seconds)
        return EngineRun(seed, 0, started_seconds=0.0, serving_seconds=loading)
    return EngineRun(
        seed, 0, started_seconds=-WARM_SECONDS - scenario.loading_seconds[1], serving_seconds=-WARM_SECONDS
    )
