"""The combined verdict of all rules on the facts."""

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
from vllm_headroom.vocabulary import GROWING_STATES, LeakState
from vllm_headroom_tools.advise.facts import Facts, FactsSource, Leak, Shortage, list_leaks
from vllm_headroom_tools.advise.finding import Advice, Change, format_percent, name_engine
from vllm_headroom_tools.advise.rules import capacity, leaks, peaks, starts
from vllm_headroom_tools.advise.settings import FIRST_VERSIONS, NEWEST_CHECKED, Flag
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.history import LeakVerdict
from vllm_headroom_tools.versions import format_version

Rule = Callable[[Facts], Advice | None]

EVEN_WITH_A_LEAK: Final[tuple[Rule, ...]] = (
    leaks.find_gpu_leak,
    leaks.find_host_leak,
    starts.find_leftovers,
    starts.find_other_tenant,
    starts.find_failing_starts,
    leaks.find_kv_block_leak,
)
"""Rules that apply whether or not there is a leak. If there is a leak, changes to options are
dropped. The leak distorts the computed values.
"""

WITHOUT_A_LEAK: Final[tuple[Rule, ...]] = (
    starts.find_crash,
    starts.find_host_shortage,
    leaks.find_straight_growth,
    leaks.find_over_budget,
    peaks.find_unsafe_peaks,
    *(partial(leaks.find_shortage, kind=kind) for kind in Shortage),
    capacity.find_full_cache,
    capacity.find_unused_memory,
    capacity.find_too_few_requests,
    capacity.find_poor_prefix_cache,
)
"""Rules that apply only if there is no leak. Their advice is reported in this order. Causes that
can end the engine come before causes that slow it down.
"""

NO_OPTION_WHILE_GROWING: Final = (
    "No option is advised while the engine leaks or grows: the growth distorts its figures."
    " Look again at a trace from after the restart."
)


class Assessment(Struct, frozen=True, kw_only=True):
    """The advice of all rules, and the verdict."""

    verdict: Conclusion
    facts: Facts
    advice: tuple[Advice, ...]
    # The facts that are unknown, but required before the engine can be called healthy.
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def judge_facts(facts: Facts) -> Assessment:
    """Apply the rules and return their advice with the verdict.

    The verdict is "not good" if there is any advice. Without advice, the verdict is "good" only if
    all important facts are known.
    """
    is_growing = _is_growing(facts)
    notes = []
    advice = _apply_rules(EVEN_WITH_A_LEAK, facts)
    # While memory is growing, the causes are still valid. The computed option values are not,
    # because the growth distorts the figures behind them.
    if is_growing:
        advice = [_keep_changes(one_advice, _has_no_flag) for one_advice in advice]
        notes.append(NO_OPTION_WHILE_GROWING)
    else:
        advice += _apply_rules(WITHOUT_A_LEAK, facts)

    absent_flags = _find_absent_flags(advice, facts)
    advice = [
        _keep_changes(one_advice, lambda change: change.flag not in absent_flags)
        for one_advice in advice
    ]
    notes += _note_absent_flags(absent_flags, facts)
    notes += list_notes(facts, advice)
    missing = tuple(list_missing(facts))
    if advice:
        verdict = Conclusion.NOT_GOOD
    elif missing:
        verdict = Conclusion.CANNOT_TELL
    else:
        verdict = Conclusion.GOOD
    return Assessment(
        verdict=verdict, facts=facts, advice=tuple(advice), missing=missing, notes=tuple(notes)
    )


def _is_growing(facts: Facts) -> bool:
    """Return whether any series has had an alarm, or ends with an early warning."""
    return any(leak.alarm or leak.state in GROWING_STATES for _, leak in list_leaks(facts))


def _apply_rules(rules: Iterable[Rule], facts: Facts) -> list[Advice]:
    """Return the advice of the rules that apply."""
    results = [rule(facts) for rule in rules]
    return [advice for advice in results if advice is not None]


def _keep_changes(advice: Advice, is_kept: Callable[[Change], bool]) -> Advice:
    """Return the advice, keeping only the changes for which `is_kept` is true."""
    return replace(advice, changes=tuple(filter(is_kept, advice.changes)))


def _has_no_flag(change: Change) -> bool:
    return change.flag is None


def _find_absent_flags(advice: Iterable[Advice], facts: Facts) -> list[Flag]:
    """Return each advised option that this version of vLLM may lack."""
    flags: list[Flag] = []
    for change in _list_changes(advice):
        flag = change.flag
        if flag is None or flag in flags:
            continue
        if FIRST_VERSIONS[flag] > facts.settings.earliest_version:
            flags.append(flag)
    return flags


