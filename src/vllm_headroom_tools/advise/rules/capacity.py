"""Rules on the KV cache.

vLLM allocates it at its start: a full one makes requests wait, and does not run out of memory.
"""

from math import ceil, floor
from typing import Final

from msgspec import Struct

from vllm_headroom.units import HOUR_SECONDS, MIB, format_duration, format_size
from vllm_headroom_tools.advise.facts import (
    AIM_BYTES,
    FULL_RATIO,
    LASTING_SECONDS,
    CappedFacts,
    EngineFacts,
    Facts,
    FullFacts,
    GpuFacts,
    Origin,
    PrefixFacts,
    ThrashFacts,
)
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    Figure,
    drop_none,
    format_percent,
    list_evidence,
    lower_option,
    name_engine,
)
from vllm_headroom_tools.advise.settings import COUNTS_PREFIXES_ONCE, Flag
from vllm_headroom_tools.sizing.question import LARGE_CARD, SAFE_UTILIZATION

# Changes that several rules propose: of vLLM's share of the GPU, and of the number of GPUs.

ROUNDING_TOLERANCE: Final = 1e-9
"""Tolerance for binary fractions such as 0.92 * 100."""


def change_share(
    facts: Facts, usable_bytes: float, added_bytes: float, text: str, cost: str
) -> Change | None:
    """Return the change of vLLM's share by so many bytes, which are negative to take less.

    The value is rounded down. None where it would not change, or leave vLLM nothing.
    """
    if facts.settings.sizes_cache_in_bytes:
        return _change_cache_size(facts, added_bytes, text, cost)
    return _change_utilization(facts, added_bytes / usable_bytes, text, cost)


def _change_utilization(facts: Facts, added_ratio: float, text: str, cost: str) -> Change | None:
    """Return the change of the utilization, in steps of a hundredth."""
    flag = Flag.GPU_MEMORY_UTILIZATION
    now = facts.settings.gpu_memory_utilization
    if now is None:
        difference = floor(added_ratio * 100 + ROUNDING_TOLERANCE) / 100
        if not difference:
            return None
        if added_ratio > 0:
            text = f"{text}; not above {SAFE_UTILIZATION:g}"
        return Change(flag=flag, difference=difference, text=text, cost=cost)
    # A share above the safe one is kept where somebody chose it, and never raised.
    highest = max(now, SAFE_UTILIZATION)
    value = floor(min(now + added_ratio, highest) * 100 + ROUNDING_TOLERANCE) / 100
    if not _is_useful(now, value, added_ratio):
        return None
    return Change(flag=flag, value=value, now=now, text=text, cost=cost)


def _change_cache_size(facts: Facts, added_bytes: float, text: str, cost: str) -> Change | None:
    """Return the change of the KV cache's size where it is set in bytes, in steps of a MiB."""
    flag = Flag.KV_CACHE_MEMORY_BYTES
    now = facts.settings.kv_cache_memory_bytes
    if now is None:
        difference = floor(added_bytes / MIB + ROUNDING_TOLERANCE) * MIB
        return (
            Change(flag=flag, difference=difference, text=text, cost=cost) if difference else None
        )
    value = floor((now + added_bytes) / MIB + ROUNDING_TOLERANCE) * MIB
    if not _is_useful(now, value, added_bytes):
        return None
    return Change(flag=flag, value=value, now=now, text=text, cost=cost)


def _is_useful(now: float, value: float, added_amount: float) -> bool:
    """Return whether a value is above 0, and after rounding still on the wanted side of now."""
    if value <= 0:
        return False
    if added_amount > 0:
        return value > now
    return added_amount < 0 and value < now


def take_less(facts: Facts, gpu: GpuFacts, freed_bytes: float) -> Change | None:
    """Return the change that leaves this much more of the GPU free.

    None where its size is unknown.
    """
    if not gpu.usable_bytes:
        return None
    text = f"leaves {format_size(freed_bytes)} more outside of what vLLM takes at its start"
    lost_tokens = _describe_lost_tokens(facts, freed_bytes)
    cost = f"the KV cache of each GPU shrinks by about as much{lost_tokens}; a restart"
    return change_share(facts, gpu.usable_bytes, -freed_bytes, text, cost)


