"""The findings of a rule: a cause, its evidence, and what to change."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.units import format_duration, format_size
from vllm_headroom.vocabulary import LogFailureKind
from vllm_headroom_tools.advise.facts import EngineFacts, Facts
from vllm_headroom_tools.advise.settings import Flag


class Cause(StrEnum):
    """The known causes. Scripts can rely on this set, because advice names no other causes."""

    GPU_LEAK = "gpu_leak"
    HOST_LEAK = "host_leak"
    CRASH = "crash"
    LEFT_BEHIND = "left_behind"
    ANOTHER_TENANT = "another_tenant"
    START_UP = "start_up"
    MODEL_DOES_NOT_FIT = "model_does_not_fit"
    OVER_BUDGET = "over_budget"
    CONFIGURATION_OVERSHOOT = "configuration_overshoot"
    CHRONIC = "chronic"
    UNUSED_MEMORY = "unused_memory"
    BURST = "burst"
    PEAK = "peak"
    KV_CACHE_THRASHING = "kv_cache_thrashing"
    KV_CACHE_BLOW_OUT = "kv_cache_blow_out"
    CONCURRENCY_MISJUDGED = "concurrency_misjudged"
    PREFIX_CACHE = "prefix_cache"
    KV_BLOCK_LEAK = "kv_block_leak"
    HOST_MEMORY = "host_memory"


class Figure(Struct, frozen=True):
    """One figure that supports a cause; `name` ends in the figure's unit."""

    name: str
    value: float | str
    text: str


class Change(Struct, frozen=True, kw_only=True):
    """One recommended change, why it helps, and what it costs."""

    # The option to change, or None if the change does not involve an option.
    flag: Flag | None = None
    # The new value of `flag`, or None for a flag that takes no value.
    value: float | None = None
    # The amount by which to change `flag`. The difference is given instead of `value` if the
    # current value is not known.
    difference: float | None = None
    # The current value of `flag`, or None if it is unknown.
    now: float | None = None
    text: str
    cost: str


class Advice(Struct, frozen=True, kw_only=True):
    """A cause that fits the facts, with the changes that address it."""

    # The cause or, for an engine log, the failure that the log shows.
    cause: Cause | LogFailureKind
    summary: str
    evidence: tuple[Figure, ...]
    # The changes, cheapest first.
    changes: tuple[Change, ...]
    # A sentence that explains how to distinguish the cause from a similar one.
    remark: str | None = None


def format_percent(ratio: float) -> str:
    """Return a ratio as a percentage with three significant digits."""
    return f"{100 * ratio:.3g} %"


FORMATS: Final = {
    "bytes": format_size,
    "second": format_size,
    "seconds": format_duration,
    "ratio": format_percent,
}
"""The functions that format figures. A figure's format depends on its unit, the last word of its
name. The unit "second" means bytes per second. Figures with any other unit are shown as plain
numbers.
"""

LOWER_BOUND: Final = "_lower"
"""If a figure is a lower bound, its name has this suffix after the unit."""


def list_evidence(*figures: tuple[str, float | str | None, str]) -> tuple[Figure, ...]:
    """Return the known figures as evidence.

    Each figure is a name, a value and a text. In the text, {} is replaced by the formatted value.
    Figures whose value is None are unknown and are omitted.
    """
    evidence = []
    for name, value, text in figures:
        if value is None:
            continue
        if not isinstance(value, str):
            unit = name.removesuffix(LOWER_BOUND).rpartition("_")[2]
            format_value = FORMATS.get(unit, "{:,.0f}".format)
            text = text.replace("{}", format_value(value))  # noqa: PLW2901 - the text as it is shown
        evidence.append(Figure(name, value, text))
    return tuple(evidence)


def lower_option(facts: Facts, flag: Flag, value: float, text: str, cost: str) -> Change | None:
    """Return the change that lowers an option to a value.

    Returns None if the value is 0 or less. Also returns None unless it is below the current value.
    """
    now = facts.settings.read_value(flag)
    if value <= 0 or (now is not None and value >= now):
        return None
    return Change(flag=flag, value=value, now=now, text=text, cost=cost)


def drop_none(*changes: Change | None) -> tuple[Change, ...]:
    """Return the changes that are not None."""
    return tuple(change for change in changes if change is not None)


def name_engine(facts: Facts, engine: EngineFacts) -> str:
    """Return the name of an engine's model.

    If there are several engines, the name includes the rank.
    """
    if len(facts.engines) > 1:
        return f"{engine.model_name}, engine {engine.engine}"
    return engine.model_name