def _note_absent_flags(flags: Iterable[Flag], facts: Facts) -> Iterator[str]:
    """Yield a note on each option that the operator did not give.

    The option is named without dashes. Nobody should copy it into a command line.
    """
    version = facts.settings.version
    for flag in flags:
        name = flag.removeprefix("--")
        first_version = format_version(FIRST_VERSIONS[flag])
        if version is None:
            yield (
                f"Left out: {name}, which vLLM has since {first_version}, because this may be an"
                " older one; --vllm-version says which."
            )
        else:
            yield (
                f"Left out: {name} is no option of vLLM {format_version(version)};"
                f" {first_version} is the first that has it."
            )


def _list_changes(advice: Iterable[Advice]) -> list[Change]:
    return [change for one_advice in advice for change in one_advice.changes]


# Unknown facts that a good verdict requires.

SHORTEST_SECONDS: Final = HOUR_SECONDS
"""A shorter trace cannot prove that an engine is healthy. The leak detector needs an hour to be
certain.
"""

STALE_PAGE_SECONDS: Final = 120.0
"""A page older than this no longer shows the current state (alert HeadroomSampleStale)."""

UNDECIDED_STATES: Final = {
    LeakState.UNKNOWN: "the engine's memory, or its load, is not known",
    LeakState.WARMING_UP: (
        "the leak detector is warming up: look again after at most an hour of work"
    ),
    LeakState.GROWING: "it grows, and within hours it shows whether that is a leak: look again",
    LeakState.ASLEEP: "the engine sleeps",
}
"""The states of the detector in which a series may be leaking. The state `unsettled` is not
included. It means that memory varies with the load without growing.
"""


def list_missing(facts: Facts) -> Iterator[str]:
    """Yield a text for each unknown fact that a good verdict requires."""
    if facts.age_seconds is not None and facts.age_seconds > STALE_PAGE_SECONDS:
        age = format_duration(facts.age_seconds)
        yield f"the page is {age} old: the sidecar has stopped sampling"
    if facts.origin is FactsSource.TRACE and facts.span_seconds < SHORTEST_SECONDS:
        span = format_duration(facts.span_seconds)
        yield f"a longer history: it covers {span}, and an hour is needed"
    if not facts.gpus:
        yield "memory of the engine's GPUs: no GPU is known to be the engine's"
    for gpu in facts.gpus:
        if gpu.least_room_bytes is None:
            yield f"{gpu.display_name}: its memory was not read"
        yield from _explain_leak(gpu.display_name, gpu.leak)
    # An unknown amount of host memory does not affect the rest of the verdict.
    for host in facts.hosts:
        is_growing = host.leak.verdict is LeakVerdict.GROWING
        if is_growing or host.leak.state is not LeakState.UNKNOWN:
            yield from _explain_leak(f"host memory of {host.process}", host.leak)
    yield from _list_missing_of_engines(facts)


def _list_missing_of_engines(facts: Facts) -> Iterator[str]:
    """Yield a text for each unknown fact about the engines."""
    if not facts.engines:
        yield "the engine's own page: it was not read"
    elif not any(engine.highest_running or engine.finished for engine in facts.engines):
        yield "load: no request ran, and the effect of load is not known"
    for engine in facts.engines:
        name = name_engine(facts, engine)
        if not engine.has_kv_usage:
            yield f"{name}: how much of its KV cache is in use is not known"
        if not engine.has_preemptions:
            yield f"{name}: its preemptions are not known"


def _explain_leak(name: str, leak: Leak) -> Iterator[str]:
    """Yield why a series may be leaking.

    The verdict on the trace or the final state gives the reason. Yields nothing if both the verdict
    and the state are certain.
    """
    if leak.verdict is LeakVerdict.GROWING and leak.state is not LeakState.GROWING:
        yield f"{name}: {leak.reason}, and a longer trace shows whether that is a leak: look again"
    elif leak.state in UNDECIDED_STATES:
        yield f"{name}: {UNDECIDED_STATES[leak.state]}"


# Notes on the verdict.

PAGE_IS_A_MOMENT: Final = (
    "One page shows a moment: earlier exits and bursts, the size of requests and hit ratios over"
    " hours need a trace (HEADROOM_TRACE_FILE)."
)
PEAKS_BETWEEN_SAMPLES: Final = (
    "A peak between two samples is not judged here; headroom_gpu_memory_used_peak_bytes has it."
)
SETTINGS_UNKNOWN: Final = (
    "The current settings are not in this trace: --engine-url, or the options of those names, turn"
    " differences into values."
)
HOST_NOT_JUDGED: Final = "The engine's processes were not seen, so that host memory is not judged."

