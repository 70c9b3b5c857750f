"""The requests of a simulated engine, from arrival to finish."""

from __future__ import annotations

from math import cos, exp, pi
from random import Random
from typing import Final

from vllm_headroom.commands.demo.scenario import Drift, poisson

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
        return poisson(self._random, REQUESTS_PER_SECOND * wave * factor * exp(self._drift.step()))


class Traffic:
    """What one life of the engine has queued, runs and has counted."""

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
        finished = min(self.running, poisson(self._random, self.running / latency_seconds))
        self.generation_tokens_total += int(self.running * GENERATED_TOKENS / latency_seconds)
        self.steps_total += STEPS_PER_SECOND if self.running else 0
        self.finished_total += finished
        self.running -= finished
        self.waiting += arrived
        self._admit()
        self._tokens_each = LIVE_TOKENS * (1.0 + self._length.step())
        self._preempt()
        self.kv_used_ratio = min(1.0, self.running * self._tokens_each / CAPACITY_TOKENS)
        return finished

    def abort(self) -> None:
        """End all requests and empty the cache."""
        self.running, self.waiting, self._preempted, self.kv_used_ratio = 0, 0, 0, 0.0

    def _admit(self) -> None:
        """Let requests in by the room there is now; that those which run will grow is not foreseen."""
        fitting = int(ADMISSION_RATIO * CAPACITY_TOKENS / self._tokens_each)
        admitted = max(0, min(self.waiting, min(fitting, MOST_RUNNING) - self.running))
        self.waiting -= admitted
        self.running += admitted
        again = min(admitted, self._preempted)
        self._preempted -= again
        tokens = (admitted - again) * PROMPT_TOKENS
        self.prompt_tokens_total += tokens
        self.prefix_hits_total += int(tokens * min(1.0, max(0.0, self._random.gauss(HIT_RATIO, 0.05))))

    def _preempt(self) -> None:
        evicted = max(0, self.running - int(CAPACITY_TOKENS / self._tokens_each))
        self.running -= evicted
        self.waiting += evicted
        self._preempted += evicted
        self.preemptions_total += evicted
