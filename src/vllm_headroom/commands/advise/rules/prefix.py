"""A rule on the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom.commands.advise.engine_facts import EngineFacts, PrefixFacts
from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, called, count
from vllm_headroom.commands.advise.limits import (
    BLOCKED_RATIO,
    PAYING_RATIO,
    PREFIX_SECONDS,
    PREFIX_TOKENS_PER_SECOND,
)
from vllm_headroom.commands.advise.settings import COUNTS_PREFIXES_ONCE, Flag
from vllm_headroom.units import duration


def prefix_cache(facts: Facts) -> Advice | None:
    """Fit where enough was looked up, less than PAYING_RATIO of it was found, and the counts can be believed.

    On a page the counts are those since the engine's start, and the last five minutes have to say the same.
    """
    for engine in facts.engines:
        prefix = engine.prefix
        if prefix is not None and rarely_hits(prefix) and enough(prefix) and believed(facts, prefix):
            return _advice(facts, engine, prefix)
    return None


def rarely_hits(prefix: PrefixFacts) -> bool:
    """Tell whether less than PAYING_RATIO of what was looked up was found, also of late where that is known."""
    of_late = prefix.recent_ratio is None or prefix.recent_ratio < PAYING_RATIO
    return prefix.queries > 0 and prefix.hits < PAYING_RATIO * prefix.queries and of_late


def enough(prefix: PrefixFacts) -> bool:
    """Tell whether PREFIX_SECONDS of traffic were seen; on a page, as many tokens as that is at the least."""
    if prefix.seconds is None:
        return prefix.queries >= PREFIX_SECONDS * PREFIX_TOKENS_PER_SECOND
    return prefix.seconds >= PREFIX_SECONDS and busy(prefix)


def busy(prefix: PrefixFacts) -> bool:
    """Tell whether so much is looked up that there is something to win."""
    return prefix.seconds is None or prefix.queries >= PREFIX_TOKENS_PER_SECOND * prefix.seconds


def believed(facts: Facts, prefix: PrefixFacts) -> bool:
    """Tell whether requests that wait cannot have been counted again and again."""
    return facts.settings.known >= COUNTS_PREFIXES_ONCE or prefix.blocked_ratio <= BLOCKED_RATIO


def _advice(facts: Facts, engine: EngineFacts, prefix: PrefixFacts) -> Advice:
    return Advice(
        cause=Cause.PREFIX_CACHE,
        summary=f"The prefix cache of {called(facts, engine)} rarely hits.",
        evidence=tuple(_evidence(prefix)),
        changes=(
            Change(
                text="Look at prompts: what changes (a date, an id) has to stand at their end, not at their beginning",
                cost="none to this engine",
            ),
            Change(
                flag=Flag.NO_ENABLE_PREFIX_CACHING,
                text="if they share nothing by nature: saves looking them up",
                cost="the few that hit are computed again; a restart",
            ),
        ),
        remark="It frees no memory: cached blocks that nobody uses give way before any request waits.",
    )


def _evidence(prefix: PrefixFacts) -> Iterator[Evidence]:
    ratio = prefix.hits / prefix.queries
    over = "since the engine's start" if prefix.seconds is None else f"over {duration(prefix.seconds)}"
    yield Evidence("hit_ratio", ratio, f"hits over queries {ratio:.2f} {over}")
    if prefix.recent_ratio is not None:
        of_late = f"{prefix.recent_ratio:.2f} in the last five minutes"
        yield Evidence("recent_hit_ratio", prefix.recent_ratio, of_late)
    yield Evidence("queries", prefix.queries, f"{count(prefix.queries)} tokens looked up")
