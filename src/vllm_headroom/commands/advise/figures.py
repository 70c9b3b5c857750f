"""The figures of an answer as people read them."""

from __future__ import annotations

from math import isinf

from vllm_headroom.commands.advise.facts import EngineFacts, Facts
from vllm_headroom.units import GIB, MIB


def memory(n_bytes: float) -> str:
    """Return bytes in MiB below one GiB, else in GiB, as vLLM and nvidia-smi show them."""
    return f"{n_bytes / MIB:.0f} MiB" if abs(n_bytes) < GIB else f"{n_bytes / GIB:.1f} GiB"


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
