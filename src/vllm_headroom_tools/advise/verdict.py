"""All rules asked of the facts: what fits, what may be advised of it, and what cannot be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.units import format_duration, format_instant
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
from vllm_headroom_tools.advise.finding import Advice, name_engine
from vllm_headroom_tools.advise.rules.capacity import (
    find_full_cache,
    find_poor_prefix_cache,
    find_too_few_requests,
    has_enough_lookups,
    has_few_hits,
    has_reliable_counts,
    is_busy,
)
from vllm_headroom_tools.advise.rules.leaks import (
    find_burst,
    find_chronic_shortage,
    find_configuration_overshoot,
    find_gpu_leak,
    find_host_leak,
    find_kv_block_leak,
)
from vllm_headroom_tools.advise.rules.starts import (
    find_crash,
    find_failing_starts,
    find_host_shortage,
    find_leftovers,
    find_other_tenant,
    find_sudden_ends,
)
from vllm_headroom_tools.advise.settings import FIRST_VERSIONS, NEWEST, Flag, format_version
from vllm_headroom_tools.conclusion import Conclusion

Rule = Callable[[Facts], Advice | None]

LEAKS: Final[tuple[Rule, ...]] = (find_gpu_leak, find_host_leak)
EVEN_WITH_A_LEAK: Final[tuple[Rule, ...]] = (find_leftovers, find_other_tenant, find_failing_starts, find_kv_block_leak)
"""What fits whether the engine leaks or not, but without a figure for an option: that would be the leak's."""

WITHOUT_A_LEAK: Final[tuple[Rule, ...]] = (
    find_crash,
    find_host_shortage,
    find_configuration_overshoot,
    find_chronic_shortage,
    find_burst,
    find_full_cache,
    find_too_few_requests,
    find_poor_prefix_cache,
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
    found = _apply_rules(LEAKS, facts)
    always = _apply_rules(EVEN_WITH_A_LEAK, facts)
    if growing:
        found += [replace(each, changes=tuple(change for change in each.changes if not change.flag)) for each in always]
    else:
        found += always + _apply_rules(WITHOUT_A_LEAK, facts)
    advice, left_out = _drop_absent_options(found, facts)
    unknown = tuple(list_missing(facts))
    verdict = Conclusion.NOT_GOOD if advice else Conclusion.CANNOT_TELL if unknown else Conclusion.GOOD
    told = (*((NOTHING_ELSE,) if growing else ()), *left_out, *list_notes(facts, advice))
    return Assessment(verdict=verdict, facts=facts, advice=advice, missing=unknown, notes=told)


def _apply_rules(rules: tuple[Rule, ...], facts: Facts) -> list[Advice]:
    return [advice for advice in (rule(facts) for rule in rules) if advice is not None]


def _drop_absent_options(found: list[Advice], facts: Facts) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """Leave out the options that this version may not have, and say which and why."""
    known, advice = facts.settings.known, []
    absent: dict[Flag, None] = {}
    for each in found:
        absent |= {
            change.flag: None
            for change in each.changes
            if change.flag is not None and FIRST_VERSIONS[change.flag] > known
        }
        changes = tuple(change for change in each.changes if change.flag is None or change.flag not in absent)
        advice.append(replace(each, changes=changes))
    return tuple(advice), tuple(_explain_left_out(flag, facts) for flag in absent)


def _explain_left_out(flag: Flag, facts: Facts) -> str:
    """Say what is left out without the dashes: it is not there to be copied."""
    version, name, first = facts.settings.version, flag.removeprefix("--"), format_version(FIRST_VERSIONS[flag])
    if version is not None:
        return f"Left out: {name} is no option of vLLM {format_version(version)}; {first} is the first that has it."
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


def list_missing(facts: Facts) -> Iterator[str]:
    """Yield what has to be known before it can be said that there is nothing to change."""
    if facts.age_seconds is not None and facts.age_seconds > STALE_SECONDS:
        yield f"the page is {format_duration(facts.age_seconds)} old: the sidecar has stopped sampling"
    if facts.origin is Origin.TRACE and facts.span_seconds < SHORTEST_SECONDS:
        yield f"a longer history: there are {format_duration(facts.span_seconds)} of it, and an hour is the least"
    if not facts.gpus:
        yield "memory of the engine's GPUs: none was read that is known to be the engine's"
    for gpu in facts.gpus:
        if gpu.least_room_bytes is None:
            yield f"{gpu.called}: its memory was not read"
        yield from _explain_leak(gpu.called, gpu.leak)
    for host in facts.hosts:
        if host.leak.state is not LeakState.UNKNOWN:
            yield from _explain_leak(f"host memory of {host.process}", host.leak)
    yield from _list_missing_of_engines(facts)


def _list_missing_of_engines(facts: Facts) -> Iterator[str]:
    if not facts.engines:
        yield "the engine's own page: it was not read"
    elif not any(engine.most_running or engine.finished for engine in facts.engines):
        yield "work: no request ran, and what load would do is not known"
    for engine in facts.engines:
        if not engine.kv_known:
            yield f"{name_engine(facts, engine)}: how much of its KV cache is in use is not known"
        if not engine.preemptions_known:
            yield f"{name_engine(facts, engine)}: its preemptions are not known"


def _explain_leak(name: str, leak: Leak) -> Iterator[str]:
    if leak.state in WHY:
        yield f"{name}: {WHY[leak.state]}"


def list_notes(facts: Facts, advice: Iterable[Advice]) -> tuple[str, ...]:
    """Return what else to know of the answer."""
    changes = [change for each in advice for change in each.changes]
    told = [A_MOMENT] if facts.origin is Origin.PAGE else [] if changes else [BETWEEN_SAMPLES]
    if facts.since_seconds is not None:
        told.insert(
            0,
            f"Judged since {format_instant(facts.since_seconds)}, when the KV cache was of another"
            f" size for the first time.",
        )
    if any(change.difference is not None for change in changes):
        told.append(SET_NOW)
    endings = find_sudden_ends(facts)
    if endings and find_crash(facts) is None:
        left = "" if endings[0].room_bytes is None else ", with memory left"
        told.append(f"The engine ended at {format_instant(endings[0].seconds)} while requests ran{left}: {ENDED}")
    if not facts.hosts:
        told.append("The engine's processes were not seen, so that host memory is not judged.")
    told += {note: None for engine in facts.engines if (note := _explain_prefix_cache(facts, engine)) is not None}
    version = facts.settings.version
    if version is not None and version > NEWEST and any(isinstance(change.flag, Flag) for change in changes):
        told.append(
            f"vLLM {format_version(version)} is newer than {format_version(NEWEST)}, the newest"
            f" whose options were looked at."
        )
    return tuple(told)


def _explain_prefix_cache(facts: Facts, engine: EngineFacts) -> str | None:
    """Say why a prefix cache that seems to hit rarely is not judged; None where it is, or there is nothing to win."""
    prefix = engine.prefix
    if prefix is None or not has_few_hits(prefix) or not is_busy(prefix):
        return None
    if not has_enough_lookups(prefix):
        return (
            f"Too little was looked up in the prefix cache to judge it:"
            f" {format_duration(PREFIX_SECONDS)} of traffic do."
        )
    if not has_reliable_counts(facts, prefix):
        return (
            "The prefix cache's low share of hits is not to be believed: before vLLM 0.27 requests that wait are"
            " counted again in each step."
        )
    return None
