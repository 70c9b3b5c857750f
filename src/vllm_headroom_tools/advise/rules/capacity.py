"""Rules on the KV cache, which vLLM allocates at its start: a full one makes requests wait, not run out of memory."""

from math import ceil, floor, inf
from typing import Final

from vllm_headroom.units import MIB, format_duration, format_size
from vllm_headroom_tools.advise.facts import (
    AIM_BYTES,
    FULL_RATIO,
    LASTING_SECONDS,
    EngineFacts,
    Facts,
    FullFacts,
    GpuFacts,
    Origin,
)
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    drop_none,
    format_percent,
    list_evidence,
    lower_option,
    name_engine,
)
from vllm_headroom_tools.advise.settings import COUNTS_PREFIXES_ONCE, Flag

HURTING_PREEMPTIONS: Final = 0.1
"""Preemptions for each finished request: 0.01 is nothing, above this it hurts (runbook HeadroomKvCacheThrashing)."""

LARGER_REQUESTS: Final = 2.0
"""Ours: requests of twice the usual size fill a cache by their size; smaller ones by their number."""

FEWEST_REQUESTS: Final = 4
"""Ours: where fewer usual requests fit at once, nothing can be batched: the model is too large."""

USUAL_SECONDS: Final = 6 * 3600.0
"""Ours: after this time the highest peaks count as the usual ones; nothing is raised before."""

UNUSED_RATIO: Final = 0.15
"""Ours: a queue in front of a full cache is healthy where vLLM has most of the GPU."""

HIGHEST_UTILIZATION: Final = 0.95
"""The highest value that vLLM's author calls safe (vllm-project/vllm#1298)."""

_EXACT: Final = 1e-9
"""Tolerance for binary fractions such as 0.92 * 100."""


def change_share(
    facts: Facts, usable_bytes: float, n_bytes: float, text: str, cost: str
) -> Change | None:
    """Return the change of vLLM's share by so many bytes, rounded down; None where it would be none, or leave none."""
    settings, highest = facts.settings, HIGHEST_UTILIZATION
    flag, now, per, change = (
        Flag.GPU_MEMORY_UTILIZATION,
        settings.gpu_memory_utilization,
        100.0,
        n_bytes / usable_bytes,
    )
    if settings.sizes_cache_in_bytes:
        flag, now, per, change = (
            Flag.KV_CACHE_MEMORY_BYTES,
            settings.kv_cache_memory_bytes,
            1 / MIB,
            n_bytes,
        )
        highest = inf
    if now is None:
        difference = floor(change * per + _EXACT) / per
        text = f"{text}; not above {highest:g}" if change > 0 and highest < inf else text
        return (
            Change(flag=flag, difference=difference, text=text, cost=cost) if difference else None
        )
    value = floor(min(now + change, max(now, highest)) * per + _EXACT) / per
    if value <= 0 or (value - now) * change <= 0:
        return None
    return Change(flag=flag, value=value, now=now, text=text, cost=cost)


def take_less(facts: Facts, gpu: GpuFacts, n_bytes: float) -> Change | None:
    """Return the change that leaves this much more of the GPU free; None where its size is unknown."""
    if not gpu.usable_bytes:
        return None
    tokens = ""
    for engine in facts.engines:
        if engine.capacity_bytes and engine.capacity_tokens and not tokens:
            on_all = n_bytes * len(facts.gpus) / len(facts.engines)
            lost = on_all / engine.capacity_bytes * engine.capacity_tokens
            if lost < engine.capacity_tokens:
                tokens = f" ({lost:,.0f} of {engine.capacity_tokens:,.0f} tokens)"
    text = f"leaves {format_size(n_bytes)} more outside of what vLLM takes at its start"
    cost = f"the KV cache of each GPU shrinks by about as much{tokens}; a restart"
    return change_share(facts, gpu.usable_bytes, -n_bytes, text, cost)