def _describe_lost_tokens(facts: Facts, freed_bytes: float) -> str:
    """Return how many tokens the first engine of known capacity loses.

    Empty where that is unknown.
    """
    for engine in facts.engines:
        if not engine.capacity_bytes or not engine.capacity_tokens:
            continue
        engine_bytes = freed_bytes * len(facts.gpus) / len(facts.engines)
        lost_tokens = engine_bytes / engine.capacity_bytes * engine.capacity_tokens
        if lost_tokens < engine.capacity_tokens:
            return f" ({lost_tokens:,.0f} of {engine.capacity_tokens:,.0f} tokens)"
    return ""


PEAKS_SECONDS: Final = 6 * HOUR_SECONDS
"""Our choice: after this time the highest peaks count as the usual ones; nothing is raised before.
"""


def take_more(facts: Facts) -> Change | None:
    """Return the change that gives the KV cache unused memory; None where none is sure to be spare.

    The room at the highest peak counts only after PEAKS_SECONDS of a trace, less AIM_BYTES. Nothing
    is spare where memory ran short, at a start or later, or others took some.
    """
    room_bytes = facts.least_room_bytes
    usable_bytes = facts.usable_bytes
    if facts.origin is Origin.PAGE or facts.span_seconds < PEAKS_SECONDS:
        return None
    if facts.failed_starts or has_run_short(facts):
        return None
    # AIM_BYTES have to stay for bursts.
    if room_bytes is None or usable_bytes is None or room_bytes <= AIM_BYTES:
        return None
    text = (
        f"{format_size(room_bytes)} were left at the highest peak;"
        f" at least {format_size(AIM_BYTES)} stay"
    )
    cost = "less room for a burst larger than all so far; a restart"
    return change_share(facts, usable_bytes, room_bytes - AIM_BYTES, text, cost)


def has_run_short(facts: Facts) -> bool:
    """Return whether memory ran short, or others took memory of the engine's GPUs."""
    return any(
        gpu.spells or (gpu.others_memory and gpu.others_memory.highest_bytes) for gpu in facts.gpus
    )


def split_model(
    facts: Facts, text: str = "spreads the weights, and leaves each GPU more for the KV cache"
) -> Change | None:
    """Return the model spread over twice as many GPUs.

    None where the GPUs of an engine are not known.
    """
    # The GPUs of a trace are those of all its engines.
    gpus_per_engine, remainder = divmod(len(facts.gpus), max(1, len(facts.engines)))
    if remainder or not gpus_per_engine:
        return None
    return Change(
        flag=Flag.TENSOR_PARALLEL_SIZE,
        value=2 * gpus_per_engine,
        now=gpus_per_engine,
        text=text,
        cost="twice the GPUs; a restart",
    )


ADD_REPLICA: Final = Change(
    text="Add a replica, or send part of the traffic elsewhere", cost="another GPU; no restart"
)
NOT_OUT_OF_MEMORY: Final = (
    "A full KV cache is slow, not out of memory."
    " A lower share of the GPU for vLLM would make the cache smaller."
)


# A KV cache that preempts.

HURTING_PREEMPTIONS: Final = 0.1
"""Preemptions for each finished request: 0.01 is nothing, above this it hurts (runbook
HeadroomKvCacheThrashing)."""

LARGER_REQUESTS_RATIO: Final = 2.0
"""Our choice: requests of twice the usual size fill a cache by their size; smaller ones by their
number."""

FEWEST_REQUESTS: Final = 4
"""Our choice: where fewer usual requests fit at once, nothing can be batched: the model is too
large."""

CONCURRENCY_KEPT_RATIO: Final = 0.9
"""Our choice: a tenth of the requests that filled the cache makes room for requests that grow."""

LENGTH_MARGIN: Final = 1.25
"""Our choice: a limit on the length of requests is a quarter above the 99th percentile."""

