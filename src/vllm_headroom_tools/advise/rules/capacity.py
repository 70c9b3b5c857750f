"""Rules on the KV cache, which vLLM allocates at its start: a full one makes requests wait, not run out of memory."""

from collections.abc import Iterator
from math import ceil, floor
from typing import Final

from vllm_headroom.units import MIB, format_duration, format_size
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
)
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    Evidence,
    drop_none,
    format_percent,
    lower_option,
    name_engine,
)
from vllm_headroom_tools.advise.settings import Flag

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


def take_less(facts: Facts, gpu: GpuFacts, n_bytes: float) -> Change | None:
    """Return the change that leaves this much more of the GPU free; None where its size is unknown."""
    if not gpu.usable_bytes:
        return None
    text = f"leaves {format_size(n_bytes)} more outside of what vLLM takes at its start"
    cost = f"the KV cache of each GPU shrinks by about as much{_format_tokens(facts, n_bytes)}; a restart"
    if facts.settings.sizes_cache_in_bytes:
        return _change_bytes(facts, -ceil(n_bytes / MIB) * MIB, text, cost)
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
    """Return the change that gives the KV cache unused memory; None where none is sure to be spare.

    The room at the highest peak counts only after USUAL_SECONDS of a trace, less AIM_BYTES. Nothing is spare where
    memory ran short, at a start or later, or others took some.
    """
    least, usable = facts.least_room_bytes, [gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes]
    if facts.origin is Origin.PAGE or facts.span_seconds < USUAL_SECONDS or least is None or not usable:
        return None
    if facts.failed_starts or has_run_short(facts):
        return None
    spare = least - AIM_BYTES
    steps = floor(spare / max(usable) * 100)
    text = f"{format_size(least)} were left at the highest peak; at least {format_size(AIM_BYTES)} stay"
    cost = "less room for a burst larger than all so far; a restart"
    if spare <= 0 or steps < 1:
        return None
    if facts.settings.sizes_cache_in_bytes:
        return _change_bytes(facts, floor(spare / MIB) * MIB, text, cost)
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


def has_run_short(facts: Facts) -> bool:
    """Return whether memory ran short, or others took memory of the engine's GPUs."""
    return any(gpu.spells or (gpu.others and gpu.others.most) for gpu in facts.gpus)


def _change_bytes(facts: Facts, difference: int, text: str, cost: str) -> Change | None:
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


def _format_tokens(facts: Facts, n_bytes: float) -> str:
    """Return the share of the KV cache in tokens, where the bytes of a token are known."""
    for engine in facts.engines:
        if engine.capacity_bytes and engine.capacity_tokens:
            on_all = n_bytes * len(facts.gpus) / len(facts.engines)
            tokens = on_all / engine.capacity_bytes * engine.capacity_tokens
            if tokens < engine.capacity_tokens:
                return f" ({tokens:,.0f} of {engine.capacity_tokens:,.0f} tokens)"
    return ""


KEPT_RATIO: Final = 0.9
"""Ours: a tenth of the requests that filled the cache makes room for requests that grow."""

LENGTH_MARGIN: Final = 1.25
LENGTH_STEP: Final = 1024
"""Ours: a limit on the length of requests is a quarter above the 99th percentile, in steps of 1,024 tokens."""

REPLICA: Final = Change(text="Add a replica, or send part of the traffic elsewhere", cost="another GPU; no restart")
NOT_OUT_OF_MEMORY: Final = (
    "A full KV cache is slow, not out of memory. A lower share of the GPU for vLLM would make the cache smaller."
)
PressedEngine = tuple[EngineFacts, FullFacts]


