"""All rules asked of the facts: what fits, what may be advised of it, and what cannot be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.units import duration, instant
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.advise.facts import (
    PREFIX_SECONDS,
    SHORTEST_SECONDS,
    STALE_SECONDS,
    EngineFacts,
    Facts,
    Leak,
    Origin,
)
from vllm_headroom_tools.advise.finding import Advice, called
from vllm_headroom_tools.advise.rules.capacity import (
    believed,
    busy,
    enough,
    full_cache,
    prefix_cache,
    rarely_hits,
    too_few_requests,
)
from vllm_headroom_tools.advise.rules.leaks import (
    burst,
    chronic,
    configuration_overshoot,
    gpu_leak,
    host_leak,
    kv_block_leak,
)
from vllm_headroom_tools.advise.rules.starts import (
    another_tenant,
    crash,
    failing_starts,
    host_memory_short,
    left_behind,
    sudden,
)
from vllm_headroom_tools.advise.settings import FIRST, NEWEST, Flag, spelt
from vllm_headroom_tools.conclusion import Conclusion

Rule = Callable[[Facts], Advice | None]

LEAKS: Final[tuple[Rule, ...]] = (gpu_leak, host_leak)
EVEN_WITH_A_LEAK: Final[tuple[Rule, ...]] = (left_behind, another_tenant, failing_starts, kv_block_leak)
"""What fits whether the engine leaks or not, but without a figure for an option: that would be the leak's."""

WITHOUT_A_LEAK: Final[tuple[Rule, ...]] = (
    crash,
    host_memory_short,
    configuration_overshoot,
    chronic,
    burst,
    full_cache,
    too_few_requests,
    prefix_cache,
)
"""In the order in which they are told: what can end the engine before what makes it slow."""

NOTHING_ELSE: Final = (
    "No option is advised from what a leaking or growing engine shows: its figures are those of the growth."
    " Look again at a trace from after the restart."
)


class Assessment(Struct, frozen=True, kw_only=True):
    """What is said; `missing` is what would have to be known to call it healthy, `notes` what else to know."""

    verdict: Conclusion
    facts: Facts
    advice: tuple[Advice, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def judge(facts: Facts) -> Assessment:
    """Ask every rule; nothing to change is said only where nothing that matters is unknown."""
    leaks = (*(gpu.leak for gpu in facts.gpus), *(host.leak for host in facts.hosts))
    growing = any(leak.alarm or leak.state in (LeakState.GROWING, LeakState.LEAKING) for leak in leaks)
    found = _ask(LEAKS, facts)
    always = _ask(EVEN_WITH_A_LEAK, facts)
    if growing:
        found += [replace(each, changes=tuple(change for change in each.changes if not change.flag)) for each in always]
    else:
        found += always + _ask(WITHOUT_A_LEAK, facts)
    advice, left_out = _that_exist(found, facts)
    unknown = tuple(missing(facts))
    verdict = Conclusion.NOT_GOOD if advice else Conclusion.CANNOT_TELL if unknown else Conclusion.GOOD
    told = (*((NOTHING_ELSE,) if growing else ()), *left_out, *notes(facts, advice))
    return Assessment(verdict=verdict, facts=facts, advice=advice, missing=unknown, notes=told)


def _ask(rules: tuple[Rule, ...], facts: Facts) -> list[Advice]:
    return [advice for advice in (rule(facts) for rule in rules) if advice is not None]


def _that_exist(found: list[Advice], facts: Facts) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """Leave out the options that this version may not have, and say which and why."""
    known, advice = facts.settings.known, []
    absent: dict[Flag, None] = {}
    for each in found:
        absent |= {
            change.flag: None for change in each.changes if change.flag is not None and FIRST[change.flag] > known
        }
        changes = tuple(change for change in each.changes if change.flag is None or change.flag not in absent)
        advice.append(replace(each, changes=changes))
    return tuple(advice), tuple(_left_out(flag, facts) for flag in absent)


def _left_out(flag: Flag, facts: Facts) -> str:
    """Say what is left out without the dashes: it is not there to be copied."""
    version, name, first = facts.settings.version, flag.removeprefix("--"), spelt(FIRST[flag])
    if version is not None:
        return f"Left out: {name} is no option of vLLM {spelt(version)}; {first} is the first that has it."
    return (
        f"Left out: {name}, which vLLM has since {first}, because this may be an older one; --vllm-version says which."
    )


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