def take_more(facts: Facts) -> Change | None:
    """Return the change that gives the KV cache unused memory; None where none is sure to be spare.

    The room at the highest peak counts only after USUAL_SECONDS of a trace, less AIM_BYTES. Nothing is spare where
    memory ran short, at a start or later, or others took some.
    """
    least, usable = (
        facts.least_room_bytes,
        [gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes],
    )
    if (
        facts.origin is Origin.PAGE
        or facts.span_seconds < USUAL_SECONDS
        or least is None
        or not usable
    ):
        return None
    if facts.failed_starts or has_run_short(facts) or least <= AIM_BYTES:
        return None
    text = f"{format_size(least)} were left at the highest peak; at least {format_size(AIM_BYTES)} stay"
    cost = "less room for a burst larger than all so far; a restart"
    return change_share(facts, max(usable), least - AIM_BYTES, text, cost)


def has_run_short(facts: Facts) -> bool:
    """Return whether memory ran short, or others took memory of the engine's GPUs."""
    return any(gpu.spells or (gpu.others and gpu.others.most) for gpu in facts.gpus)


KEPT_RATIO: Final = 0.9
"""Ours: a tenth of the requests that filled the cache makes room for requests that grow."""

LENGTH_MARGIN: Final = 1.25
LENGTH_STEP: Final = 1024
"""Ours: a limit on the length of requests is a quarter above the 99th percentile, in steps of 1,024 tokens."""

REPLICA: Final = Change(
    text="Add a replica, or send part of the traffic elsewhere", cost="another GPU; no restart"
)
NOT_OUT_OF_MEMORY: Final = "A full KV cache is slow, not out of memory. A lower share of the GPU for vLLM would make the cache smaller."


def find_full_cache(facts: Facts) -> Advice | None:
    """Fit where the cache preempts: it is too small, requests are larger than usual, or too many run."""
    found = find_pressed(facts)
    if found is None:
        return None
    engine, full = found
    name, remark, usual = name_engine(facts, engine), NOT_OUT_OF_MEMORY, engine.usual_tokens
    if (engine.capacity_tokens or inf) < FEWEST_REQUESTS * (
        (full.tokens if usual is None else usual) or 0.0
    ):
        cause, changes = Cause.MODEL_DOES_NOT_FIT, drop_none(take_more(facts), split_model(facts))
        summary = f"The model leaves too little of the GPU for the KV cache of {name}."
        remark = "vllm-headroom plan computes what fits with other weights, another KV cache type or more GPUs."
    elif full.tokens is not None and usual is not None and full.tokens >= LARGER_REQUESTS * usual:
        cause = Cause.KV_CACHE_BLOW_OUT
        changes = drop_none(
            take_more(facts), _shorten_requests(facts, engine, full.tokens), REPLICA
        )
        summary = (
            f"Requests that are longer than usual fill the KV cache of {name}, and it preempts."
        )
    else:
        now = " now" if facts.origin is Origin.PAGE else ""
        cause = Cause.CONCURRENCY_MISJUDGED
        changes = drop_none(take_more(facts), _run_fewer(facts, engine, full), REPLICA)
        summary = (
            f"More requests run at once than the KV cache of {name} holds{now}, and it preempts."
        )
    lasted = "now" if full.seconds is None else f"for {format_duration(full.seconds)}"
    when = " since the engine's start" if full.seconds is None else " meanwhile"
    often = f"{full.preemptions:,.0f} and no request finished"
    if full.finished:
        often = f"{full.preemptions / full.finished:.2g} for each finished request"
    usually = "" if usual is None else f", {usual:,.0f} usually"
    evidence = list_evidence(
        (
            "full_seconds",
            full.seconds or 0.0,
            f"more than {format_percent(FULL_RATIO)} in use {lasted}",
        ),
        ("preemptions", full.preemptions, f"preemptions{when}: {often}"),
        ("running", full.running, "{} requests running then"),
        ("tokens_per_request", full.tokens, f"{{}} tokens of the cache for each{usually}"),
        _measure_capacity(engine),
    )
    return Advice(cause=cause, summary=summary, evidence=evidence, changes=changes, remark=remark)


