"""The figures of one engine over a trace."""

from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.kv_cache import count_tokens_per_request
from vllm_headroom.model import EngineReading
from vllm_headroom_tools.advise.facts import FULL_RATIO, CappedFacts, EngineFacts, FullFacts, PrefixFacts, StrandedFacts
from vllm_headroom_tools.history import Histogram, Rise

WAITING_REQUESTS: Final = 10
"""Fewer than this waiting is noise (alert HeadroomQueueBacklog)."""

ROOMY_RATIO: Final = 0.7
"""Ours: with more than three tenths of the KV cache free, requests wait for another reason."""

CHANGED_RATIO: Final = 0.01
"""Ours: a larger change of the KV cache's size means other settings; equal starts differ by less."""

CAP_RATIO = 0.97
CAP_SHARE = 0.9
"""Ours: the cap is what ran, to 3 %, in nine tenths of the time in which requests waited."""


class FullHistory:
    """The time with a full cache; the sample after it has the last preemptions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._finished = 0.0
        self._preemptions = 0.0
        self._running = Histogram()
        self._tokens = Histogram()
        self._queued_seconds = 0.0
        self._waiting = Histogram()

    def step(self, seconds: float, finished: float, preemptions: float) -> None:
        """Count the work of the time before a sample."""
        self.seconds += seconds
        self._finished += finished
        self._preemptions += preemptions

    def add_reading(self, reading: EngineReading, seconds: float) -> None:
        """Count the load of a sample, and the time before it if requests waited."""
        if (reading.waiting or 0) >= WAITING_REQUESTS:
            self._queued_seconds += seconds
            self._waiting.add(reading.waiting)
        self._running.add(reading.running)
        self._tokens.add(count_tokens_per_request(reading))

    def facts(self) -> FullFacts | None:
        """Return the facts; None where the cache was never full."""
        running = self._running.quantile(0.5)
        if running is None:
            return None
        return FullFacts(
            seconds=self.seconds,
            finished=self._finished,
            preemptions=self._preemptions,
            running=running,
            tokens=self._tokens.quantile(0.5),
            queued_seconds=self._queued_seconds,
            waiting=self._waiting.quantile(0.5),
        )


class WaitingHistory:
    """The time in which requests waited, by running requests and use of the cache."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._long_seconds = 0.0
        self._roomy: dict[float, float] = {}
        self._used = Histogram()

    def step(self, seconds: float, reading: EngineReading) -> None:
        """Count the time before a sample."""
        waiting, used, running = reading.waiting or 0.0, reading.kv_used_ratio, reading.running
        self.seconds += seconds if waiting > 0 else 0.0
        if waiting < WAITING_REQUESTS or used is None or running is None:
            return
        self._long_seconds += seconds
        if used < ROOMY_RATIO:
            self._roomy[running] = self._roomy.get(running, 0.0) + seconds
            self._used.add(used)

    def facts(self, most_running: float | None) -> CappedFacts | None:
        """Return the time at the cap; None where requests waited for another reason, such as a full cache."""
        used = self._used.quantile(0.9)
        if not most_running or used is None:
            return None
        at_cap = sum(seconds for running, seconds in self._roomy.items() if running >= CAP_RATIO * most_running)
        if at_cap < CAP_SHARE * self._long_seconds:
            return None
        return CappedFacts(seconds=at_cap, running=most_running, kv_used_ratio=used)


class IdleHistory:
    """The cache held at idle times of one run of the engine, a minute after the last request.

    A fall means that it was released: what came before is no leak.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._ratios: list[float] = []

    def step(self, began_seconds: float | None, held: float | None) -> None:
        """Add a sample; `held` is None until a minute after the last request."""
        if began_seconds != self._began:
            self._began, self._ratios = began_seconds, []
        if held is None:
            return
        if not self._ratios or held < self._ratios[-1]:
            self._ratios = [held]
        elif held > self._ratios[-1]:
            self._ratios.append(held)

    def facts(self) -> StrandedFacts | None:
        """Return the facts; None where the engine was never idle for a minute."""
        if not self._ratios:
            return None
        return StrandedFacts(ratio=self._ratios[-1], first_ratio=self._ratios[0], rises=len(self._ratios) - 1)


class EngineHistory:
    """The history of one engine while its settings stay the same."""

    def __init__(self, model_name: str, engine: str) -> None:
        self._facts = EngineFacts(model_name=model_name, engine=engine)
        self._seconds = 0.0
        self._was_full = False
        self._finished, self._preemptions, self._queries, self._hits = Rise(), Rise(), Rise(), Rise()
        self._usual = Histogram()
        self._full, self._waiting, self._idle = FullHistory(), WaitingHistory(), IdleHistory()

    def has_other_settings(self, reading: EngineReading) -> bool:
        """Return whether the KV cache has changed its size."""
        before, now = self._facts.capacity_tokens, reading.kv_capacity_tokens
        return before is not None and now is not None and abs(now - before) > CHANGED_RATIO * before

    def step(self, reading: EngineReading, seconds: float, stranded: float | None) -> None:
        """Add a sample, `seconds` after the last; `stranded` is the share that an idle engine's cache holds."""
        self._seconds += seconds
        finished = self._finished.step(reading.finished_total)
        preempted = self._preemptions.step(reading.preemptions_total)
        self._queries.step(reading.prefix_queries_total)
        self._hits.step(reading.prefix_hits_total)
        self._waiting.step(seconds, reading)
        self._idle.step(reading.started_at_seconds, stranded)
        capacity, facts = reading.kv_capacity_tokens, self._facts
        self._facts = replace(
            facts,
            capacity_tokens=facts.capacity_tokens if capacity is None else capacity,
            kv_known=facts.kv_known or reading.kv_used_ratio is not None,
            most_running=_find_higher(facts.most_running, reading.running),
            most_used_ratio=_find_higher(facts.most_used_ratio, reading.kv_used_ratio),
        )
        if reading.kv_used_ratio is None:
            return
        full = reading.kv_used_ratio > FULL_RATIO
        if full or self._was_full:
            self._full.step(seconds if full else 0.0, finished, preempted)
        if full:
            self._full.add_reading(reading, seconds)
        else:
            self._usual.add(count_tokens_per_request(reading))
            if reading.running and not preempted:
                self._facts = replace(self._facts, calm_running=_find_higher(self._facts.calm_running, reading.running))
        self._was_full = full

    def facts(self) -> EngineFacts:
        """Return the facts."""
        return replace(
            self._facts,
            preemptions_known=self._preemptions.total is not None,
            finished=self._finished.total,
            usual_tokens=self._usual.quantile(0.5),
            high_tokens=self._usual.quantile(0.99),
            full=self._full.facts(),
            capped=self._waiting.facts(self._facts.most_running),
            prefix=self._prefix(),
            stranded=self._idle.facts(),
        )

    def _prefix(self) -> PrefixFacts | None:
        queries, hits, seconds = self._queries.total, self._hits.total, self._seconds
        if queries is None or hits is None:
            return None
        blocked = self._waiting.seconds / seconds if seconds else 0.0
        return PrefixFacts(queries=queries, hits=hits, seconds=seconds, blocked_ratio=blocked)


def _find_higher(before: float | None, now: float | None) -> float | None:
    return before if now is None else max(before or 0.0, now)