LENGTH_STEP_TOKENS: Final = 1024
"""Our choice: such a limit is a multiple of this."""


class PressedCache(Struct, frozen=True, kw_only=True):
    """An engine whose KV cache is full and preempts."""

    engine: EngineFacts
    full: FullFacts
    # None where it preempts for long enough to be judged without.
    thrash: ThrashFacts | None = None


class CacheDiagnosis(Struct, frozen=True, kw_only=True):
    """Why a KV cache preempts, and what helps."""

    cause: Cause
    summary: str
    changes: tuple[Change, ...]
    remark: str = NOT_OUT_OF_MEMORY


def find_full_cache(facts: Facts) -> Advice | None:
    """Judge a KV cache that preempts.

    Looks at: preemptions for each finished request while the cache was full.
    Applies: from HURTING_PREEMPTIONS on, in a trace after LASTING_SECONDS, or after some
    minutes in which most running requests went back to the queue again and again.
    Proposes: spare memory for the cache first, which costs least. Then what fits the cause: more
    GPUs where the cache is too small for any load, shorter requests where they are longer than
    usual, else fewer requests at once.
    """
    pressed = find_pressed(facts)
    if pressed is None:
        return None
    diagnosis = _diagnose_small_cache(facts, pressed)
    if diagnosis is None:
        diagnosis = _diagnose_long_requests(facts, pressed)
    if diagnosis is None and pressed.thrash is not None:
        diagnosis = _diagnose_thrashing(facts, pressed, pressed.thrash)
    if diagnosis is None:
        diagnosis = _diagnose_many_requests(facts, pressed)
    return Advice(
        cause=diagnosis.cause,
        summary=diagnosis.summary,
        evidence=_list_full_evidence(pressed),
        changes=diagnosis.changes,
        remark=diagnosis.remark,
    )


def find_pressed(facts: Facts) -> PressedCache | None:
    """Return the engine with the most harmful preemptions per request while full, or None.

    In a trace they have to last for LASTING_SECONDS; a page has the present and the counts since
    the start. Where none lasts for so long, the engine that thrashes most.
    """
    worst = None
    worst_rate = 0.0
    for engine in facts.engines:
        full = engine.full
        if full is None or not _is_hurting(full):
            continue
        # Where no request finished, the preemptions alone count.
        rate = full.preemptions / max(1.0, full.finished)
        if rate > worst_rate:
            worst_rate = rate
            worst = PressedCache(engine=engine, full=full)
    return worst or _find_thrashing(facts)


def _find_thrashing(facts: Facts) -> PressedCache | None:
    """Return the engine whose cache sent most running requests back most often, or None."""
    worst = None
    most_times = 0
    for engine in facts.engines:
        thrash = engine.thrash
        if thrash is None or thrash.times <= most_times:
            continue
        if thrash.returned < HURTING_PREEMPTIONS * thrash.finished:
            continue
        most_times = thrash.times
        full = FullFacts(
            seconds=thrash.seconds,
            finished=thrash.finished,
            preemptions=thrash.returned,
            running=thrash.running,
            tokens=thrash.tokens,
        )
        worst = PressedCache(engine=engine, full=full, thrash=thrash)
    return worst


def _is_hurting(full: FullFacts) -> bool:
    if full.seconds is not None and full.seconds < LASTING_SECONDS:
        return False
    return full.preemptions > 0 and full.preemptions >= HURTING_PREEMPTIONS * full.finished


def _diagnose_small_cache(facts: Facts, pressed: PressedCache) -> CacheDiagnosis | None:
    """Return that the model is too large where the cache holds fewer than FEWEST_REQUESTS."""
    engine = pressed.engine
    tokens = pressed.full.tokens if engine.usual_tokens is None else engine.usual_tokens
    needed_tokens = FEWEST_REQUESTS * (tokens or 0.0)
    if not engine.capacity_tokens or engine.capacity_tokens >= needed_tokens:
        return None
    name = name_engine(facts, engine)
    return CacheDiagnosis(
        cause=Cause.MODEL_DOES_NOT_FIT,
        summary=f"The model leaves too little of the GPU for the KV cache of {name}.",
        changes=drop_none(take_more(facts), split_model(facts)),
        remark=(
            "vllm-headroom plan computes what fits with other weights, another KV cache type"
            " or more GPUs."
        ),
    )