def find_unused_memory(facts: Facts) -> Advice | None:
    """Fit where requests waited for LASTING_SECONDS for a full cache, and UNUSED_RATIO of each GPU was never used.

    Where the cache preempts too, `find_full_cache` says so.
    """
    more, least = take_more(facts), facts.least_room_bytes or 0.0
    usable = max((gpu.usable_bytes or 0.0 for gpu in facts.gpus), default=0.0)
    if more is None or find_pressed(facts) is not None or least < UNUSED_RATIO * usable:
        return None
    for engine in facts.engines:
        full = engine.full
        if full is not None and full.queued_seconds >= LASTING_SECONDS:
            waited = f"{full.waiting or 0:,.0f} requests waited with a full cache, for {{}}"
            return Advice(
                cause=Cause.UNUSED_MEMORY,
                summary=f"Requests wait for the KV cache of {name_engine(facts, engine)}, and GPU memory is unused.",
                evidence=list_evidence(
                    ("queued_seconds", full.queued_seconds, waited),
                    ("least_room_bytes", least, "at least {} of each GPU were left all the time"),
                    _measure_capacity(engine),
                ),
                changes=(more, REPLICA),
                remark=NOT_OUT_OF_MEMORY,
            )
    return None


def split_model(
    facts: Facts, text: str = "spreads the weights, and leaves each GPU more for the KV cache"
) -> Change | None:
    """Return the model spread over twice as many GPUs; None where the GPUs of an engine are not known."""
    each, rest = divmod(len(facts.gpus), max(1, len(facts.engines)))
    if rest or not each:
        return None
    return Change(
        flag=Flag.TENSOR_PARALLEL_SIZE,
        value=2 * each,
        now=each,
        text=text,
        cost="twice the GPUs; a restart",
    )


def find_pressed(facts: Facts) -> tuple[EngineFacts, FullFacts] | None:
    """Return the engine with the most harmful preemptions per request while full, or None.

    In a trace they have to last for LASTING_SECONDS; a page has the present and the counts since the start.
    """
    hurt = [
        (engine, full)
        for engine in facts.engines
        if (full := engine.full) is not None
        and (full.seconds is None or full.seconds >= LASTING_SECONDS)
        and full.preemptions > 0
        and full.preemptions >= HURTING_PREEMPTIONS * full.finished
    ]
    return max(
        hurt, key=lambda each: each[1].preemptions / max(1.0, each[1].finished), default=None
    )


def _shorten_requests(facts: Facts, engine: EngineFacts, tokens: float) -> Change | None:
    """Return a limit above the 99th percentile of tokens per request; None where it would have no effect."""
    if engine.high_tokens is None:
        return None
    value = ceil(LENGTH_MARGIN * engine.high_tokens / LENGTH_STEP) * LENGTH_STEP
    if value >= tokens:
        return None
    return lower_option(
        facts,
        Flag.MAX_MODEL_LEN,
        value,
        f"while the cache was not full, running requests held {engine.high_tokens:,.0f} tokens each or fewer in"
        " 99 % of the time, on average",
        "longer requests are refused, and single ones may be longer than the average of those that run together:"
        " look at vllm:request_prompt_tokens first; a restart",
    )


def _run_fewer(facts: Facts, engine: EngineFacts, full: FullFacts) -> Change | None:
    """Return the load that ran without preemption, or KEPT_RATIO of what filled the cache if that is less."""
    value, text = (
        floor(KEPT_RATIO * full.running),
        f"{100 * KEPT_RATIO:.3g} % of what fills the cache",
    )
    if engine.calm_running is not None and engine.calm_running < value + 1:
        value, text = floor(engine.calm_running), "the most that ran without preemption"
    cost = "the rest waits in the queue, where no work is lost; a restart"
    return lower_option(facts, Flag.MAX_NUM_SEQS, value, text, cost)


def _measure_capacity(engine: EngineFacts) -> tuple[str, float | None, str]:
    in_bytes = "" if engine.capacity_bytes is None else f", {format_size(engine.capacity_bytes)}"
    return "capacity_tokens", engine.capacity_tokens, f"the cache holds {{}} tokens{in_bytes}"


MOST_RAISED: Final = 2.0
RAISED_RATIO: Final = 0.8
"""Ours: at most twice as many requests at once, and at most four fifths of the cache."""


