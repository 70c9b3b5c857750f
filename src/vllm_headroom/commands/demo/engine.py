"""One life of the simulated engine: it loads, serves and dies."""

from __future__ import annotations

from math import ceil, log1p
from typing import Final

from vllm_headroom.commands.demo.scenario import chance
from vllm_headroom.commands.demo.traffic import KV_BLOCKS, Traffic
from vllm_headroom.units import MIB

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


class Engine:
    """A server of one model on one GPU; times are seconds since the demo began, and `number` counts lives from 0."""

    def __init__(self, seed: int, number: int, *, started_seconds: float, serving_seconds: float) -> None:
        self.number = number
        self.started_seconds = started_seconds
        self.serving_seconds = serving_seconds
        self.traffic = Traffic(chance(seed, f"traffic {number}"))
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

    def gpu_bytes(self, seconds: float) -> int:
        """Return what its worker holds on the GPU."""
        if self.asleep and self.serves(seconds):
            return (OUTSIDE_MIB + GRAPHS_MIB) * MIB
        if self.serves(seconds):
            fixed_mib = OUTSIDE_MIB + WEIGHTS_MIB + KV_MIB + GRAPHS_MIB
            taken = taken_mib(self.traffic.finished_total, self._most_running)
            return (fixed_mib + taken + segments(self.leaked_bytes / MIB, SMALL_SEGMENT_MIB)) * MIB
        if self.exists(seconds):
            done = (seconds - self.started_seconds) / (self.serving_seconds - self.started_seconds)
            return (OUTSIDE_MIB + segments(WEIGHTS_MIB * min(1.0, done / WEIGHTS_LOADED), SMALL_SEGMENT_MIB)) * MIB
        return 0


def segments(mib: float, segment_mib: int) -> int:
    """Return `mib` as MiB in whole segments."""
    return ceil(mib / segment_mib) * segment_mib


def taken_mib(requests: int, most_running: int) -> int:
    """Return what a life of a healthy engine goes on taking, and never gives back, by requests and most at once.

    The picture is PyTorch's caching allocator (c10/core/AllocatorConfig.h: 2 MiB and 20 MiB segments) with lazily
    loaded kernels. What the n-th request needs first gets rarer as 1/n; a leak does not.
    """
    first_uses = segments(FIRST_USES_MIB * log1p(requests), LARGE_SEGMENT_MIB)
    return min(first_uses + segments(MIB_PER_RUNNING * most_running, LARGE_SEGMENT_MIB), ACTIVATIONS_MIB)
