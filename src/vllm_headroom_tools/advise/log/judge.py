"""Advice on an engine log.

The verdict explains why the engine ended, or how a successful start uses its GPU.
"""

from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from vllm_headroom.derive.engine_log import (
    PHASE_WORDS,
    describe_failure,
    describe_place,
    describe_time,
)
from vllm_headroom.model.start import EngineLog, EngineStart, LogFailure
from vllm_headroom.units import GIB, format_size
from vllm_headroom.vocabulary import LogRemarkKind, StartPhase
from vllm_headroom_tools.advise.finding import Advice, format_percent
from vllm_headroom_tools.advise.log.facts import (
    VLLM,
    StartFacts,
    list_loads,
    raise_share,
    read_start_facts,
)
from vllm_headroom_tools.advise.log.failures import advise_on_failure
from vllm_headroom_tools.advise.settings import FIRST_VERSIONS, EngineArgs, Flag
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.engine_log import find_decisive_start
from vllm_headroom_tools.full_cache import FULL_RATIO
from vllm_headroom_tools.sizing.question import SAFE_UTILIZATION
from vllm_headroom_tools.versions import Version, format_version

NOTED_BYTES: Final = GIB // 2
"""Our choice: a note is only written if at least this much memory is wasted."""

UNEVEN_CACHES_BYTES: Final = GIB
"""Our choice: a larger difference between the caches of two ranks is reported. vLLM gives all ranks
the smaller cache.
"""

GRAPHS_IN_BUDGET: Final[Version] = (0, 21, 0)
"""The first version that reserves memory for CUDA graphs within vLLM's share."""

PARTS: Final = (
    ("weights", "weights_bytes"),
    ("activations", "activation_bytes"),
    ("outside torch", "non_torch_bytes"),
    ("CUDA graphs", "graphs_bytes"),
    ("KV cache", "kv_cache_bytes"),
)
"""The parts of GPU memory that a start logs, each with its name and field."""


