"""The verdict of all rules on the facts."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.units import (
    DAY_SECONDS,
    GIB,
    HOUR_SECONDS,
    format_duration,
    format_instant,
    format_size,
)
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.advise.facts import Facts, Leak, Origin, Shortage
from vllm_headroom_tools.advise.finding import Advice, format_percent, name_engine
from vllm_headroom_tools.advise.rules import capacity, leaks, starts
from vllm_headroom_tools.advise.settings import FIRST_VERSIONS, NEWEST
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.versions import format_version

SHORTEST_SECONDS: Final = HOUR_SECONDS
"""A shorter trace cannot show health: the leak detector takes an hour to be sure."""

APART_BYTES: Final = 2 * GIB
"""Ours: ranks of one engine differ by NCCL's buffers and late kernels, a few hundred MiB."""

WASTE_RATIO: Final = 0.2
"""Ours: a peak of a whole day that leaves four fifths of the cache unused."""

STALE_SECONDS: Final = 120.0
"""A page this old is not the present (alert HeadroomSampleStale)."""

Rule = Callable[[Facts], Advice | None]

EVEN_WITH_A_LEAK: Final[tuple[Rule, ...]] = (
    leaks.find_gpu_leak,
    leaks.find_host_leak,
    starts.find_leftovers,
    starts.find_other_tenant,
    starts.find_failing_starts,
    leaks.find_kv_block_leak,
)
"""Rules that hold with and without a leak; with one, without values of options: the leak distorts them."""

WITHOUT_A_LEAK: Final[tuple[Rule, ...]] = (
    starts.find_crash,
    starts.find_host_shortage,
    *(partial(leaks.find_shortage, kind=kind) for kind in Shortage),
    capacity.find_full_cache,
    capacity.find_unused_memory,
    capacity.find_too_few_requests,
    capacity.find_poor_prefix_cache,
)
"""In the order of the answer: what can end the engine before what slows it down."""

NOTHING_ELSE: Final = (
    "No option is advised while the engine leaks or grows: the growth distorts its figures."
    " Look again at a trace from after the restart."
)


