"""Rules on the KV cache: it lies in what vLLM took at its start, so that full means waiting and never out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor
from typing import Final

from vllm_headroom.units import MIB, duration, size
from vllm_headroom_tools.advise.facts import (
    AIM_BYTES,
    BLOCKED_RATIO,
    FEWEST_REQUESTS,
    FULL_RATIO,
    HIGHEST_UTILIZATION,
    HURTING_PREEMPTIONS,
    LARGER_REQUESTS,
    LASTING_SECONDS,
    PAYING_RATIO,
    PREFIX_SECONDS,
    PREFIX_TOKENS_PER_SECOND,
    USUAL_SECONDS,
    CappedFacts,
    EngineFacts,
    Facts,
    FullFacts,
    GpuFacts,
    Origin,
    PrefixFacts,
)
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    Evidence,
    called,
    count,
    lowered,
    per_request,
    percent,
    several,
)
from vllm_headroom_tools.advise.settings import COUNTS_PREFIXES_ONCE, Flag

_EXACT: Final = 1e-9
"""Room for what binary fractions make of 0.92 * 100."""


def take_less(facts: Facts, gpu: GpuFacts, n_bytes: float) -> Change | None:
    """Return the change that leaves so much more free on the GPU; None where its size is not known."""
    if not gpu.usable_bytes:
        return None
    text = f"leaves {size(n_bytes)} more outside of what vLLM takes at its start"
    cost = f"the KV cache of each GPU shrinks by about as much{_in_tokens(facts, n_bytes)}; a restart"
    if facts.settings.sizes_cache_in_bytes:
        return _in_bytes(facts, -ceil(n_bytes / MIB) * MIB, text, cost)
    share, now = n_bytes / gpu.usable_bytes, facts.settings.gpu_memory_utilization
    lower = None if now is None else floor((now - share) * 100 + _EXACT) / 100
    if lower is not None and lower <= 0:
        return None
    return Change(
        flag=Flag.GPU_MEMORY_UTILIZATION,
        value=lower,
        difference=-ceil(share * 100 - _EXACT) / 100 if lower is None else None,
        now=now,
        text=text,
        cost=cost,
    )


def take_more(facts: Facts) -> Change | None:
    """Return the change that gives the KV cache what was never used; None where nothing is sure to be to spare.

    What was left at the highest peak counts only after USUAL_SECONDS of a trace, and AIM_BYTES of it stay. Where memory
    ran short, at a start or later, or others took some of it, nothing is to spare.
    """
    least, usable = facts.least_room_bytes, [gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes]
    if facts.origin is Origin.PAGE or facts.span_seconds < USUAL_SECONDS or least is None or not usable:
        return None
    if facts.failed_starts or ran_short(facts):
        return None
    spare = least - AIM_BYTES
    steps = floor(spare / max(usable) * 100)
    text = f"{size(least)} were left at the highest peak; at least {size(AIM_BYTES)} stay"
    cost = "less room for a burst larger than all so far; a restart"
    if spare <= 0 or steps < 1:
        return None
    if facts.settings.sizes_cache_in_bytes:
        return _in_bytes(facts, floor(spare / MIB) * MIB, text, cost)
    now = facts.settings.gpu_memory_utilization
    highest = None if now is None else floor(min(now + steps / 100, HIGHEST_UTILIZATION) * 100 + _EXACT) / 100
    if highest is not None and now is not None and highest <= now:
        return None
    return Change(
        flag=Flag.GPU_MEMORY_UTILIZATION,
        value=highest,
        difference=steps / 100 if highest is None else None,
        now=now,
        text=text if highest is not None else f"{text}; not above {HIGHEST_UTILIZATION:g}",
        cost=cost,
    )


def ran_short(facts: Facts) -> bool:
    """Tell whether little was left at any time, or others took memory of the engine's GPUs."""
    return any(gpu.spells or (gpu.others and gpu.others.most) for gpu in facts.gpus)


