"""The figures that a bug report needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from vllm_headroom.commands.postmortem.facts import Facts, GpuFacts
from vllm_headroom.commands.postmortem.known import Known, holders, probed
from vllm_headroom.model import EngineReading
from vllm_headroom.units import duration, instant, size

MOST_HOLDERS: Final = 16
Number = tuple[str, str]


def numbers(facts: Facts, known: Known) -> Iterator[Number]:
    """Yield names and values, without what is not known."""
    yield facts.what.value, instant(facts.seconds)
    if facts.reason is not None:
        yield "counted as", facts.reason.value
    if facts.began_seconds is not None:
        yield "this life seen for", duration(facts.seen_seconds)
    for engine in facts.engines:
        yield f"{engine.model_name} / {engine.engine}", ", ".join(_engine(engine)) or "says nothing of itself"
    for gpu in facts.gpus:
        yield f"GPU {gpu.index}", ", ".join(_gpu(gpu))
    yield from (("held by", each) for each in islice(holders(known), MOST_HOLDERS))
    yield from (("held by torch", each) for each in islice(probed(known), MOST_HOLDERS))
    if isinstance(known.get("version"), str):
        yield "vllm-headroom", known["version"]


def _engine(engine: EngineReading) -> Iterator[str]:
    counted = (
        ("running", engine.running),
        ("waiting", engine.waiting),
        ("finished", engine.finished_total),
        ("preemptions", engine.preemptions_total),
    )
    yield from (f"{value:.0f} {word}" for word, value in counted if value is not None)
    if engine.kv_used_ratio is not None:
        yield f"KV cache {100 * engine.kv_used_ratio:.0f} % used"
    if engine.kv_capacity_tokens is not None:
        yield f"of {engine.kv_capacity_tokens:,.0f} tokens"
    if engine.gpu_memory_utilization_ratio is not None:
        yield f"gpu_memory_utilization {engine.gpu_memory_utilization_ratio:.3g}"


def _gpu(gpu: GpuFacts) -> Iterator[str]:
    known = (
        ("in all", gpu.total_bytes),
        ("left at the least", gpu.last_room_bytes),
        ("left when this life began", gpu.first_room_bytes),
        ("held by the engine", gpu.last_engine_bytes),
        ("more than it began with", gpu.grown_bytes),
        ("held by others", gpu.last_other_bytes),
    )
    yield from (f"{size(max(0, n_bytes))} {word}" for word, n_bytes in known if n_bytes is not None)
    yield f"leak detector: {gpu.leak}"
