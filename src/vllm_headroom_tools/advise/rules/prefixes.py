"""The rule on the prefix cache, which costs lookups and saves what they find."""

from collections.abc import Iterator
from typing import Final

from vllm_headroom.units import format_duration
from vllm_headroom_tools.advise.facts import EngineFacts, Facts, PrefixFacts
from vllm_headroom_tools.advise.finding import Advice, Cause, Change, Evidence, name_engine
from vllm_headroom_tools.advise.settings import COUNTS_PREFIXES_ONCE, Flag

PAYING_RATIO: Final = 0.3
"""Below this hit ratio, lookups cost about what they save (alert HeadroomPrefixCacheNotPaying)."""

PREFIX_SECONDS: Final = 6 * 3600.0
PREFIX_TOKENS_PER_SECOND: Final = 100.0
"""It takes six hours of at least this traffic to judge a prefix cache; less has little to gain (the same alert)."""

BLOCKED_RATIO: Final = 0.05
"""Ours: before vLLM 0.27 a waiting request is looked up again in each step (vllm-project/vllm#43736), so the hit ratio
means nothing where requests wait for more than this share of the time."""


def find_poor_prefix_cache(facts: Facts) -> Advice | None:
    """Fit where less than PAYING_RATIO of enough lookups hit, and the counts are reliable.

    A page has the counts since the engine's start; the last five minutes have to agree.
    """
    for engine in facts.engines:
        prefix = engine.prefix
        if prefix and has_few_hits(prefix) and has_enough_lookups(prefix) and has_reliable_counts(facts, prefix):
            return _advise_on_prefixes(facts, engine, prefix)
    return None


def has_few_hits(prefix: PrefixFacts) -> bool:
    """Return whether less than PAYING_RATIO of the lookups hit, also in the last minutes where known."""
    of_late = prefix.recent_ratio is None or prefix.recent_ratio < PAYING_RATIO
    return prefix.queries > 0 and prefix.hits < PAYING_RATIO * prefix.queries and of_late


def has_enough_lookups(prefix: PrefixFacts) -> bool:
    """Return whether there were PREFIX_SECONDS of traffic, or on a page at least the tokens of that time."""
    if prefix.seconds is None:
        return prefix.queries >= PREFIX_SECONDS * PREFIX_TOKENS_PER_SECOND
    return prefix.seconds >= PREFIX_SECONDS and is_busy(prefix)


def is_busy(prefix: PrefixFacts) -> bool:
    """Return whether there are enough lookups for a gain."""
    return prefix.seconds is None or prefix.queries >= PREFIX_TOKENS_PER_SECOND * prefix.seconds


def has_reliable_counts(facts: Facts, prefix: PrefixFacts) -> bool:
    """Return whether waiting requests were not counted repeatedly."""
    return facts.settings.known >= COUNTS_PREFIXES_ONCE or prefix.blocked_ratio <= BLOCKED_RATIO


def _advise_on_prefixes(facts: Facts, engine: EngineFacts, prefix: PrefixFacts) -> Advice:
    return Advice(
        cause=Cause.PREFIX_CACHE,
        summary=f"The prefix cache of {name_engine(facts, engine)} rarely hits.",
        evidence=tuple(_list_prefix_evidence(prefix)),
        changes=(
            Change(
                text="Look at the prompts: what changes (a date, an id) belongs at their end, not at their beginning",
                cost="none to this engine",
            ),
            Change(
                flag=Flag.NO_ENABLE_PREFIX_CACHING,
                text="if prompts have no common beginnings: saves the lookups",
                cost="the few hits are computed again; a restart",
            ),
        ),
        remark="This frees no memory: vLLM evicts unused cached blocks before any request waits.",
    )


def _list_prefix_evidence(prefix: PrefixFacts) -> Iterator[Evidence]:
    ratio = prefix.hits / prefix.queries
    over = "since the engine's start" if prefix.seconds is None else f"over {format_duration(prefix.seconds)}"
    yield Evidence("hit_ratio", ratio, f"hits over queries {ratio:.2f} {over}")
    if prefix.recent_ratio is not None:
        of_late = f"{prefix.recent_ratio:.2f} in the last five minutes"
        yield Evidence("recent_hit_ratio", prefix.recent_ratio, of_late)
    yield Evidence("queries", prefix.queries, f"{prefix.queries:,.0f} tokens looked up")
