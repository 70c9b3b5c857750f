"""What a rule says: a cause, the figures that show it as people read them, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from math import isinf

from msgspec import Struct

from vllm_headroom_tools.advise.facts import EngineFacts, Facts
from vllm_headroom_tools.advise.settings import Flag


class Cause(StrEnum):
    """The known causes; a closed set, for scripts."""

    GPU_LEAK = "gpu_leak"
    HOST_LEAK = "host_leak"
    CRASH = "crash"
    LEFT_BEHIND = "left_behind"
    ANOTHER_TENANT = "another_tenant"
    START_UP = "start_up"
    MODEL_DOES_NOT_FIT = "model_does_not_fit"
    CONFIGURATION_OVERSHOOT = "configuration_overshoot"
    CHRONIC = "chronic"
    BURST = "burst"
    KV_CACHE_BLOW_OUT = "kv_cache_blow_out"
    CONCURRENCY_MISJUDGED = "concurrency_misjudged"
    PREFIX_CACHE = "prefix_cache"
    KV_BLOCK_LEAK = "kv_block_leak"
    HOST_MEMORY = "host_memory"


class Evidence(Struct, frozen=True):
    """One figure that shows a cause; `name` ends in its unit, `text` says it to people."""

    name: str
    value: float | str
    text: str


class Change(Struct, frozen=True, kw_only=True):
    """One thing to do, and what it costs.

    With a `flag`, `value` is what to set it to (None for one that takes none). Where what is set now is not known and
    the value depends on it, `difference` is by how much to change it. `now` is what is set, None where not known.
    """

    text: str
    cost: str
    flag: Flag | None = None
    value: float | None = None
    difference: float | None = None
    now: float | None = None


class Advice(Struct, frozen=True, kw_only=True):
    """A cause that fits; `changes` come in the order of least cost, `remark` is what is easily mixed up."""

    cause: Cause
    summary: str
    evidence: tuple[Evidence, ...]
    changes: tuple[Change, ...]
    remark: str | None = None


def lowered(facts: Facts, flag: Flag, value: float, *, text: str, cost: str) -> Change | None:
    """Return an option with a lower value; None where that is none, or not lower than what is set now."""
    now = facts.settings.now(flag)
    if value <= 0 or (now is not None and value >= now):
        return None
    return Change(flag=flag, value=value, now=now, text=text, cost=cost)


def several(*changes: Change | None) -> tuple[Change, ...]:
    """Return those there are."""
    return tuple(change for change in changes if change is not None)


def count(value: float) -> str:
    """Return a count with its thousands set apart."""
    return f"{value:,.0f}"


def percent(ratio: float) -> str:
    """Return a ratio in percent."""
    return f"{100 * ratio:.3g} %"


def per_request(preemptions: float, finished: float) -> str:
    """Return preemptions for each finished request, where any finished."""
    ratio = preemptions / finished if finished else float("inf")
    return f"{count(preemptions)} and no request finished" if isinf(ratio) else f"{ratio:.2g} for each finished request"


def called(facts: Facts, engine: EngineFacts) -> str:
    """Return what an engine is called: its model, and its rank where there are several."""
    return f"{engine.model_name}, engine {engine.engine}" if len(facts.engines) > 1 else engine.model_name