def _in_bytes(facts: Facts, difference: int, text: str, cost: str) -> Change | None:
    now = facts.settings.kv_cache_memory_bytes
    if now is not None and now + difference <= 0:
        return None
    return Change(
        flag=Flag.KV_CACHE_MEMORY_BYTES,
        value=None if now is None else int(now + difference),
        difference=difference if now is None else None,
        now=now,
        text=text,
        cost=cost,
    )


def _in_tokens(facts: Facts, n_bytes: float) -> str:
    """Return what of the KV cache that is, where the bytes of a token are known."""
    for engine in facts.engines:
        if engine.capacity_bytes and engine.capacity_tokens:
            on_all = n_bytes * len(facts.gpus) / len(facts.engines)
            tokens = on_all / engine.capacity_bytes * engine.capacity_tokens
            if tokens < engine.capacity_tokens:
                return f" ({tokens:,.0f} of {engine.capacity_tokens:,.0f} tokens)"
    return ""


KEPT_RATIO: Final = 0.9
"""Ours: of what filled the cache, so many leave a tenth for requests that grow while they are answered."""

LENGTH_MARGIN: Final = 1.25
LENGTH_STEP: Final = 1024
"""Ours: a limit on requests' length lies a quarter above the 99th percentile seen, in whole KiB of tokens."""

REPLICA: Final = Change(text="Add a replica, or send part of the traffic elsewhere", cost="another GPU; no restart")
NOT_OUT_OF_MEMORY: Final = (
    "A full KV cache is slow, not out of memory. A lower share of the GPU for vLLM would make the cache smaller."
)
Pressed = tuple[EngineFacts, FullFacts]


def full_cache(facts: Facts) -> Advice | None:
    """Fit where the cache preempts: it is too small, or requests are larger than usual, or there are too many.

    On a page more run at once than it holds only now.
    """
    found = pressed(facts)
    if found is None:
        return None
    engine, full = found
    name, remark = called(facts, engine), NOT_OUT_OF_MEMORY
    if _too_small(engine, full):
        cause, changes = Cause.MODEL_DOES_NOT_FIT, several(take_more(facts), split(facts))
        summary = f"The model leaves too little of the GPU for the KV cache of {name}."
        remark = "vllm-headroom plan says what fits with other weights, another KV cache type or more GPUs."
    elif _larger(engine, full):
        cause, changes = Cause.KV_CACHE_BLOW_OUT, several(take_more(facts), _shorter(facts, engine, full), REPLICA)
        summary = f"Requests that are longer than usual fill the KV cache of {name}, and it preempts."
    else:
        now = " now" if facts.origin is Origin.PAGE else ""
        cause, changes = Cause.CONCURRENCY_MISJUDGED, several(_fewer(facts, engine, full), take_more(facts), REPLICA)
        summary = f"More requests run at once than the KV cache of {name} holds{now}, and it preempts."
    evidence = tuple(_cache_evidence(engine, full))
    return Advice(cause=cause, summary=summary, evidence=evidence, changes=changes, remark=remark)


def split(facts: Facts) -> Change | None:
    """Return the model spread over twice as many GPUs; None where how many there are for each engine is not clear."""
    engines = max(1, len(facts.engines))
    each, rest = divmod(len(facts.gpus), engines)
    if rest or not each:
        return None
    return Change(
        flag=Flag.TENSOR_PARALLEL_SIZE,
        value=2 * each,
        now=each,
        text="spreads the weights, and leaves each GPU more for the KV cache",
        cost="twice the GPUs; a restart",
    )


def pressed(facts: Facts) -> Pressed | None:
    """Return the engine that preempts the most for each request while full; None where none is hurt by it.

    A trace has to show it for LASTING_SECONDS; a page shows the present and the counts since the start.
    """
    hurt = [(engine, engine.full) for engine in facts.engines if engine.full is not None and _hurt(engine.full)]
    return max(hurt, key=lambda each: each[1].preemptions / max(1.0, each[1].finished), default=None)


def _hurt(full: FullFacts) -> bool:
    lasts = full.seconds is None or full.seconds >= LASTING_SECONDS
    return lasts and full.preemptions > 0 and full.preemptions >= HURTING_PREEMPTIONS * full.finished


