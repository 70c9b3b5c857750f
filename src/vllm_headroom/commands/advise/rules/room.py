"""Changes of how much of a GPU vLLM takes when it starts.

A lower utilization leaves more outside vLLM's budget and makes the KV cache smaller by as much; a higher one is the
reverse. With kv_cache_memory_bytes set, vLLM takes no notice of the utilization (vllm/v1/worker/gpu_worker.py, 0.10.2).
"""

from __future__ import annotations

from math import ceil, floor
from typing import Final

from vllm_headroom.commands.advise.facts import Facts, GpuFacts, Origin
from vllm_headroom.commands.advise.finding import Change
from vllm_headroom.commands.advise.limits import AIM_BYTES, HIGHEST_UTILIZATION, USUAL_SECONDS
from vllm_headroom.commands.advise.settings import Flag
from vllm_headroom.units import MIB, size

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