def find_full_cache(facts: Facts) -> Advice | None:
    """Fit where the cache preempts: it is too small, requests are larger than usual, or too many run."""
    found = find_pressed(facts)
    if found is None:
        return None
    engine, full = found
    name, remark = name_engine(facts, engine), NOT_OUT_OF_MEMORY
    if _is_too_small(engine, full):
        cause, changes = Cause.MODEL_DOES_NOT_FIT, drop_none(take_more(facts), split_model(facts))
        summary = f"The model leaves too little of the GPU for the KV cache of {name}."
        remark = "vllm-headroom plan computes what fits with other weights, another KV cache type or more GPUs."
    elif _has_larger_requests(engine, full):
        cause = Cause.KV_CACHE_BLOW_OUT
        changes = drop_none(take_more(facts), _shorten_requests(facts, engine, full), REPLICA)
        summary = f"Requests that are longer than usual fill the KV cache of {name}, and it preempts."
    else:
        now = " now" if facts.origin is Origin.PAGE else ""
        cause = Cause.CONCURRENCY_MISJUDGED
        changes = drop_none(take_more(facts), _run_fewer(facts, engine, full), REPLICA)
        summary = f"More requests run at once than the KV cache of {name} holds{now}, and it preempts."
    evidence = tuple(_list_cache_evidence(engine, full))
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
        if engine.full is not None and engine.full.queued_seconds >= LASTING_SECONDS:
            return Advice(
                cause=Cause.UNUSED_MEMORY,
                summary=f"Requests wait for the KV cache of {name_engine(facts, engine)}, and GPU memory is unused.",
                evidence=tuple(_list_queue_evidence(facts, engine, engine.full)),
                changes=(more, REPLICA),
                remark=NOT_OUT_OF_MEMORY,
            )
    return None


def _list_queue_evidence(facts: Facts, engine: EngineFacts, full: FullFacts) -> Iterator[Evidence]:
    text = f"{full.waiting or 0:,.0f} requests waited with a full cache, for {format_duration(full.queued_seconds)}"
    yield Evidence("queued_seconds", full.queued_seconds, text)
    least = facts.least_room_bytes or 0.0
    yield Evidence("least_room_bytes", least, f"at least {format_size(least)} of each GPU were left all the time")
    yield from (each for each in _list_cache_evidence(engine, full) if each.name == "capacity_tokens")


def split_model(facts: Facts) -> Change | None:
    """Return the model spread over twice as many GPUs; None where the GPUs of an engine are not known."""
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


def find_pressed(facts: Facts) -> PressedEngine | None:
    """Return the engine with the most harmful preemptions per request while full, or None.

    In a trace they have to last for LASTING_SECONDS; a page has the present and the counts since the start.
    """
    hurt = [(engine, engine.full) for engine in facts.engines if engine.full is not None and _is_hurt(engine.full)]
    return max(hurt, key=lambda each: each[1].preemptions / max(1.0, each[1].finished), default=None)


def _is_hurt(full: FullFacts) -> bool:
    lasts = full.seconds is None or full.seconds >= LASTING_SECONDS
    return lasts and full.preemptions > 0 and full.preemptions >= HURTING_PREEMPTIONS * full.finished


def _has_larger_requests(engine: EngineFacts, full: FullFacts) -> bool:
    usual = engine.usual_tokens
    return full.tokens is not None and usual is not None and full.tokens >= LARGER_REQUESTS * usual


def _is_too_small(engine: EngineFacts, full: FullFacts) -> bool:
    usual = engine.usual_tokens if engine.usual_tokens is not None else full.tokens
    return bool(engine.capacity_tokens and usual) and (engine.capacity_tokens or 0) < FEWEST_REQUESTS * (usual or 0)


def _shorten_requests(facts: Facts, engine: EngineFacts, full: FullFacts) -> Change | None:
    """Return a limit above the 99th percentile of tokens per request; None where it would have no effect."""
    if engine.high_tokens is None or full.tokens is None:
        return None
    value = ceil(LENGTH_MARGIN * engine.high_tokens / LENGTH_STEP) * LENGTH_STEP
    if value >= full.tokens:
        return None
    return lower_option(
        facts,
        Flag.MAX_MODEL_LEN,
        value,
        text=f"while the cache was not full, running requests held {engine.high_tokens:,.0f} tokens each or fewer in"
        " 99 % of the time, on average",
        cost="longer requests are refused, and single ones may be longer than the average of those that run together:"
        " look at vllm:request_prompt_tokens first; a restart",
    )


