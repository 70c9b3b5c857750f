"""Rules on the KV cache.

vLLM allocates the whole cache at startup. Therefore, a full cache makes requests wait but does not
make memory run out.
"""

from math import ceil, floor
from typing import Final

from msgspec import Struct

from vllm_headroom.model.status import ROUNDING_TOLERANCE
from vllm_headroom.units import HOUR_SECONDS, MIB, format_duration, format_size
from vllm_headroom_tools.advise.facts import (
    AIM_BYTES,
    CappedFacts,
    EngineFacts,
    Facts,
    FactsSource,
    FullFacts,
    GpuFacts,
    PrefixFacts,
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
from vllm_headroom_tools.full_cache import (
    FULL_RATIO,
    HURTING_PREEMPTIONS,
    LASTING_SECONDS,
    ThrashFacts,
)
from vllm_headroom_tools.sizing.question import LARGE_CARD, SAFE_UTILIZATION

# Changes that several rules propose: vLLM's share of the GPU, and the number of GPUs.


def change_share(
    facts: Facts, usable_bytes: float, added_bytes: float, text: str, cost: str
) -> Change | None:
    """Return the change that adds `added_bytes` to vLLM's memory on a GPU.

    `added_bytes` is negative if memory is taken away. The option is vLLM's share of the GPU. If the
    KV cache's size is set in bytes, it is that size. The new value is rounded down. Returns None if
    rounding leaves no change, or if vLLM would have no memory.
    """
    if facts.settings.sizes_cache_in_bytes:
        return _change_cache_size(facts, added_bytes, text, cost)
    return _change_utilization(facts, added_bytes / usable_bytes, text, cost)


def _change_utilization(facts: Facts, added_ratio: float, text: str, cost: str) -> Change | None:
    """Return the change to the utilization, rounded to hundredths.

    If the current value is unknown, the change is a difference. Returns None if rounding leaves no
    change.
    """
    flag = Flag.GPU_MEMORY_UTILIZATION
    now = facts.settings.gpu_memory_utilization
    if now is None:
        # Round the difference down, so that the advice never promises more than is available.
        difference = floor(added_ratio * 100 + ROUNDING_TOLERANCE) / 100
        if not difference:
            return None
        if added_ratio > 0:
            text = f"{text}; not above {SAFE_UTILIZATION:g}"
        return Change(flag=flag, difference=difference, text=text, cost=cost)
    # A share above the safe share is not lowered, because the operator chose it deliberately.
    highest = max(now, SAFE_UTILIZATION)
    value = floor(min(now + added_ratio, highest) * 100 + ROUNDING_TOLERANCE) / 100
    if not _is_useful(now, value, added_ratio):
        return None
    return Change(flag=flag, value=value, now=now, text=text, cost=cost)


def _change_cache_size(facts: Facts, added_bytes: float, text: str, cost: str) -> Change | None:
    """Return the change to a KV cache size in bytes, rounded to whole MiB.

    If the current value is unknown, the change is a difference. Returns None if rounding leaves no
    change.
    """
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
    """Return whether a rounded value is above 0 and changes in the right direction.

    `added_amount` is the amount before rounding: positive for an increase, negative for a decrease.
    """
    if value <= 0:
        return False
    if added_amount > 0:
        return value > now
    return added_amount < 0 and value < now


def take_less(facts: Facts, gpu: GpuFacts, freed_bytes: float) -> Change | None:
    """Return the change to vLLM's memory that frees `freed_bytes` on the GPU.

    Returns None if the GPU's size is unknown or vLLM's memory would not change.
    """
    if not gpu.usable_bytes:
        return None
    text = f"leaves {format_size(freed_bytes)} more outside of what vLLM takes at its start"
    lost_tokens = _describe_lost_tokens(facts, freed_bytes)
    cost = f"the KV cache of each GPU shrinks by about as much{lost_tokens}; a restart"
    return change_share(facts, gpu.usable_bytes, -freed_bytes, text, cost)


def _describe_lost_tokens(facts: Facts, freed_bytes: float) -> str:
    """Describe how many tokens the KV cache loses.

    The first engine with a known capacity is used. Returns an empty string if no capacity is known
    or if no capacity would remain.
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
"""Our choice: the highest peak of a trace is representative from this length. With a shorter trace,
vLLM's share is not raised.
"""


def take_more(facts: Facts) -> Change | None:
    """Return the change that gives unused memory to the KV cache.

    Unused memory is the room at the highest peak of a trace, minus AIM_BYTES. Returns None for a
    page, or for a trace that is shorter than PEAKS_SECONDS. Also returns None if memory ran short
    during a start or later, or if other processes took memory.
    """
    room_bytes = facts.least_room_bytes
    usable_bytes = facts.usable_bytes
    # A page has no history of peaks. A short trace may have missed the highest peaks.
    if facts.origin is FactsSource.PAGE or facts.span_seconds < PEAKS_SECONDS:
        return None
    if facts.failed_starts or has_run_short(facts):
        return None
    # AIM_BYTES must stay free for bursts.
    if room_bytes is None or usable_bytes is None or room_bytes <= AIM_BYTES:
        return None
    text = (
        f"{format_size(room_bytes)} were left at the highest peak;"
        f" at least {format_size(AIM_BYTES)} stay"
    )
    cost = "less room for a burst larger than all so far; a restart"
    return change_share(facts, usable_bytes, room_bytes - AIM_BYTES, text, cost)


def has_run_short(facts: Facts) -> bool:
    """Return whether memory ran short, or other processes used memory on the engine's GPUs."""
    return any(
        gpu.spells or (gpu.others_memory and gpu.others_memory.highest_bytes) for gpu in facts.gpus
    )


def split_model(
    facts: Facts, text: str = "spreads the weights, and leaves each GPU more for the KV cache"
) -> Change | None:
    """Return the change that spreads the model across twice as many GPUs.

    Returns None if the number of GPUs per engine is unknown.
    """
    # All engines in a trace share its GPUs.
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

LARGER_REQUESTS_RATIO: Final = 2.0
"""Our choice: requests are large from this multiple of the usual size. A full cache is then due to
their size. Otherwise, their number is the reason.
"""

FEWEST_REQUESTS: Final = 4
"""Our choice: if fewer usual requests fit, the model is too large. vLLM can then hardly batch
requests.
"""

CONCURRENCY_KEPT_RATIO: Final = 0.9
"""Our choice: the share of the cache that running requests may fill. The rest is left for these
requests to grow.
"""

LENGTH_MARGIN: Final = 1.25
"""Our choice: this factor is applied to the 99th percentile of request lengths. The product is the
proposed limit on request length.
"""

LENGTH_STEP_TOKENS: Final = 1024
"""Our choice: a proposed limit on request length is a multiple of this."""


class PressedCache(Struct, frozen=True, kw_only=True):
    """An engine that preempts requests because its KV cache is full."""

    engine: EngineFacts
    full: FullFacts
    # The collapses on which the verdict is based. None if the verdict is based on how long the
    # cache was full.
    thrash: ThrashFacts | None = None


class CacheDiagnosis(Struct, frozen=True, kw_only=True):
    """The reason why a full KV cache leads to preemptions, and what helps."""

    cause: Cause
    summary: str
    changes: tuple[Change, ...]
    remark: str = NOT_OUT_OF_MEMORY


def find_full_cache(facts: Facts) -> Advice | None:
    """Judge preemptions caused by a full KV cache.

    The rule applies if requests were preempted often while the cache was full. There must have been
    at least HURTING_PREEMPTIONS preemptions per finished request. In a trace, the cache must have
    been full for at least LASTING_SECONDS. A shorter time is enough if most running requests were
    preempted several times within minutes. The first proposal is to give unused memory to the
    cache, which costs least. The second proposal depends on the cause:

    - More GPUs if the cache is too small for any load.
    - A limit on request length if requests are longer than usual.
    - Otherwise, a limit on concurrent requests.

    Returns None if the rule does not apply.
    """
    pressed = find_pressed(facts)
    if pressed is None:
        return None
    diagnosis = _diagnose_small_cache(facts, pressed)
    if diagnosis is None:
        diagnosis = _diagnose_long_requests(facts, pressed)
    # The causes are mutually exclusive, and the most specific cause is tried first.
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
    """Return the engine with the most preemptions per finished request while its cache is full.

    In a trace, the cache must be full for LASTING_SECONDS. If no cache is full for that long, the
    longest series of collapses decides. The engine with that series is returned. Returns None if
    preemptions are too rare on all engines to do harm.
    """
    worst = None
    worst_rate = 0.0
    for engine in facts.engines:
        full = engine.full
        if full is None or not _is_hurting(full):
            continue
        # If no request finished, use the number of preemptions as the rate.
        rate = full.preemptions / max(1.0, full.finished)
        if rate > worst_rate:
            worst_rate = rate
            worst = PressedCache(engine=engine, full=full)
    return worst or _find_thrashing(facts)


def _find_thrashing(facts: Facts) -> PressedCache | None:
    """Return the engine with the longest series of collapses.

    Returns None if no series does harm.
    """
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
    """Return whether a full cache lasts long enough and causes enough preemptions."""
    if full.seconds is not None and full.seconds < LASTING_SECONDS:
        return False
    return full.preemptions > 0 and full.preemptions >= HURTING_PREEMPTIONS * full.finished


def _diagnose_small_cache(facts: Facts, pressed: PressedCache) -> CacheDiagnosis | None:
    """Return the diagnosis that the model is too large for the GPU.

    Returns None if FEWEST_REQUESTS requests of the usual size fit in the cache. Also returns None
    if the cache's capacity is unknown.
    """
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
    """Return the diagnosis that requests are longer than usual.

    Returns None if either size is unknown. Also returns None for requests below
    LARGER_REQUESTS_RATIO times the usual size.
    """
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
    """Return the diagnosis that concurrent requests repeatedly fill the cache."""
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
    """Return the diagnosis that too many requests run at the same time.

    The diagnosis applies if neither the model nor the requests are too large.
    """
    name = name_engine(facts, pressed.engine)
    now = " now" if facts.origin is FactsSource.PAGE else ""
    return CacheDiagnosis(
        cause=Cause.CONCURRENCY_MISJUDGED,
        summary=(
            f"More requests run at once than the KV cache of {name} holds{now}, and it preempts."
        ),
        changes=drop_none(take_more(facts), _run_fewer(facts, pressed), ADD_REPLICA),
    )


def _list_full_evidence(pressed: PressedCache) -> tuple[Figure, ...]:
    """Return the figures for a full cache: duration, preemptions, requests and capacity."""
    engine = pressed.engine
    full = pressed.full
    thrash = pressed.thrash
    if thrash is not None:
        return _list_thrash_evidence(engine, thrash)
    # A page only has counts since the engine's start and shows no duration.
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
    """Return the figures for a series of collapses, and the cache's capacity."""
    # `list_evidence` replaces {} with the formatted value; in f-strings the braces are doubled.
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
    """Return a limit on request length above the 99th percentile of tokens.

    `tokens` is the length of the requests that filled the cache. Returns None if the percentile is
    unknown. Also returns None if the limit would still allow these requests.
    """
    if engine.high_tokens is None:
        return None
    steps = ceil(LENGTH_MARGIN * engine.high_tokens / LENGTH_STEP_TOKENS)
    limit_tokens = steps * LENGTH_STEP_TOKENS
    if limit_tokens >= tokens:
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
    """Return a limit at which the running requests fill CONCURRENCY_KEPT_RATIO of the cache.

    A request's size is the tokens that it held while the cache was full. If the size or the
    capacity is unknown, the limit is CONCURRENCY_KEPT_RATIO of the number of requests that filled
    the cache. The largest number that ran without a preemption is not an upper bound. There may
    simply have been no further requests to run.

    Returns None if the limit is not below the current one.
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
        # During a series of collapses, samples may miss the highest cache usage. If samples miss
        # the highest usage, the number of tokens is too low.
        is_bounded = pressed.thrash is not None
        requests = min(requests, fitting_requests) if is_bounded else fitting_requests
    cost = "the rest waits in the queue, where no work is lost; a restart"
    return lower_option(facts, Flag.MAX_NUM_SEQS, requests, text, cost)


def _measure_capacity(engine: EngineFacts) -> tuple[str, float | None, str]:
    """Return the cache's capacity as a figure for `list_evidence`."""
    in_bytes = ""
    if engine.capacity_bytes is not None:
        in_bytes = f", {format_size(engine.capacity_bytes)}"
    return "capacity_tokens", engine.capacity_tokens, f"the cache holds {{}} tokens{in_bytes}"


# A KV cache that is full without preemptions, on a GPU with unused memory.

UNUSED_RATIO: Final = 0.15
"""Our choice: memory is unused if this share of each GPU was always free. With less free memory, a
full cache and waiting requests are normal.
"""


def find_unused_memory(facts: Facts) -> Advice | None:
    """Judge memory that was never used although the cache was full.

    Requests waited because of the full cache. The rule applies if a full cache made requests wait
    for at least LASTING_SECONDS. In addition, UNUSED_RATIO of each GPU or more must always have
    been free. If requests are also preempted, `find_full_cache` judges them instead. The rule
    proposes giving the unused memory to the cache, or adding a replica. Returns None if the rule
    does not apply.
    """
    larger_share = take_more(facts)
    room_bytes = facts.least_room_bytes or 0.0
    if larger_share is None or find_pressed(facts) is not None:
        return None
    if room_bytes < UNUSED_RATIO * (facts.usable_bytes or 0.0):
        return None
    # The engines share the GPUs. The rule applies even if only one engine has waiting requests.
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


# A KV cache that has room even though requests wait.

CONCURRENCY_FACTOR_LIMIT: Final = 2.0
"""Our choice: the limit on running requests is raised by at most this factor. vLLM's default for
large cards is allowed even if it is higher. Each sequence also takes sampler memory.
"""

CACHE_FILL_RATIO: Final = 0.8
"""Our choice: a raised limit on running requests may fill this cache share."""


def find_too_few_requests(facts: Facts) -> Advice | None:
    """Judge a limit on running requests that leaves the KV cache unused.

    The rule applies if requests waited for at least LASTING_SECONDS while the cache had room.
    During that time, the number of running requests must have stayed the same. More requests also
    take more memory outside the cache. Therefore, the rule does not apply if any peak left less
    than AIM_BYTES. Nor does it apply if another rank preempts requests. The proposed limit would
    use CACHE_FILL_RATIO of the cache. The limit is computed from the tokens that running requests
    held. Returns None if the rule does not apply.
    """
    room_bytes = facts.least_room_bytes
    if room_bytes is None or room_bytes < AIM_BYTES:
        return None
    if find_pressed(facts) is not None or has_run_short(facts):
        return None
    for engine in facts.engines:
        if engine.capped is None:
            continue
        # All engines of a server share one limit, so the first advice is enough.
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
    """Return a higher limit on running requests that would use more of the cache.

    Returns None in three cases:

    - Requests did not wait long enough.
    - Something other than the limit made them wait.
    - A higher limit would fill the cache.
    """
    now = facts.settings.max_num_seqs
    # If fewer requests ran than the limit allows, something else is holding requests back.
    if capped.seconds < LASTING_SECONDS or (now is not None and now > capped.running):
        return None
    if not capped.kv_used_ratio:
        # If requests take up no space in the cache, no limit can be computed.
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
    """Return the figures that show a limit on running requests."""
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
"""Below this hit ratio, prefix cache lookups cost about what they save. See alert
HeadroomPrefixCacheNotPaying.
"""

PREFIX_SECONDS: Final = 6 * HOUR_SECONDS
"""A prefix cache is judged only after this much time with traffic. See alert
HeadroomPrefixCacheNotPaying.
"""

PREFIX_TOKENS_PER_SECOND: Final = 100.0
"""A prefix cache is judged only if it looks up this many tokens per second. With less traffic,
there is little to gain (alert HeadroomPrefixCacheNotPaying).
"""

BLOCKED_RATIO: Final = 0.05
"""Our choice: requests may wait for at most this share of the time. Otherwise, the hit ratio of the
prefix cache is meaningless.

Before version 0.27, vLLM repeats the lookup of a waiting request in each step
(vllm-project/vllm#43736).
"""


def find_poor_prefix_cache(facts: Facts) -> Advice | None:
    """Judge a prefix cache that rarely hits.

    The rule applies if fewer than PAYING_RATIO of the looked-up tokens were cached. In addition, at
    least PREFIX_TOKENS_PER_SECOND must have been looked up over PREFIX_SECONDS. The rule proposes
    prompts with a common beginning. The alternative is to turn off the prefix cache, which saves
    the lookups. Returns None if the rule does not apply.
    """
    for engine in facts.engines:
        judgement = judge_prefix_cache(facts, engine)
        if isinstance(judgement, Advice):
            return judgement
    return None


def judge_prefix_cache(facts: Facts, engine: EngineFacts) -> Advice | str | None:
    """Return advice on a prefix cache that rarely hits.

    If the cache cannot be judged, a text explains why. Returns None if the cache hits often enough
    or its figures are unknown. Also returns None if there is too little traffic to gain anything.
    The counts on a page cover the time since the engine's start. Therefore, the ratio of the last
    five minutes must also be low.
    """
    prefix = engine.prefix
    if prefix is None or not _hits_rarely(prefix):
        return None
    # A page does not show how long the engine has been counting. The longest possible time is used,
    # at a rate of PREFIX_TOKENS_PER_SECOND.
    judged_seconds = prefix.seconds
    if judged_seconds is None:
        judged_seconds = prefix.queries / PREFIX_TOKENS_PER_SECOND
    elif prefix.queries < PREFIX_TOKENS_PER_SECOND * judged_seconds:
        return None
    if judged_seconds < PREFIX_SECONDS:
        needed = format_duration(PREFIX_SECONDS)
        return f"Too little was looked up in the prefix cache to judge it: {needed} of traffic do."
    # Before this version, vLLM repeated the lookup of a waiting request in each step.
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
    """Return whether the hit ratio is low.

    For a page, the recent ratio must also be low.
    """
    if prefix.recent_ratio is not None and prefix.recent_ratio >= PAYING_RATIO:
        return False
    return prefix.hits < PAYING_RATIO * prefix.queries


def _list_prefix_evidence(prefix: PrefixFacts) -> tuple[Figure, ...]:
    """Return the figures for a prefix cache.

    If the recent ratio is unknown, it is omitted.
    """
    hit_ratio = prefix.hits / prefix.queries
    # If the ratio is unknown, `list_evidence` leaves out the figure and its text.
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