class LogAssessment(Struct, frozen=True, kw_only=True):
    """The findings from a log, and what to change."""

    log: EngineLog
    start_facts: StartFacts
    verdict: Conclusion
    headline: str
    advice: tuple[Advice, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def start(self) -> EngineStart:
        """Return the start being judged."""
        return self.start_facts.start


def judge_log(log: EngineLog, option_args: EngineArgs) -> LogAssessment:
    """Judge the latest failed start or, if none failed, the latest start in `log`.

    `option_args` are the options that the operator provided with the log.
    """
    start_facts = read_start_facts(find_decisive_start(log.starts), option_args)
    start = start_facts.start
    failure = start.root_failure
    advice: tuple[Advice, ...] = ()
    missing: tuple[str, ...] = ()
    notes = list(_note_other_starts(log, start))
    # The operator wants to know about the failed start, even after a later success.
    if failure is not None:
        one_advice = advise_on_failure(start_facts, failure)
        notes += _note_absent_flags(one_advice, start_facts)
        advice = (_drop_absent_flags(one_advice, start_facts),)
        verdict = Conclusion.NOT_GOOD
        headline = one_advice.summary
    elif start.is_stopped:
        verdict = Conclusion.GOOD
        headline = "The engine shut down on request."
    elif start.phase is StartPhase.SERVING:
        verdict = Conclusion.GOOD
        headline = "The engine started and serves; nothing to change."
        notes += _list_start_notes(start_facts)
    else:
        verdict = Conclusion.CANNOT_TELL
        headline = f"The log ends {PHASE_WORDS[start.phase]}, without an error."
        missing = (UNFINISHED,)
    return LogAssessment(
        log=log,
        start_facts=start_facts,
        verdict=verdict,
        headline=headline,
        advice=advice,
        missing=missing,
        notes=tuple(notes),
    )


UNFINISHED: Final = (
    "the end: the engine still starts, or was killed from outside, which its log cannot show;"
    " kubectl describe pod has its exit code, 137 for a kill"
)


def _note_other_starts(log: EngineLog, start: EngineStart) -> Iterator[str]:
    """Yield notes on other starts with the same failure, and on any later start."""
    if log.start_count == 1:
        return
    failure = start.root_failure
    if failure is not None:
        kinds = [other.root_failure.kind for other in log.starts if other.root_failure is not None]
        count = kinds.count(failure.kind)
        if count > 1:
            yield f"The same in {count} of the log's {log.start_count} starts."
        # Only this start failed in this way, so the earlier ones had other causes.
        elif len(kinds) > 1:
            others = sorted({str(kind) for kind in kinds if kind is not failure.kind})
            yield f"Earlier starts of the log failed otherwise: {', '.join(others)}."
    newest = log.starts[-1]
    if newest is not start:
        state = "serves" if newest.has_served else f"ends {PHASE_WORDS[newest.phase]}"
        yield f"A later start, from line {newest.first_line:,} on, {state}."


def _list_absent_flags(advice: Advice, start_facts: StartFacts) -> list[Flag]:
    """Return the advised options that this version of vLLM lacks."""
    version = start_facts.settings.version
    flags = [change.flag for change in advice.changes if change.flag is not None]
    if version is None:
        return []
    return [flag for flag in flags if FIRST_VERSIONS[flag] > version]


def _drop_absent_flags(advice: Advice, start_facts: StartFacts) -> Advice:
    absent_flags = _list_absent_flags(advice, start_facts)
    changes = [change for change in advice.changes if change.flag not in absent_flags]
    return replace(advice, changes=tuple(changes))


def _note_absent_flags(advice: Advice, start_facts: StartFacts) -> Iterator[str]:
    """Yield notes on options that this version lacks, without dashes to prevent copying."""
    version = start_facts.settings.version
    for flag in _list_absent_flags(advice, start_facts):
        first_version = format_version(FIRST_VERSIONS[flag])
        yield (
            f"Left out: {flag.removeprefix('--')} is no option of vLLM"
            f" {format_version(version or (0, 0, 0))}; {first_version} is the first that has it."
        )


# How a serving engine uses its GPU.


def _list_start_notes(start_facts: StartFacts) -> Iterator[str]:
    """Yield notes on what a serving engine wastes, and on what else would fit."""
    yield from _note_requests(start_facts)
    if start_facts.start.engine == VLLM:
        yield from _note_unused_share(start_facts)
        yield from _note_graphs(start_facts)
    yield from _note_uneven_ranks(start_facts.start)
    yield from _note_load(start_facts.start)
    for remark in start_facts.start.remarks:
        times = "once" if remark.count == 1 else f"{remark.count:,} times"
        yield f"{REMARKS[remark.kind]} (line {remark.line_number:,}, {times})."
    yield ENDS_WITHOUT_ERROR


ENDS_WITHOUT_ERROR: Final = (
    "The log ends without an error and without a shutdown: if the engine has gone, it was killed"
    " from outside, and kubectl describe pod has its exit code."
)

REMARKS: Final = {
    LogRemarkKind.PREEMPTION: "The KV cache was full, and requests were computed again",
    LogRemarkKind.SWAP: "The engine swaps parts of the KV cache to host memory",
    LogRemarkKind.FALLBACK: "The engine fell back to a slower implementation",
    LogRemarkKind.EAGER: "CUDA graphs are off: tokens come slower",
    LogRemarkKind.PADDING: "Layers are padded, which wastes part of the KV cache",
    LogRemarkKind.CONTEXT_REDUCED: "vLLM shortened the longest request to what fits",
    LogRemarkKind.BLOCKED: "A worker did not answer for a minute or more",
}
"""The meaning of each warning."""


def _note_requests(start_facts: StartFacts) -> Iterator[str]:
    """Yield a note on how many full-length requests fit at once."""
    start = start_facts.start
    requests = start.find_smallest("concurrency_ratio")
    context_tokens = start.find_largest("concurrency_tokens")
    if requests is None or context_tokens is None:
        return
    yield f"{requests:,.3g} requests of full length, {context_tokens:,} tokens, fit at once."


def _note_unused_share(start_facts: StartFacts) -> Iterator[str]:
    """Yield a note on how far vLLM's share is below the safe share.

    The note also says what would fit there.
    """
    utilization = start_facts.settings.gpu_memory_utilization
    total_bytes = start_facts.total_bytes
    if utilization is None or not total_bytes or start_facts.settings.sizes_cache_in_bytes:
        return
    unused_bytes = (SAFE_UTILIZATION - utilization) * total_bytes
    if unused_bytes < NOTED_BYTES:
        return
    # A restart is not worth an increase by less than half a hundredth.
    change = raise_share(start_facts, unused_bytes, "")
    bytes_per_token = start_facts.bytes_per_token
    if change is None or change.value is None or bytes_per_token is None:
        return
    yield (
        f"{format_size(unused_bytes)} of each GPU lie between its share of {utilization:g} and the"
        f" safe one: with {change.flag} {change.value:g} the KV cache would hold"
        f" {unused_bytes / bytes_per_token:,.0f} tokens more, with less room for bursts."
    )


def _note_graphs(start_facts: StartFacts) -> Iterator[str]:
    """Yield notes on CUDA graphs.

    The graphs took less than reserved, or they are outside vLLM's share.
    """
    start = start_facts.start
    estimated_bytes = start.find_largest("graphs_estimated_bytes")
    graphs_bytes = start.find_largest("graphs_bytes")
    version = start_facts.settings.version
    if version is None or graphs_bytes is None:
        return
    if version < GRAPHS_IN_BUDGET:
        if graphs_bytes >= NOTED_BYTES:
            yield (
                f"The CUDA graphs' {format_size(graphs_bytes)} lie outside vLLM's share in this"
                " version; from 0.21 on they are part of it, and the KV cache is smaller."
            )
        return
    if estimated_bytes is None or start_facts.kv_cache_bytes is None:
        return
    # If vLLM estimated the graphs' memory, it reduced the cache by that estimate.
    unused_bytes = estimated_bytes - graphs_bytes
    if unused_bytes >= NOTED_BYTES:
        cache_bytes = start_facts.kv_cache_bytes + unused_bytes
        yield (
            f"The CUDA graphs took {format_size(unused_bytes)} less than vLLM set aside for them:"
            f" {Flag.KV_CACHE_MEMORY_BYTES} {cache_bytes:.0f} would give that to the KV cache."
        )


def _note_uneven_ranks(start: EngineStart) -> Iterator[str]:
    """Yield a note on a rank with much less cache memory than another rank."""
    least_bytes = start.find_smallest("kv_cache_bytes")
    most_bytes = start.find_largest("kv_cache_bytes")
    if least_bytes is None or most_bytes is None:
        return
    if most_bytes - least_bytes >= UNEVEN_CACHES_BYTES:
        yield (
            f"One rank has {format_size(least_bytes)} for the KV cache, another"
            f" {format_size(most_bytes)}: vLLM sizes the cache of all by the fullest."
        )


def _note_load(start: EngineStart) -> Iterator[str]:
    """Yield a note if the latest loads show a full cache and a queue."""
    loads = list_loads(start)
    # Only use reports with a full cache. A cache with room does not make requests wait.
    full_loads = [load for load in loads if load.get("kv_cache_used_ratio", 0.0) > FULL_RATIO]
    waiting_requests = max((load.get("waiting_requests", 0.0) for load in full_loads), default=0.0)
    if waiting_requests:
        yield (
            f"In {len(full_loads)} of the newest {len(loads)} reports the KV cache was more than"
            f" {format_percent(FULL_RATIO)} full, and up to {waiting_requests:,.0f} requests"
            " waited."
        )


# Formatting the advice as text and data.


def format_source(assessment: LogAssessment) -> str:
    """Return a line on the input: the log, the engine, its version and model."""
    log = assessment.log
    start = assessment.start
    starts = "1 start" if log.start_count == 1 else f"{log.start_count:,} starts"
    name = ENGINE_NAMES[start.engine]
    if start.version is not None:
        name = f"{name} {start.version}"
    if start.model is not None:
        name = f"{name}, {start.model}"
    begin = describe_time(start.begin)
    begun = f"from line {start.first_line:,}" if begin is None else f"from {begin}"
    return f"A log of {log.line_count:,} lines with {starts}; {name}, {begun}."


ENGINE_NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


def list_part_lines(assessment: LogAssessment) -> list[str]:
    """Return a table of a GPU's memory by part.

    Each part has the number of its log line.
    """
    start = assessment.start
    rows = []
    for name, field in PARTS:
        size_bytes = getattr(assessment.start_facts, field)
        if size_bytes is None:
            continue
        line_number = start.find_line(field)
        place = "" if line_number is None else f"  line {line_number:,}"
        more = ""
        tokens = assessment.start_facts.kv_cache_tokens
        if field == "kv_cache_bytes" and tokens is not None:
            more = f", {tokens:,.0f} tokens"
        rows.append(f"   {name:<14} {format_size(size_bytes):>9}{more}{place}")
    return rows


def build_log_data(assessment: LogAssessment) -> dict[str, Any]:
    """Return the data for --json about the log itself; unknown figures are None."""
    start = assessment.start
    failure = start.root_failure
    return {
        "lines": assessment.log.line_count,
        "starts": assessment.log.start_count,
        "engine": start.engine,
        "version": start.version,
        "model": start.model,
        "phase": start.phase,
        "has_served": start.has_served,
        "is_stopped": start.is_stopped,
        "processes": [asdict(process) for process in start.processes],
        "failure": None if failure is None else _build_failure(failure),
        "remarks": [asdict(remark) for remark in start.remarks],
    }


def _build_failure(failure: LogFailure) -> dict[str, Any]:
    """Return a failure from the log as data for --json."""
    return {
        "kind": failure.kind,
        "text": describe_failure(failure),
        "place": describe_place(failure),
        "line": failure.line_number,
        "time": describe_time(failure.time),
        "process": failure.process,
        "phase": failure.phase,
        "exception": failure.exception,
        "frames": [f"{frame.file}:{frame.line}" for frame in failure.frames],
        "refusal": None if failure.refusal is None else asdict(failure.refusal),
        "numbers": dict(failure.figures),
    }