def find_too_few_requests(facts: Facts) -> Advice | None:
    """Fit where requests waited for LASTING_SECONDS while the cache had room, always with the same number running.

    Not where a peak left less than AIM_BYTES, since more requests also take more memory outside of the cache, nor where
    the cache of another rank preempts.
    """
    least, now = facts.least_room_bytes, facts.settings.max_num_seqs
    if (
        find_pressed(facts) is not None
        or has_run_short(facts)
        or least is None
        or least < AIM_BYTES
    ):
        return None
    for engine in facts.engines:
        capped = engine.capped
        if (
            capped is None
            or capped.seconds < LASTING_SECONDS
            or (now is not None and now > capped.running)
        ):
            continue
        fitting = (
            capped.running * RAISED_RATIO / capped.kv_used_ratio if capped.kv_used_ratio else inf
        )
        value = floor(min(MOST_RAISED * capped.running, fitting))
        if value > capped.running:
            text = f"would fill {format_percent(value / capped.running * capped.kv_used_ratio)} of the KV cache"
            cost = "each answer comes a little slower; a restart"
            change = Change(flag=Flag.MAX_NUM_SEQS, value=value, now=now, text=text, cost=cost)
            return Advice(
                cause=Cause.CONCURRENCY_MISJUDGED,
                summary=f"Requests wait for {name_engine(facts, engine)} while its KV cache has room.",
                evidence=list_evidence(
                    (
                        "waiting_seconds",
                        capped.seconds,
                        "requests waited for {} with room in the KV cache",
                    ),
                    (
                        "running",
                        capped.running,
                        "never more than {} ran: probably the value of --max-num-seqs",
                    ),
                    ("kv_used_ratio", capped.kv_used_ratio, "{} of the KV cache in use meanwhile"),
                ),
                changes=(change,),
            )
    return None


PAYING_RATIO: Final = 0.3
"""Below this hit ratio, lookups cost about what they save (alert HeadroomPrefixCacheNotPaying)."""

PREFIX_SECONDS: Final = 6 * 3600.0
PREFIX_TOKENS_PER_SECOND: Final = 100.0
"""It takes six hours of at least this traffic to judge a prefix cache; less has little to gain (the same alert)."""

BLOCKED_RATIO: Final = 0.05
"""Ours: before vLLM 0.27 a waiting request is looked up again in each step (vllm-project/vllm#43736), so the hit ratio
means nothing where requests wait for more than this share of the time."""


def find_poor_prefix_cache(facts: Facts) -> Advice | None:
    """Fit where less than PAYING_RATIO of enough lookups hit, and the counts are reliable."""
    found = (judge_prefix_cache(facts, engine) for engine in facts.engines)
    return next((each for each in found if isinstance(each, Advice)), None)


def judge_prefix_cache(facts: Facts, engine: EngineFacts) -> Advice | str | None:
    """Return the advice on a cache that rarely hits, or why it is not judged; None where nothing is to gain.

    A page has the counts since the engine's start; the last five minutes have to agree.
    """
    prefix = engine.prefix
    if prefix is None or not prefix.hits < PAYING_RATIO * prefix.queries:
        return None
    if prefix.recent_ratio is not None and prefix.recent_ratio >= PAYING_RATIO:
        return None
    if prefix.seconds is not None and prefix.queries < PREFIX_TOKENS_PER_SECOND * prefix.seconds:
        return None
    judged_seconds = (
        prefix.queries / PREFIX_TOKENS_PER_SECOND if prefix.seconds is None else prefix.seconds
    )
    if judged_seconds < PREFIX_SECONDS:
        least = format_duration(PREFIX_SECONDS)
        return f"Too little was looked up in the prefix cache to judge it: {least} of traffic do."
    if facts.settings.known < COUNTS_PREFIXES_ONCE and prefix.blocked_ratio > BLOCKED_RATIO:
        why = "before vLLM 0.27 waiting requests are counted again in each step."
        return f"The prefix cache's low hit ratio is not reliable: {why}"
    ratio, recent = prefix.hits / prefix.queries, prefix.recent_ratio
    over = (
        "since the engine's start"
        if prefix.seconds is None
        else f"over {format_duration(prefix.seconds)}"
    )
    return Advice(
        cause=Cause.PREFIX_CACHE,
        summary=f"The prefix cache of {name_engine(facts, engine)} rarely hits.",
        evidence=list_evidence(
            ("hit_ratio", ratio, f"hits over queries {ratio:.2f} {over}"),
            ("recent_hit_ratio", recent, f"{recent or 0.0:.2f} in the last five minutes"),
            ("queries", prefix.queries, "{} tokens looked up"),
        ),
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