def _diagnose_long_requests(facts: Facts, pressed: PressedCache) -> CacheDiagnosis | None:
    """Return that requests are long where they are LARGER_REQUESTS_RATIO times the usual ones."""
    engine = pressed.engine
    tokens = pressed.full.tokens
    usual_tokens = engine.usual_tokens
    if tokens is None or usual_tokens is None or tokens < LARGER_REQUESTS_RATIO * usual_tokens:
        return None
    name = name_engine(facts, engine)
    return CacheDiagnosis(
        cause=Cause.KV_CACHE_BLOW_OUT,
        summary=(
            f"Requests that are longer than usual fill the KV cache of {name}, and it preempts."
        ),
        changes=drop_none(take_more(facts), _shorten_requests(facts, engine, tokens), ADD_REPLICA),
    )


def _diagnose_thrashing(facts: Facts, pressed: PressedCache, thrash: ThrashFacts) -> CacheDiagnosis:
    """Return that the requests that run at once fill the cache again and again."""
    name = name_engine(facts, pressed.engine)
    span = format_duration(thrash.seconds)
    shorten = Change(
        text="Send shorter prompts, or fewer long ones at the same time", cost="none to this engine"
    )
    return CacheDiagnosis(
        cause=Cause.KV_CACHE_THRASHING,
        summary=(
            f"The KV cache of {name} thrashes: {thrash.times} times in {span} it was full and"
            " running requests went back to the queue."
        ),
        changes=drop_none(take_more(facts), _run_fewer(facts, pressed), shorten, ADD_REPLICA),
        remark=(
            "A request that goes back is computed again from its first token, and all of them"
            f" together fill the cache again. {NOT_OUT_OF_MEMORY}"
        ),
    )


def _diagnose_many_requests(facts: Facts, pressed: PressedCache) -> CacheDiagnosis:
    """Return that too many requests run, which is so where neither they nor the model are large."""
    name = name_engine(facts, pressed.engine)
    now = " now" if facts.origin is Origin.PAGE else ""
    return CacheDiagnosis(
        cause=Cause.CONCURRENCY_MISJUDGED,
        summary=(
            f"More requests run at once than the KV cache of {name} holds{now}, and it preempts."
        ),
        changes=drop_none(take_more(facts), _run_fewer(facts, pressed), ADD_REPLICA),
    )


def _list_full_evidence(pressed: PressedCache) -> tuple[Figure, ...]:
    engine = pressed.engine
    full = pressed.full
    thrash = pressed.thrash
    if thrash is not None:
        return _list_thrash_evidence(engine, thrash)
    if full.seconds is None:
        lasted = "now"
        counted = " since the engine's start"
    else:
        lasted = f"for {format_duration(full.seconds)}"
        counted = " meanwhile"
    preemptions = f"{full.preemptions:,.0f} and no request finished"
    if full.finished:
        preemptions = f"{full.preemptions / full.finished:.2g} for each finished request"
    usually = ""
    if engine.usual_tokens is not None:
        usually = f", {engine.usual_tokens:,.0f} usually"
    return list_evidence(
        (
            "full_seconds",
            full.seconds or 0.0,
            f"more than {format_percent(FULL_RATIO)} in use {lasted}",
        ),
        ("preemptions", full.preemptions, f"preemptions{counted}: {preemptions}"),
        ("running", full.running, "{} requests running then"),
        ("tokens_per_request", full.tokens, f"{{}} tokens of the cache for each{usually}"),
        ("calm_running", engine.calm_running, "at most {} ran without a preemption at other times"),
        _measure_capacity(engine),
    )


