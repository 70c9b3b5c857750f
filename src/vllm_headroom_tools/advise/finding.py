"""The findings of a rule: a cause, its evidence, and what to change."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.units import format_duration, format_size
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
    UNUSED_MEMORY = "unused_memory"
    BURST = "burst"
    KV_CACHE_BLOW_OUT = "kv_cache_blow_out"
    CONCURRENCY_MISJUDGED = "concurrency_misjudged"
    PREFIX_CACHE = "prefix_cache"
    KV_BLOCK_LEAK = "kv_block_leak"
    HOST_MEMORY = "host_memory"


class Evidence(Struct, frozen=True):
    """One figure that shows a cause; `name` ends in its unit."""

    name: str
    value: float | str
    text: str


class Change(Struct, frozen=True, kw_only=True):
    """One thing to do, and what it costs.

    `value` is the new value of `flag`, None for a flag without one; `difference` replaces it where it depends on the
    current value `now`, which is unknown.
    """

    flag: Flag | None = None
    value: float | None = None
    difference: float | None = None
    now: float | None = None
    text: str
    cost: str


class Advice(Struct, frozen=True, kw_only=True):
    """A cause that fits; `changes` are in the order of their cost, `remark` prevents a mix-up."""

    cause: Cause
    summary: str
    evidence: tuple[Evidence, ...]
    changes: tuple[Change, ...]
    remark: str | None = None


def format_percent(ratio: float) -> str:
    """Format a ratio in percent."""
    return f"{100 * ratio:.3g} %"


FORMATS: Final = {
    "bytes": format_size,
    "second": format_size,
    "seconds": format_duration,
    "ratio": format_percent,
}
"""How a figure is shown, by the unit that its name ends in; others are numbers."""


def list_evidence(*figures: tuple[str, float | str | None, str]) -> tuple[Evidence, ...]:
    """Return the evidence of the figures that are known, with the figure in place of {} in its text."""
    found = []
    for name, value, text in figures:
        if value is not None:
            shown = FORMATS.get(name.rpartition("_")[2], "{:,.0f}".format)
            found.append(
                Evidence(
                    name,
                    value,
                    text if isinstance(value, str) else text.replace("{}", shown(value)),
                )
            )
    return tuple(found)


def lower_option(facts: Facts, flag: Flag, value: float, text: str, cost: str) -> Change | None:
    """Return an option with a lower value; None where it is not lower than the current one, or not above 0."""
    now: float | None = getattr(facts.settings, flag.removeprefix("--").replace("-", "_"))
    if value <= 0 or (now is not None and value >= now):
        return None
    return Change(flag=flag, value=value, now=now, text=text, cost=cost)


def drop_none(*changes: Change | None) -> tuple[Change, ...]:
    """Return the changes that exist."""
    return tuple(change for change in changes if change is not None)


def name_engine(facts: Facts, engine: EngineFacts) -> str:
    """Return the engine's model, with its rank where there are several."""
    return (
        f"{engine.model_name}, engine {engine.engine}"
        if len(facts.engines) > 1
        else engine.model_name
    )
