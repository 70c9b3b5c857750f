"""Rules on the KV cache: it lies in what vLLM took at its start, so that full means waiting and never out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor
from typing import Final

from vllm_headroom.commands.advise.engine_facts import EngineFacts, FullFacts
from vllm_headroom.commands.advise.facts import Facts, Origin
from vllm_headroom.commands.advise.finding import (
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
from vllm_headroom.commands.advise.limits import (
    FEWEST_REQUESTS,
    FULL_RATIO,
    HURTING_PREEMPTIONS,
    LARGER_REQUESTS,
    LASTING_SECONDS,
)
from vllm_headroom.commands.advise.rules.room import take_more
from vllm_headroom.commands.advise.settings import Flag
from vllm_headroom.units import duration, size

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
    evidence = tuple(_evidence(engine, full))
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


def _evidence(engine: EngineFacts, full: FullFacts) -> Iterator[Evidence]:
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