def _list_thrash_evidence(engine: EngineFacts, thrash: ThrashFacts) -> tuple[Figure, ...]:
    returned = "{} requests went back to the queue, and none finished meanwhile"
    if thrash.finished:
        returned = f"{{}} requests went back to the queue, and {thrash.finished:,.0f} finished"
    times = f"{{}} times in {format_duration(thrash.seconds)} half or more of the running requests"
    return list_evidence(
        ("times", thrash.times, f"{times} went back at once"),
        ("preemptions", thrash.returned, returned),
        ("running", thrash.running, "{} requests ran before"),
        ("tokens_per_request", thrash.tokens, "{} tokens of the cache for each"),
        _measure_capacity(engine),
    )


def _shorten_requests(facts: Facts, engine: EngineFacts, tokens: float) -> Change | None:
    """Return a limit above the 99th percentile of tokens per request.

    None where it would have no effect.
    """
    if engine.high_tokens is None:
        return None
    steps = ceil(LENGTH_MARGIN * engine.high_tokens / LENGTH_STEP_TOKENS)
    limit_tokens = steps * LENGTH_STEP_TOKENS
    if limit_tokens >= tokens:
        # The requests that filled the cache would still be allowed.
        return None
    return lower_option(
        facts,
        Flag.MAX_MODEL_LEN,
        limit_tokens,
        "while the cache was not full, 99 % of the time running requests held at most"
        f" {engine.high_tokens:,.0f} tokens on average",
        "longer requests are refused, and single ones may be longer than the average of those that"
        " run together: look at vllm:request_prompt_tokens first; a restart",
    )


def _run_fewer(facts: Facts, pressed: PressedCache) -> Change | None:
    """Return a limit on running requests: how many fit in CONCURRENCY_KEPT_RATIO of the cache.

    By the tokens that each held while the cache was full; the same part of the requests that filled
    it, where these or the capacity are not known. The load that ran without a preemption is no
    bound: it may be less only because no more requests came.
    """
    percent = f"{100 * CONCURRENCY_KEPT_RATIO:.3g} %"
    tokens = pressed.full.tokens
    capacity_tokens = pressed.engine.capacity_tokens
    requests = floor(CONCURRENCY_KEPT_RATIO * pressed.full.running)
    text = f"{percent} of what fills the cache"
    if tokens and capacity_tokens:
        fitting_requests = floor(CONCURRENCY_KEPT_RATIO * capacity_tokens / tokens)
        text = (
            f"as many as {percent} of its {capacity_tokens:,.0f} tokens hold, at {tokens:,.0f} for"
            " each"
        )
        # A sample may have missed the moment at which the cache was full, and their last tokens.
        is_bounded = pressed.thrash is not None
        requests = min(requests, fitting_requests) if is_bounded else fitting_requests
    cost = "the rest waits in the queue, where no work is lost; a restart"
    return lower_option(facts, Flag.MAX_NUM_SEQS, requests, text, cost)


def _measure_capacity(engine: EngineFacts) -> tuple[str, float | None, str]:
    in_bytes = ""
    if engine.capacity_bytes is not None:
        in_bytes = f", {format_size(engine.capacity_bytes)}"
    return "capacity_tokens", engine.capacity_tokens, f"the cache holds {{}} tokens{in_bytes}"


# A KV cache that is full and does not preempt, on a GPU with memory to spare.

UNUSED_RATIO: Final = 0.15
"""Our choice: a queue in front of a full cache is healthy where vLLM has most of the GPU."""


