"""A rule on requests that wait although the KV cache has room."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor
from typing import Final

from vllm_headroom.commands.advise.engine_facts import CappedFacts
from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, called, count, percent
from vllm_headroom.commands.advise.limits import AIM_BYTES, LASTING_SECONDS
from vllm_headroom.commands.advise.rules.cache import pressed
from vllm_headroom.commands.advise.rules.room import ran_short
from vllm_headroom.commands.advise.settings import Flag
from vllm_headroom.units import duration

MOST_RAISED: Final = 2.0
RAISED_RATIO: Final = 0.8
"""Ours: at most twice as many requests at once, and as many as would fill four fifths of the cache."""


def too_few_requests(facts: Facts) -> Advice | None:
    """Fit where requests waited for LASTING_SECONDS while the cache had room, with always the same number running.

    Not where less than AIM_BYTES were left at a peak, since more requests take more memory outside of the cache as
    well, nor where the cache of another rank preempts.
    """
    least = facts.least_room_bytes
    if pressed(facts) is not None or ran_short(facts):
        return None
    for engine in facts.engines:
        if engine.capped is None or engine.capped.seconds < LASTING_SECONDS or least is None or least < AIM_BYTES:
            continue
        change = _more(facts, engine.capped)
        if change is not None:
            return Advice(
                cause=Cause.CONCURRENCY_MISJUDGED,
                summary=f"Requests wait for {called(facts, engine)} while its KV cache has room.",
                evidence=tuple(_capped(engine.capped)),
                changes=(change,),
            )
    return None


def _more(facts: Facts, capped: CappedFacts) -> Change | None:
    fitting = capped.running * RAISED_RATIO / capped.kv_used_ratio if capped.kv_used_ratio else float("inf")
    value, now = floor(min(MOST_RAISED * capped.running, fitting)), facts.settings.max_num_seqs
    if value <= capped.running or (now is not None and now > capped.running):
        return None
    return Change(
        flag=Flag.MAX_NUM_SEQS,
        value=value,
        now=now,
        text=f"would fill {percent(value / capped.running * capped.kv_used_ratio)} of the KV cache",
        cost="each answer comes a little slower; a restart",
    )


def _capped(capped: CappedFacts) -> Iterator[Evidence]:
    text = f"requests waited for {duration(capped.seconds)} with room in the KV cache"
    yield Evidence("waiting_seconds", capped.seconds, text)
    text = f"never more than {count(capped.running)} ran: so many vLLM seems to be told to allow"
    yield Evidence("running", capped.running, text)
    used = capped.kv_used_ratio
    yield Evidence("kv_used_ratio", used, f"{percent(used)} of the KV cache in use meanwhile")
