"""What is known of one engine and its KV cache."""

from __future__ import annotations

from msgspec import Struct


class FullFacts(Struct, frozen=True, kw_only=True):
    """The time in which the KV cache was full: how long, what was done in it, and the middle of what ran.

    On a page: since the engine's start, for `finished` and `preemptions`; now, for `running` and `tokens`.
    """

    seconds: float | None
    finished: float
    preemptions: float
    running: float
    tokens: float | None


class CappedFacts(Struct, frozen=True, kw_only=True):
    """The time in which requests waited although the KV cache had room, because no more than `running` may run."""

    seconds: float
    running: float
    kv_used_ratio: float


class PrefixFacts(Struct, frozen=True, kw_only=True):
    """The prefix cache: tokens looked up and found, in `seconds`; on a page since the engine's start, seconds unknown.

    `recent_ratio` is hits over queries of the last five minutes, on a page. `blocked_ratio` is the share of the time in
    which requests waited.
    """

    queries: float
    hits: float
    seconds: float | None
    blocked_ratio: float
    recent_ratio: float | None = None


class StrandedFacts(Struct, frozen=True, kw_only=True):
    """What an idle engine's KV cache still held: lastly, at the first of the times in which it only rose, how often."""

    ratio: float
    first_ratio: float
    rises: int


class EngineFacts(Struct, frozen=True, kw_only=True):
    """One engine (one data-parallel rank).

    Tokens are those of a running request in the KV cache, averaged over the requests that ran at that moment: their
    middle and their 99th percentile while the cache was not full. `calm_running` is the most requests that ran then
    without a preemption. `kv_known` and `preemptions_known` tell whether the page says these at all.
    """

    model_name: str
    engine: str
    capacity_tokens: float | None = None
    capacity_bytes: float | None = None
    kv_known: bool = False
    preemptions_known: bool = False
    most_running: float | None = None
    finished: float | None = None
    usual_tokens: float | None = None
    high_tokens: float | None = None
    calm_running: float | None = None
    full: FullFacts | None = None
    capped: CappedFacts | None = None
    prefix: PrefixFacts | None = None
    stranded: StrandedFacts | None = None