def find_unused_memory(facts: Facts) -> Advice | None:
    """Judge memory that was never used although requests waited for a full KV cache.

    Looks at: the time in which requests waited for a full cache, and the least room on the GPUs.
    Applies: after LASTING_SECONDS, where UNUSED_RATIO of each GPU was left all the time. Where the
    cache preempts too, `find_full_cache` says so.
    Proposes: the unused memory for the cache, or a replica.
    """
    larger_share = take_more(facts)
    room_bytes = facts.least_room_bytes or 0.0
    if larger_share is None or find_pressed(facts) is not None:
        return None
    if room_bytes < UNUSED_RATIO * (facts.usable_bytes or 0.0):
        return None
    for engine in facts.engines:
        full = engine.full
        if full is None or full.queued_seconds < LASTING_SECONDS:
            continue
        name = name_engine(facts, engine)
        waited = f"{full.waiting or 0:,.0f} requests waited with a full cache, for {{}}"
        return Advice(
            cause=Cause.UNUSED_MEMORY,
            summary=f"Requests wait for the KV cache of {name}, and GPU memory is unused.",
            evidence=list_evidence(
                ("queued_seconds", full.queued_seconds, waited),
                ("least_room_bytes", room_bytes, "at least {} of each GPU were left all the time"),
                _measure_capacity(engine),
            ),
            changes=(larger_share, ADD_REPLICA),
            remark=NOT_OUT_OF_MEMORY,
        )
    return None


# A KV cache with room, in front of which requests wait.

CONCURRENCY_FACTOR_LIMIT: Final = 2.0
"""Our choice, not vLLM's: above its own default for large cards raise concurrency at most twofold,
since each sequence takes memory of the sampler, too."""

CACHE_FILL_RATIO: Final = 0.8
"""Our choice, not vLLM's: raise concurrency until at most four fifths of the cache are in use."""


def find_too_few_requests(facts: Facts) -> Advice | None:
    """Judge a limit on running requests that leaves the KV cache unused.

    Looks at: the time in which requests waited while the cache had room, always with the same
    number running.
    Applies: after LASTING_SECONDS. Not where a peak left less than AIM_BYTES, since more requests
    also take more memory outside of the cache, nor where the cache of another rank preempts.
    Proposes: the limit at which CACHE_FILL_RATIO of the cache is in use, by the tokens that running
    requests held.
    """
    room_bytes = facts.least_room_bytes
    if room_bytes is None or room_bytes < AIM_BYTES:
        return None
    if find_pressed(facts) is not None or has_run_short(facts):
        return None
    for engine in facts.engines:
        if engine.capped is None:
            continue
        change = _run_more(facts, engine, engine.capped)
        if change is not None:
            name = name_engine(facts, engine)
            return Advice(
                cause=Cause.CONCURRENCY_MISJUDGED,
                summary=f"Requests wait for {name} while its KV cache has room.",
                evidence=_list_capped_evidence(engine.capped),
                changes=(change,),
            )
    return None


def _run_more(facts: Facts, engine: EngineFacts, capped: CappedFacts) -> Change | None:
    """Return the limit that would use more of the cache.

    None where the limit is not what holds requests back.
    """
    now = facts.settings.max_num_seqs
    # With a limit above what ran, something else holds requests back.
    if capped.seconds < LASTING_SECONDS or (now is not None and now > capped.running):
        return None
    if not capped.kv_used_ratio:
        # Requests that hold nothing of the cache show no limit.
        return None
    fitting_requests = capped.running * CACHE_FILL_RATIO / capped.kv_used_ratio
    highest = max(LARGE_CARD.max_num_seqs, CONCURRENCY_FACTOR_LIMIT * capped.running)
    value = floor(min(fitting_requests, highest))
    if value <= capped.running:
        return None
    factor = value / capped.running
    text = f"would fill {format_percent(factor * capped.kv_used_ratio)} of the KV cache"
    if engine.capacity_tokens:
        tokens = capped.kv_used_ratio * engine.capacity_tokens / capped.running
        text += f" of {engine.capacity_tokens:,.0f} tokens, at {tokens:,.0f} for each request"
    return Change(
        flag=Flag.MAX_NUM_SEQS,
        value=value,
        now=now,
        text=text,
        cost=f"{factor:.2g} times as many share the GPU, and each answer is slower; a restart",
    )


