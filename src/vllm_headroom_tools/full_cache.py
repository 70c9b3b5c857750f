"""Find out when a KV cache is full, and when that is harmful."""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.kv_cache import count_tokens_per_request
from vllm_headroom.model import EngineReading

FULL_RATIO: Final = 0.95
"""A KV cache is considered full above this usage ratio (alert HeadroomKvCacheThrashing). A full
cache makes requests wait, which is not harmful in itself.
"""

LASTING_SECONDS: Final = 600.0
"""A state that lasts at least this long is not just a burst. Compare `for: 10m` in
HeadroomGpuMemoryLow and HeadroomKvCacheThrashing.
"""

HURTING_PREEMPTIONS: Final = 0.1
"""From this many preemptions per finished request, preemption is harmful. A ratio of 0.01 is
harmless (runbook HeadroomKvCacheThrashing).
"""

WAITING_REQUESTS: Final = 10
"""The smallest number of waiting requests that counts as a queue (alert HeadroomQueueBacklog)."""

ROOMY_RATIO: Final = 0.7
"""Our choice: below this KV cache usage, the cache is not why requests wait."""

COLLAPSE_RATIO: Final = 0.5
"""Our choice: a collapse sends running requests back to the queue. At least this share of them must
return at the same time. If vLLM sometimes preempts only the newest request, the others keep
running.
"""

COLLAPSE_GAP_SECONDS: Final = 900.0
"""Our choice: collapses further apart than this belong to different sequences. For comparison, with
18 requests of 80,800 tokens, collapses were 200 s apart (discuss.vllm.ai, 2608).
"""

SHORTEST_THRASH_SECONDS: Final = 120.0
"""Our choice: a shorter sequence of collapses is treated as a coincidence. A longer sequence shows
that the same requests fill the cache again and again.
"""


FEWEST_RIVALS: Final = 2
"""The smallest number of requests that can compete for the cache. A single request is never
preempted.
"""


class StepCounts(Struct, frozen=True, kw_only=True):
    """The numbers of finished requests and of preemptions since the previous sample."""

    seconds: float
    finished: float
    preemptions: float


class ThrashFacts(Struct, frozen=True, kw_only=True):
    """A sequence of KV cache collapses.

    Each collapse requeued most of the running requests.
    """

    # The number of collapses.
    times: int
    # The time from the first collapse to the last.
    seconds: float
    # The number of requests that went back to the queue. The second field is the number that
    # finished in the meantime.
    returned: float
    finished: float
    # The smallest number of running requests before a collapse. The second field is the largest
    # number of cache tokens per request.
    running: float
    tokens: float | None


class CollapseHistory:
    """Finds the collapses of a KV cache.

    In a collapse, the cache is full and most running requests are requeued. Requeued requests are
    recomputed from their first token, so they fill the cache again.
    """

    def __init__(self) -> None:
        self._previous_reading: EngineReading | None = None
        self._newest_seconds = 0.0
        # Requests that finished since the newest collapse.
        self._finished = 0.0
        # The newest sequence of collapses, and the longest one.
        self._current: ThrashFacts | None = None
        self._worst: ThrashFacts | None = None

    @property
    def worst(self) -> ThrashFacts | None:
        """Return the longest sequence of collapses, or None if even that is too short."""
        worst = self._worst
        if worst is None or worst.seconds < SHORTEST_THRASH_SECONDS:
            return None
        return worst

    def step(
        self,
        reading: EngineReading,
        counts: StepCounts,
        now_seconds: float,
        *,
        has_restarted: bool,
    ) -> None:
        """Add a sample.

        A restart of the engine empties the cache and is not a collapse.
        """
        previous_reading = self._previous_reading
        self._previous_reading = reading
        self._finished += counts.finished
        # Requests that were running before a restart did not return to the queue.
        if previous_reading is None or has_restarted:
            self._current = None
            return
        returned = _count_returned(previous_reading, reading, counts)
        if returned is not None:
            self._add_collapse(previous_reading, returned, now_seconds)

    def _add_collapse(
        self, previous_reading: EngineReading, returned: float, now_seconds: float
    ) -> None:
        """Add a collapse to the current sequence.

        After a long pause, it starts a new sequence.
        """
        tokens = count_tokens_per_request(previous_reading)
        running = previous_reading.running or 0.0
        passed_seconds = now_seconds - self._newest_seconds
        thrash = self._current
        # Collapses that are close together are part of the same sequence.
        if thrash is None or passed_seconds > COLLAPSE_GAP_SECONDS:
            thrash = ThrashFacts(
                times=1,
                seconds=0.0,
                returned=returned,
                finished=0.0,
                running=running,
                tokens=tokens,
            )
        else:
            thrash = replace(
                thrash,
                times=thrash.times + 1,
                seconds=thrash.seconds + passed_seconds,
                returned=thrash.returned + returned,
                finished=thrash.finished + self._finished,
                running=min(running, thrash.running),
                tokens=find_higher(thrash.tokens, tokens),
            )
        self._current = thrash
        self._newest_seconds = now_seconds
        self._finished = 0.0
        if self._worst is None or thrash.seconds >= self._worst.seconds:
            self._worst = thrash


def _count_returned(
    previous_reading: EngineReading, reading: EngineReading, counts: StepCounts
) -> float | None:
    """Return how many requests a full cache requeued since the previous sample.

    The result is the number of preemptions or the number of requests that changed from running to
    waiting, whichever is larger. Returns None if the cache had room. Also returns None if less than
    COLLAPSE_RATIO of the running requests were requeued.
    """
    running = previous_reading.running
    used_ratio = max(previous_reading.kv_used_ratio or 0.0, reading.kv_used_ratio or 0.0)
    # A lower usage is accepted. The cache may have been full only between the two samples.
    if running is None or running < FEWEST_RIVALS or used_ratio < ROOMY_RATIO:
        return None
    returned = counts.preemptions
    if None not in (reading.running, previous_reading.waiting, reading.waiting):
        # Finished requests are no longer running either, but did not return to the queue.
        stopped_requests = running - (reading.running or 0.0) - counts.finished
        queued_requests = (reading.waiting or 0.0) - (previous_reading.waiting or 0.0)
        returned = max(returned, min(stopped_requests, queued_requests))
    return returned if returned >= COLLAPSE_RATIO * running else None


def find_higher(earlier: float | None, now: float | None) -> float | None:
    """Return the higher of two values.

    If only one value is known, it is returned. Returns None if both are unknown.
    """
    return earlier if now is None else max(earlier or 0.0, now)