def _larger(engine: EngineFacts, full: FullFacts) -> bool:
    """Tell whether a request holds LARGER_REQUESTS times what it usually does."""
    usual = engine.usual_tokens
    return full.tokens is not None and usual is not None and full.tokens >= LARGER_REQUESTS * usual


def _too_small(engine: EngineFacts, full: FullFacts) -> bool:
    """Tell whether fewer than FEWEST_REQUESTS of the usual size fit at once."""
    usual = engine.usual_tokens if engine.usual_tokens is not None else full.tokens
    return bool(engine.capacity_tokens and usual) and (engine.capacity_tokens or 0) < FEWEST_REQUESTS * (usual or 0)


def _shorter(facts: Facts, engine: EngineFacts, full: FullFacts) -> Change | None:
    """Return a limit above the 99th percentile of what a request held; None where it would bound nothing."""
    if engine.high_tokens is None or full.tokens is None:
        return None
    value = ceil(LENGTH_MARGIN * engine.high_tokens / LENGTH_STEP) * LENGTH_STEP
    if value >= full.tokens:
        return None
    return lowered(
        facts,
        Flag.MAX_MODEL_LEN,
        value,
        text=f"99 % of the time running requests held {count(engine.high_tokens)} tokens each or fewer, on average",
        cost="longer requests are refused, and single ones may be longer than the average of those that run together:"
        " look at vllm:request_prompt_tokens first; a restart",
    )


def _fewer(facts: Facts, engine: EngineFacts, full: FullFacts) -> Change | None:
    """Return what ran without preemption, or KEPT_RATIO of what filled the cache where that is less."""
    value = floor(KEPT_RATIO * full.running)
    calm = engine.calm_running is not None and engine.calm_running < value + 1
    return lowered(
        facts,
        Flag.MAX_NUM_SEQS,
        floor(engine.calm_running) if calm and engine.calm_running is not None else value,
        text="the most that ran without preemption" if calm else f"{percent(KEPT_RATIO)} of what fills the cache",
        cost="the rest waits in the queue, where no work is lost; a restart",
    )


def _cache_evidence(engine: EngineFacts, full: FullFacts) -> Iterator[Evidence]:
    lasted = "now" if full.seconds is None else f"for {duration(full.seconds)}"
    yield Evidence("full_seconds", full.seconds or 0.0, f"more than {percent(FULL_RATIO)} in use {lasted}")
    often = per_request(full.preemptions, full.finished)
    when = " since the engine's start" if full.seconds is None else " meanwhile"
    yield Evidence("preemptions", full.preemptions, f"preemptions{when}: {often}")
    yield Evidence("running", full.running, f"{count(full.running)} requests running then")
    if full.tokens is not None:
        usual = "" if engine.usual_tokens is None else f", {count(engine.usual_tokens)} usually"
        text = f"{count(full.tokens)} tokens of the cache for each{usual}"
        yield Evidence("tokens_per_request", full.tokens, text)
    if engine.capacity_tokens is not None:
        in_bytes = "" if engine.capacity_bytes is None else f", {size(engine.capacity_bytes)}"
        text = f"the cache holds {count(engine.capacity_tokens)} tokens{in_bytes}"
        yield Evidence("capacity_tokens", engine.capacity_tokens, text)


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
        evidence=tuple(_prefix_evidence(prefix)),
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


def _prefix_evidence(prefix: PrefixFacts) -> Iterator[Evidence]:
    ratio = prefix.hits / prefix.queries
    over = "since the engine's start" if prefix.seconds is None else f"over {duration(prefix.seconds)}"
    yield Evidence("hit_ratio", ratio, f"hits over queries {ratio:.2f} {over}")
    if prefix.recent_ratio is not None:
        of_late = f"{prefix.recent_ratio:.2f} in the last five minutes"
        yield Evidence("recent_hit_ratio", prefix.recent_ratio, of_late)
    yield Evidence("queries", prefix.queries, f"{count(prefix.queries)} tokens looked up")