def _list_capped_evidence(capped: CappedFacts) -> tuple[Figure, ...]:
    return list_evidence(
        ("waiting_seconds", capped.seconds, "requests waited for {} with room in the KV cache"),
        (
            "running",
            capped.running,
            "never more than {} ran: probably the value of --max-num-seqs",
        ),
        ("kv_used_ratio", capped.kv_used_ratio, "{} of the KV cache in use meanwhile"),
    )


# A prefix cache that rarely hits.

PAYING_RATIO: Final = 0.3
"""Below this hit ratio, lookups cost about what they save (alert HeadroomPrefixCacheNotPaying)."""

PREFIX_SECONDS: Final = 6 * HOUR_SECONDS
"""It takes so much traffic to judge a prefix cache (the same alert)."""

PREFIX_TOKENS_PER_SECOND: Final = 100.0
"""It takes at least this traffic to judge a prefix cache; less has little to gain (the same alert).
"""

BLOCKED_RATIO: Final = 0.05
"""Our choice: the hit ratio means nothing where requests wait for more than this share of the time.

Before vLLM 0.27 a waiting request is looked up again in each step (vllm-project/vllm#43736).
"""


def find_poor_prefix_cache(facts: Facts) -> Advice | None:
    """Judge a prefix cache that rarely hits.

    Looks at: the share of looked-up tokens that were there.
    Applies: below PAYING_RATIO, after PREFIX_SECONDS of PREFIX_TOKENS_PER_SECOND.
    Proposes: prompts that begin alike, else no prefix cache, which saves the lookups.
    """
    for engine in facts.engines:
        judgement = judge_prefix_cache(facts, engine)
        if isinstance(judgement, Advice):
            return judgement
    return None


def judge_prefix_cache(facts: Facts, engine: EngineFacts) -> Advice | str | None:
    """Return the advice on a cache that rarely hits, or why it is not judged.

    None where nothing is to gain.

    A page has the counts since the engine's start; the last five minutes have to agree.
    """
    prefix = engine.prefix
    if prefix is None or not _hits_rarely(prefix):
        return None
    # A page does not say since when: its lookups are taken for those of the least traffic.
    judged_seconds = prefix.seconds
    if judged_seconds is None:
        judged_seconds = prefix.queries / PREFIX_TOKENS_PER_SECOND
    elif prefix.queries < PREFIX_TOKENS_PER_SECOND * judged_seconds:
        return None
    if judged_seconds < PREFIX_SECONDS:
        needed = format_duration(PREFIX_SECONDS)
        return f"Too little was looked up in the prefix cache to judge it: {needed} of traffic do."
    counts_again = facts.settings.earliest_version < COUNTS_PREFIXES_ONCE
    if counts_again and prefix.blocked_ratio > BLOCKED_RATIO:
        return (
            "The prefix cache's low hit ratio is not reliable:"
            " before vLLM 0.27 waiting requests are counted again in each step."
        )
    return Advice(
        cause=Cause.PREFIX_CACHE,
        summary=f"The prefix cache of {name_engine(facts, engine)} rarely hits.",
        evidence=_list_prefix_evidence(prefix),
        changes=(
            Change(
                text=(
                    "Look at the prompts: what changes (a date, an id) belongs at their end,"
                    " not at their beginning"
                ),
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


def _hits_rarely(prefix: PrefixFacts) -> bool:
    if prefix.recent_ratio is not None and prefix.recent_ratio >= PAYING_RATIO:
        return False
    return prefix.hits < PAYING_RATIO * prefix.queries


def _list_prefix_evidence(prefix: PrefixFacts) -> tuple[Figure, ...]:
    hit_ratio = prefix.hits / prefix.queries
    recent_ratio = prefix.recent_ratio or 0.0
    span = "since the engine's start"
    if prefix.seconds is not None:
        span = f"over {format_duration(prefix.seconds)}"
    return list_evidence(
        ("hit_ratio", hit_ratio, f"hits over queries {hit_ratio:.2f} {span}"),
        (
            "recent_hit_ratio",
            prefix.recent_ratio,
            f"{recent_ratio:.2f} in the last five minutes",
        ),
        ("queries", prefix.queries, "{} tokens looked up"),
    )