def _run_fewer(facts: Facts, engine: EngineFacts, full: FullFacts) -> Change | None:
    """Return the load that ran without preemption, or KEPT_RATIO of what filled the cache if that is less."""
    value = floor(KEPT_RATIO * full.running)
    calm = engine.calm_running is not None and engine.calm_running < value + 1
    return lower_option(
        facts,
        Flag.MAX_NUM_SEQS,
        floor(engine.calm_running) if calm and engine.calm_running is not None else value,
        text="the most that ran without preemption" if calm else f"{100 * KEPT_RATIO:.3g} % of what fills the cache",
        cost="the rest waits in the queue, where no work is lost; a restart",
    )


def _list_cache_evidence(engine: EngineFacts, full: FullFacts) -> Iterator[Evidence]:
    lasted = "now" if full.seconds is None else f"for {format_duration(full.seconds)}"
    yield Evidence("full_seconds", full.seconds or 0.0, f"more than {format_percent(FULL_RATIO)} in use {lasted}")
    often = f"{full.preemptions:,.0f} and no request finished"
    if full.finished:
        often = f"{full.preemptions / full.finished:.2g} for each finished request"
    when = " since the engine's start" if full.seconds is None else " meanwhile"
    yield Evidence("preemptions", full.preemptions, f"preemptions{when}: {often}")
    yield Evidence("running", full.running, f"{full.running:,.0f} requests running then")
    if full.tokens is not None:
        usual = "" if engine.usual_tokens is None else f", {engine.usual_tokens:,.0f} usually"
        text = f"{full.tokens:,.0f} tokens of the cache for each{usual}"
        yield Evidence("tokens_per_request", full.tokens, text)
    if engine.capacity_tokens is not None:
        in_bytes = "" if engine.capacity_bytes is None else f", {format_size(engine.capacity_bytes)}"
        text = f"the cache holds {engine.capacity_tokens:,.0f} tokens{in_bytes}"
        yield Evidence("capacity_tokens", engine.capacity_tokens, text)


MOST_RAISED: Final = 2.0
RAISED_RATIO: Final = 0.8
"""Ours: at most twice as many requests at once, and at most four fifths of the cache."""


def find_too_few_requests(facts: Facts) -> Advice | None:
    """Fit where requests waited for LASTING_SECONDS while the cache had room, always with the same number running.

    Not where a peak left less than AIM_BYTES, since more requests also take more memory outside of the cache, nor where
    the cache of another rank preempts.
    """
    least = facts.least_room_bytes
    if find_pressed(facts) is not None or has_run_short(facts):
        return None
    for engine in facts.engines:
        if engine.capped is None or engine.capped.seconds < LASTING_SECONDS or least is None or least < AIM_BYTES:
            continue
        change = _run_more(facts, engine.capped)
        if change is not None:
            return Advice(
                cause=Cause.CONCURRENCY_MISJUDGED,
                summary=f"Requests wait for {name_engine(facts, engine)} while its KV cache has room.",
                evidence=tuple(_list_cap_evidence(engine.capped)),
                changes=(change,),
            )
    return None


def _run_more(facts: Facts, capped: CappedFacts) -> Change | None:
    fitting = capped.running * RAISED_RATIO / capped.kv_used_ratio if capped.kv_used_ratio else float("inf")
    value, now = floor(min(MOST_RAISED * capped.running, fitting)), facts.settings.max_num_seqs
    if value <= capped.running or (now is not None and now > capped.running):
        return None
    return Change(
        flag=Flag.MAX_NUM_SEQS,
        value=value,
        now=now,
        text=f"would fill {format_percent(value / capped.running * capped.kv_used_ratio)} of the KV cache",
        cost="each answer comes a little slower; a restart",
    )


def _list_cap_evidence(capped: CappedFacts) -> Iterator[Evidence]:
    text = f"requests waited for {format_duration(capped.seconds)} with room in the KV cache"
    yield Evidence("waiting_seconds", capped.seconds, text)
    text = f"never more than {capped.running:,.0f} ran: probably the value of --max-num-seqs"
    yield Evidence("running", capped.running, text)
    used = capped.kv_used_ratio
    yield Evidence("kv_used_ratio", used, f"{format_percent(used)} of the KV cache in use meanwhile")