class Assessment(Struct, frozen=True, kw_only=True):
    """The answer; `missing` is what has to be known to call the engine healthy."""

    verdict: Conclusion
    facts: Facts
    advice: tuple[Advice, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def judge(facts: Facts) -> Assessment:
    """Apply every rule; the verdict is good only where nothing important is unknown."""
    all_leaks = (*(gpu.leak for gpu in facts.gpus), *(host.leak for host in facts.hosts))
    growing = any(
        leak.alarm or leak.state in (LeakState.GROWING, LeakState.LEAKING) for leak in all_leaks
    )
    found = _apply_rules(EVEN_WITH_A_LEAK, facts)
    if growing:
        found = [
            replace(each, changes=tuple(change for change in each.changes if not change.flag))
            for each in found
        ]
    else:
        found += _apply_rules(WITHOUT_A_LEAK, facts)
    advice, left_out = _drop_absent_options(found, facts)
    unknown = tuple(list_missing(facts))
    verdict = (
        Conclusion.NOT_GOOD if advice else Conclusion.CANNOT_TELL if unknown else Conclusion.GOOD
    )
    remarks = (*((NOTHING_ELSE,) if growing else ()), *left_out, *list_notes(facts, advice))
    return Assessment(verdict=verdict, facts=facts, advice=advice, missing=unknown, notes=remarks)


def _apply_rules(rules: tuple[Rule, ...], facts: Facts) -> list[Advice]:
    return [advice for rule in rules if (advice := rule(facts)) is not None]


def _drop_absent_options(found: list[Advice], facts: Facts) -> tuple[tuple[Advice, ...], list[str]]:
    """Leave out the options that this version may lack; return the notes on them, without their dashes, as well."""
    version, known = facts.settings.version, facts.settings.known
    flags = dict.fromkeys(
        change.flag for each in found for change in each.changes if change.flag is not None
    )
    absent = {
        flag: format_version(FIRST_VERSIONS[flag]) for flag in flags if FIRST_VERSIONS[flag] > known
    }
    advice = (
        replace(each, changes=tuple(change for change in each.changes if change.flag not in absent))
        for each in found
    )
    why = ", which vLLM has since {}, because this may be an older one; --vllm-version says which."
    if version is not None:
        why = f" is no option of vLLM {format_version(version)}; {{}} is the first that has it."
    notes = [
        f"Left out: {flag.removeprefix('--')}{why.format(first)}" for flag, first in absent.items()
    ]
    return tuple(advice), notes


WHY: Final = {
    LeakState.UNKNOWN: "the engine's memory, or its load, is not known",
    LeakState.WARMING_UP: "the leak detector is warming up: look again after at most an hour of work",
    LeakState.GROWING: "it grows, and within hours it shows whether that is a leak: look again",
    LeakState.ASLEEP: "the engine sleeps",
}
"""The states in which it may leak; `unsettled` is load that moves, without growth."""

A_MOMENT: Final = (
    "One page shows a moment: earlier exits and bursts, the size of requests and hit ratios over hours need"
    " a trace (HEADROOM_TRACE_FILE)."
)
BETWEEN_SAMPLES: Final = (
    "A peak between two samples is not judged here; headroom_gpu_memory_used_peak_bytes has it."
)
SET_NOW: Final = (
    "The current settings are not in this trace: --engine-url, or the options of those names, turn differences into"
    " values."
)


def list_missing(facts: Facts) -> Iterator[str]:
    """Yield what has to be known before the verdict can be good."""
    if facts.age_seconds is not None and facts.age_seconds > STALE_SECONDS:
        yield f"the page is {format_duration(facts.age_seconds)} old: the sidecar has stopped sampling"
    if facts.origin is Origin.TRACE and facts.span_seconds < SHORTEST_SECONDS:
        yield f"a longer history: it covers {format_duration(facts.span_seconds)}, and an hour is needed"
    if not facts.gpus:
        yield "memory of the engine's GPUs: no GPU is known to be the engine's"
    for gpu in facts.gpus:
        if gpu.least_room_bytes is None:
            yield f"{gpu.display_name}: its memory was not read"
        yield from _explain_leak(gpu.display_name, gpu.leak)
    for host in facts.hosts:
        if host.leak.state is not LeakState.UNKNOWN:
            yield from _explain_leak(f"host memory of {host.process}", host.leak)
    yield from _list_missing_of_engines(facts)


def _list_missing_of_engines(facts: Facts) -> Iterator[str]:
    if not facts.engines:
        yield "the engine's own page: it was not read"
    elif not any(engine.most_running or engine.finished for engine in facts.engines):
        yield "load: no request ran, and the effect of load is not known"
    for engine in facts.engines:
        if not engine.kv_known:
            yield f"{name_engine(facts, engine)}: how much of its KV cache is in use is not known"
        if not engine.preemptions_known:
            yield f"{name_engine(facts, engine)}: its preemptions are not known"


def _explain_leak(name: str, leak: Leak) -> Iterator[str]:
    if leak.state in WHY:
        yield f"{name}: {WHY[leak.state]}"


def list_notes(facts: Facts, advice: Iterable[Advice]) -> tuple[str, ...]:
    """Return what else to know about the answer."""
    changes = [change for each in advice for change in each.changes]
    remarks = []
    if facts.since_seconds is not None:
        since = format_instant(facts.since_seconds)
        remarks.append(
            f"Judged since {since}, when the KV cache was of another size for the first time."
        )
    remarks += [A_MOMENT] if facts.origin is Origin.PAGE else [] if changes else [BETWEEN_SAMPLES]
    if any(change.difference is not None for change in changes):
        remarks.append(SET_NOW)
    remarks += [*_compare_ranks(facts), *_note_waste(facts)]
    crashes = starts.find_crashes(facts)
    if crashes and starts.find_crash(facts) is None:
        left = "" if crashes[0].fullest_gpu is None else ", with memory left"
        exited = (
            f"The engine exited at {format_instant(crashes[0].seconds)} while requests ran{left}"
        )
        remarks.append(f"{exited}: a planned restart, or a crash that vLLM's log explains.")
    if not facts.hosts:
        remarks.append("The engine's processes were not seen, so that host memory is not judged.")
    judged = (capacity.judge_prefix_cache(facts, engine) for engine in facts.engines)
    remarks += dict.fromkeys(each for each in judged if isinstance(each, str))
    version = facts.settings.version
    if version is not None and version > NEWEST and any(change.flag for change in changes):
        newer = f"vLLM {format_version(version)} is newer than {format_version(NEWEST)}"
        remarks.append(f"{newer}, the newest whose options were checked.")
    return tuple(remarks)


def _compare_ranks(facts: Facts) -> Iterator[str]:
    """Note the GPU with much less room than another of the same size: vLLM sizes the KV cache of all by it."""
    rooms = [(gpu.least_room_bytes, gpu) for gpu in facts.gpus if gpu.least_room_bytes is not None]
    if len({gpu.usable_bytes for _, gpu in rooms}) != 1:
        return
    (least, fullest), (most, _) = (
        min(rooms, key=lambda each: each[0]),
        max(rooms, key=lambda each: each[0]),
    )
    if most - least >= APART_BYTES:
        yield (
            f"{fullest.display_name} had {format_size(most - least)} less room than another of the engine's GPUs: vLLM sizes"
            " the KV cache of all by the fullest."
        )


def _note_waste(facts: Facts) -> Iterator[str]:
    """Note a KV cache that was never needed."""
    used = [
        engine.most_used_ratio for engine in facts.engines if engine.most_used_ratio is not None
    ]
    busy = any(engine.finished for engine in facts.engines)
    if (
        busy
        and len(used) == len(facts.engines)
        and facts.span_seconds >= DAY_SECONDS
        and max(used) < WASTE_RATIO
    ):
        most, span = format_percent(max(used)), format_duration(facts.span_seconds)
        yield (
            f"At most {most} of the KV cache was in use in {span}: a"
            " smaller card, or a smaller share of this one, would do; vllm-headroom plan computes which."
        )