UNEVEN_GPUS_BYTES: Final = 2 * GIB
"""Our choice: a larger difference between an engine's GPUs is reported. NCCL buffers and kernels
that load late account for a few hundred MiB.
"""

UNUSED_CACHE_RATIO: Final = 0.2
"""Our choice: a cache is too large if at most this share was used. The trace must cover at least a
day.
"""


def list_notes(facts: Facts, advice: Iterable[Advice]) -> Iterator[str]:
    """Yield notes on the verdict's limits, and on facts that no rule covers."""
    changes = _list_changes(advice)
    if facts.since_seconds is not None:
        since = format_instant(facts.since_seconds)
        yield f"Judged since {since}, when the KV cache was of another size for the first time."
    if facts.origin is FactsSource.PAGE:
        yield PAGE_IS_A_MOMENT
    elif not changes:
        yield PEAKS_BETWEEN_SAMPLES
    if any(change.difference is not None for change in changes):
        yield SETTINGS_UNKNOWN
    yield from _note_uneven_ranks(facts)
    yield from _note_unused_cache(facts)
    yield from _note_single_exit(facts)
    if not facts.hosts:
        yield HOST_NOT_JUDGED
    yield from _note_unjudged_prefix_caches(facts)
    version = facts.settings.version
    # The last note is only for releases newer than the last checked one.
    if version is None or version <= NEWEST_CHECKED:
        return
    if any(change.flag for change in changes):
        yield (
            f"vLLM {format_version(version)} is newer than {format_version(NEWEST_CHECKED)},"
            " the newest whose options were checked."
        )


def _note_uneven_ranks(facts: Facts) -> Iterator[str]:
    """Yield a note if GPUs of the same size differ much in room.

    vLLM gives every GPU a KV cache that fits on the fullest GPU.
    """
    rooms = [(gpu.least_room_bytes, gpu) for gpu in facts.gpus if gpu.least_room_bytes is not None]
    sizes = {gpu.usable_bytes for _, gpu in rooms}
    if len(sizes) != 1:
        return
    least_room_bytes, fullest_gpu = min(rooms, key=lambda room: room[0])
    difference_bytes = max(room_bytes for room_bytes, _ in rooms) - least_room_bytes
    if difference_bytes >= UNEVEN_GPUS_BYTES:
        yield (
            f"{fullest_gpu.display_name} had {format_size(difference_bytes)} less room than another"
            " of the engine's GPUs: vLLM sizes the KV cache of all by the fullest."
        )


def _note_unused_cache(facts: Facts) -> Iterator[str]:
    """Yield a note on a mostly unused KV cache.

    The cache must have stayed mostly unused for at least a day under load.
    """
    if facts.span_seconds < DAY_SECONDS or not any(engine.finished for engine in facts.engines):
        return
    used_ratios = [
        engine.highest_kv_used_ratio
        for engine in facts.engines
        if engine.highest_kv_used_ratio is not None
    ]
    # If the usage of any engine is unknown, the highest usage is unknown too.
    if len(used_ratios) < len(facts.engines) or max(used_ratios) >= UNUSED_CACHE_RATIO:
        return
    span = format_duration(facts.span_seconds)
    yield (
        f"At most {format_percent(max(used_ratios))} of the KV cache was in use in {span}:"
        " a smaller card, or a smaller share of this one, would do;"
        " vllm-headroom plan --trace FILE computes which."
    )


def _note_single_exit(facts: Facts) -> Iterator[str]:
    """Yield a note on an exit under load.

    The note is for traces with too few exits for advice on crashes.
    """
    crashes = starts.find_crashes(facts)
    if not crashes or starts.find_crash(facts) is not None:
        return
    first_crash = crashes[0]
    room = ""
    if first_crash.fullest_gpu is not None:
        left_bytes = first_crash.fullest_gpu.last_room_bytes or 0
        room = f", with {format_size(left_bytes)} left"
    yield (
        f"The engine exited at {format_instant(first_crash.seconds)} while requests ran{room}:"
        " a planned restart, a crash, or an allocation that failed, which vLLM's log explains."
    )


def _note_unjudged_prefix_caches(facts: Facts) -> Iterator[str]:
    """Yield notes on why prefix caches were not judged, with each reason only once."""
    judgements = [capacity.judge_prefix_cache(facts, engine) for engine in facts.engines]
    reasons = [judgement for judgement in judgements if isinstance(judgement, str)]
    yield from dict.fromkeys(reasons)
