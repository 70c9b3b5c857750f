"""What is not known: what stands in the way of calling an engine healthy, and what else to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from vllm_headroom.commands.advise.engine_facts import EngineFacts
from vllm_headroom.commands.advise.facts import Facts, Leak, Origin
from vllm_headroom.commands.advise.finding import Advice, called
from vllm_headroom.commands.advise.limits import PREFIX_SECONDS, SHORTEST_SECONDS, STALE_SECONDS
from vllm_headroom.commands.advise.rules.crash import crash, sudden
from vllm_headroom.commands.advise.rules.prefix import believed, busy, enough, rarely_hits
from vllm_headroom.commands.advise.settings import NEWEST, Flag, spelt
from vllm_headroom.units import duration, instant
from vllm_headroom.vocabulary import LeakState

WHY: Final = {
    LeakState.UNKNOWN: "what the engine holds is not known, or whether it works",
    LeakState.WARMING_UP: "the leak detector is warming up: look again after an hour of work at the most",
    LeakState.GROWING: "it grows, and whether that is a leak shows within hours: look again",
    LeakState.ASLEEP: "the engine sleeps",
}
"""The states that leave it open whether it leaks; `unsettled` is load that moves, and nothing that grows."""

A_MOMENT: Final = (
    "One page is a moment: earlier ends of the engine and bursts, the size of requests and hit ratios over hours need"
    " a trace (HEADROOM_TRACE_FILE)."
)
BETWEEN_SAMPLES: Final = "A peak between two samples is not judged here; headroom_gpu_memory_used_peak_bytes has it."
ENDED: Final = "a restart that was meant, or a crash, of which vLLM's log tells."
SET_NOW: Final = (
    "What is set now is not in this trace: --engine-url, or the option of that name, makes values of the differences."
)


def missing(facts: Facts) -> Iterator[str]:
    """Yield what has to be known before it can be said that there is nothing to change."""
    if facts.age_seconds is not None and facts.age_seconds > STALE_SECONDS:
        yield f"the page is {duration(facts.age_seconds)} old: the sidecar has stopped sampling"
    if facts.origin is Origin.TRACE and facts.span_seconds < SHORTEST_SECONDS:
        yield f"a longer history: there are {duration(facts.span_seconds)} of it, and an hour is the least"
    if not facts.gpus:
        yield "memory of the engine's GPUs: none was read that is known to be the engine's"
    for gpu in facts.gpus:
        if gpu.least_room_bytes is None:
            yield f"{gpu.called}: its memory was not read"
        yield from _of_leak(gpu.called, gpu.leak)
    for host in facts.hosts:
        if host.leak.state is not LeakState.UNKNOWN:
            yield from _of_leak(f"host memory of {host.process}", host.leak)
    yield from _of_engines(facts)


def _of_engines(facts: Facts) -> Iterator[str]:
    if not facts.engines:
        yield "the engine's own page: it was not read"
    elif not any(engine.most_running or engine.finished for engine in facts.engines):
        yield "work: no request ran, and what load would do is not known"
    for engine in facts.engines:
        if not engine.kv_known:
            yield f"{called(facts, engine)}: how much of its KV cache is in use is not known"
        if not engine.preemptions_known:
            yield f"{called(facts, engine)}: its preemptions are not known"


def _of_leak(name: str, leak: Leak) -> Iterator[str]:
    if leak.state in WHY:
        yield f"{name}: {WHY[leak.state]}"


def notes(facts: Facts, advice: Iterable[Advice]) -> tuple[str, ...]:
    """Return what else to know of the answer."""
    changes = [change for each in advice for change in each.changes]
    told = [A_MOMENT] if facts.origin is Origin.PAGE else [] if changes else [BETWEEN_SAMPLES]
    if facts.since_seconds is not None:
        told.insert(
            0, f"Judged since {instant(facts.since_seconds)}, when the KV cache was of another size for the first time."
        )
    if any(change.difference is not None for change in changes):
        told.append(SET_NOW)
    endings = sudden(facts)
    if endings and crash(facts) is None:
        left = "" if endings[0].room_bytes is None else ", with memory left"
        told.append(f"The engine ended at {instant(endings[0].seconds)} while requests ran{left}: {ENDED}")
    if not facts.hosts:
        told.append("The engine's processes were not seen, so that host memory is not judged.")
    told += {note: None for engine in facts.engines if (note := _prefix_note(facts, engine)) is not None}
    version = facts.settings.version
    if version is not None and version > NEWEST and any(isinstance(change.flag, Flag) for change in changes):
        told.append(f"vLLM {spelt(version)} is newer than {spelt(NEWEST)}, the newest whose options were looked at.")
    return tuple(told)


def _prefix_note(facts: Facts, engine: EngineFacts) -> str | None:
    """Say why a prefix cache that seems to hit rarely is not judged; None where it is, or there is nothing to win."""
    prefix = engine.prefix
    if prefix is None or not rarely_hits(prefix) or not busy(prefix):
        return None
    if not enough(prefix):
        return f"Too little was looked up in the prefix cache to judge it: {duration(PREFIX_SECONDS)} of traffic do."
    if not believed(facts, prefix):
        return (
            "The prefix cache's low share of hits is not to be believed: before vLLM 0.27 requests that wait are"
            " counted again in each step."
        )
    return None
