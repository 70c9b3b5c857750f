"""The report of a load, as JSON and as text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_headroom import catalog
from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.model import name_device
from vllm_headroom.units import format_size
from vllm_headroom.vocabulary import IncidentKind, Source
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.history import Histogram, LeakCourse, LeakReplay, LeakVerdict, judge_course
from vllm_headroom_tools.load.run import SHARES, LoadObservation, SeriesSummary, Stage
from vllm_headroom_tools.load.stream import Outcome
from vllm_headroom_tools.load.target import LoadOrder
from vllm_headroom_tools.terminal import join_paragraphs

TOLERATED_RATIO: Final = 0.01
"""Of the requests that may fail: one broken connection among hundreds does not count against the server."""


def list_faults(
    outcomes: Counter[Outcome],
    ended: str | None,
    memory: Iterable[Mapping[str, Any]],
    *,
    stopped: bool,
) -> Iterator[str]:
    """Yield what is not good: of the requests, of how the engine ended meanwhile, and of the series of memory."""
    if count := outcomes[Outcome.OUT_OF_MEMORY]:
        yield f"{count} answers were out of memory"
    if ended is not None:
        yield ended
    had_time = (
        outcomes.total()
        - outcomes[Outcome.NOT_SENT]
        - (outcomes[Outcome.UNFINISHED] if stopped else 0)
    )
    unserved = had_time - outcomes[Outcome.SUCCEEDED] - outcomes[Outcome.OUT_OF_MEMORY]
    if had_time and not outcomes[Outcome.SUCCEEDED]:
        yield "no request succeeded"
    elif unserved > TOLERATED_RATIO * had_time:
        yield f"{unserved} of {had_time} requests were not served"
    for series in memory:
        if series["verdict"] is LeakVerdict.LEAKING:
            on_gpu = "gpu" in series
            whose = (
                name_device(series["gpu"], series["uuid"])
                if on_gpu
                else f"host memory of {series['process']}"
            )
            yield f"{whose} leaks"


QUANTILES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def build_report(
    order: LoadOrder,
    model: str,
    steps: Sequence[Stage],
    whole: LoadObservation,
    watch: LeakReplay,
    *,
    stopped: bool,
) -> Report:
    """Return the report, in which None is what is unknown; `whole` has seen all, and the detector in `watch` too."""
    outcomes = sum((step.tally.outcomes for step in steps), Counter[Outcome]())
    texts = sum((step.tally.texts for step in steps), Counter[tuple[Outcome, str]]())
    gpus = [
        {"gpu": int(index), "uuid": uuid} | _describe_memory(span, whole, watch.course(uuid))
        for (index, uuid), span in sorted(whole.held.items())
    ]
    host = [
        {"process": role} | _describe_memory(span, whole, watch.course(role))
        for (role,), span in sorted(whole.host.items())
    ]
    died = any(step.tally.engine_dead for step in steps)
    ended = whole.ended or ("the engine died: its web server says so" if died else None)
    end = next((event for event in watch.events if event.kind is IncidentKind.ENDED), None)
    if ended is not None and end is not None:
        ended = f"{ended}. {judge_ending(end)[0].sentence.removesuffix('.')}"
    found = list(list_faults(outcomes, ended, (*gpus, *host), stopped=stopped))
    is_unsure = (
        stopped or outcomes[Outcome.NOT_SENT] or not outcomes[Outcome.SUCCEEDED]
    )  # one cut short is never good
    verdict = (
        Conclusion.NOT_GOOD if found else Conclusion.CANNOT_TELL if is_unsure else Conclusion.GOOD
    )
    unread = list(_list_unread(whole, str(order.page)))
    data = {
        "faults": found,
        "interrupted": stopped,
        "engine_ended": ended,
        "target": str(order.url),
        "model": model,
        "asked": str(order),
        "requests": _count_requests(outcomes),
        "said": [
            {"outcome": outcome, "text": text, "count": count}
            for (outcome, text), count in texts.most_common()
        ],
        "steps": [_describe_step(step) for step in steps],
        "preemptions": whole.count_growth(catalog.ENGINE_PREEMPTIONS),
        "gpus": gpus,
        "host": host,
        "unread": unread,
        "samples": whole.samples,
        "trace": str(order.trace),
    }
    headline = f"{verdict.replace('_', ' ').upper()}: {'; '.join(found) or _explain(outcomes, stopped=stopped)}."
    faults = [Finding("fault", Conclusion.NOT_GOOD, each) for each in found]
    missing = [Finding("not read", Conclusion.CANNOT_TELL, each) for each in unread]
    return Report(
        verdict=verdict,
        headline=headline,
        findings=(*faults, *missing),
        data=data,
        lines=(*_render_text(data), headline),
    )


def _explain(outcomes: Counter[Outcome], *, stopped: bool) -> str:
    """Return why there is no fault."""
    succeeded, not_sent = outcomes[Outcome.SUCCEEDED], outcomes[Outcome.NOT_SENT]
    if not_sent:
        return f"{not_sent} requests could not be sent by this machine"
    if stopped:
        return f"it was interrupted after {succeeded} requests had succeeded"
    if succeeded:
        return f"{succeeded} of {outcomes.total()} requests succeeded, none was out of memory"
    return "no request had time to finish"


def _list_unread(whole: LoadObservation, page: str) -> Iterator[str]:
    for source, (count, failure) in whole.failures.items():
        why = f"{page} ({failure.reason})" if source is Source.ENGINE else failure.message
        yield f"{source} in {count} of {whole.samples} samples: {why}"
    gpus = () if whole.last is None else whole.last.devices
    if gpus and all(gpu.attribution is None for gpu in gpus):
        yield "nvml: which of them are the engine's is not known: name them with --gpus"


def _count_requests(outcomes: Counter[Outcome]) -> dict[str, int]:
    return {"began": outcomes.total()} | {str(outcome): outcomes[outcome] for outcome in Outcome}


def _describe_step(step: Stage) -> dict[str, Any]:
    tally, observed = step.tally, step.observed
    tokens, seconds = None if tally.uncounted else tally.generation_tokens, tally.served_seconds
    succeeded = tally.outcomes[Outcome.SUCCEEDED]
    running, waiting, kv_used = (
        None if span is None else span.most
        for span in map(
            observed.engine,
            (catalog.ENGINE_RUNNING, catalog.ENGINE_WAITING, catalog.ENGINE_KV_USED),
        )
    )
    return {
        "share": step.share,
        "clients": step.clients,
        "seconds": step.seconds,
        "streams_most": tally.most_streams,
        "requests": _count_requests(tally.outcomes),
        "time_to_first_token_seconds": _read_quantiles(tally.to_first),
        "time_per_output_token_seconds": _read_quantiles(tally.per_token),
        "inter_token_seconds": _read_quantiles(tally.between),
        "end_to_end_seconds": _read_quantiles(tally.to_end),
        "prompt_tokens": None if tally.uncounted else tally.prompt_tokens,
        "generation_tokens": tokens,
        "generation_tokens_per_second": tokens / seconds if tokens and seconds else None,
        "offered_requests_per_second": step.rate,
        "requests_per_second": succeeded / seconds if succeeded and seconds else None,
        "own_delay_seconds": _read_quantiles(tally.delays),
        "engine": {
            "running_most": running,
            "waiting_most": waiting,
            "kv_used_ratio_most": kv_used,
            "preemptions": observed.count_growth(catalog.ENGINE_PREEMPTIONS),
        },
        "gpus": [
            {
                "gpu": int(index),
                "uuid": uuid,
                "held_most_bytes": observed.held[index, uuid].most,
                "bytes_per_running_request": observed.bytes_per_request((index, uuid)),
            }
            for index, uuid in sorted(observed.held)
        ],
        "host": [
            {"process": role, "most_bytes": span.most} for (role,), span in observed.host.items()
        ],
    }


def _describe_memory(
    span: SeriesSummary, whole: LoadObservation, course: LeakCourse
) -> dict[str, Any]:
    delta_bytes, finished = span.last - span.first, whole.count_growth(catalog.ENGINE_FINISHED)
    leak = None if course.last_alarm is None else course.last_alarm.bytes_per_request
    judged, reason = judge_course(course, whole.seconds)
    return {
        "before_bytes": span.first,
        "most_bytes": span.most,
        "after_bytes": span.last,
        "delta_bytes": delta_bytes,
        "requests_finished": finished,
        "delta_bytes_per_thousand_requests": 1000 * delta_bytes / finished if finished else None,
        "verdict": judged,
        "reason": reason,
        "leak_state": course.state,
        "leak_bytes_per_thousand_requests": None if leak is None else 1000 * leak,
    }


def _read_quantiles(values: Histogram) -> dict[str, float | None]:
    return {name: values.quantile(share) for name, share in QUANTILES.items()}


Document = Mapping[str, Any]
NAMES: Final = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.OUT_OF_MEMORY: "OUT OF MEMORY",
    Outcome.FAILED: "failed",
    Outcome.REJECTED: "rejected as busy (429, 503)",
    Outcome.REFUSED: "no connection",
    Outcome.CLOSED: "closed before the end",
    Outcome.TIMED_OUT: "timed out",
    Outcome.UNFINISHED: "still open, given up",
    Outcome.NOT_SENT: "not sent by this machine",
}
LATENCIES: Final = {
    "time_to_first_token_seconds": "to the first token (TTFT)",
    "time_per_output_token_seconds": "per token after it (TPOT)",
    "inter_token_seconds": "between two tokens (ITL)",
    "end_to_end_seconds": "to the end",
}
"""With the names and meanings of vLLM's own benchmark."""

GROWTHS: Final = {"leaking": "LEAKING", "growing": "growing", "no_leak": "no leak"}
UNITS: Final = ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "us"))
UNKNOWN: Final = "-"
LATE_SECONDS: Final = 0.05
"""At this delay in one case of a hundred, the process's own delay shows in the figures."""


def _render_text(found: Document) -> Iterator[str]:
    memory, steps, said = [*found["gpus"], *found["host"]], found["steps"], found["said"]
    answers = [f"{each['count']:>7} x {NAMES[each['outcome']]}: {each['text']}" for each in said]
    yield from join_paragraphs(
        (
            [f"{found['target']}, model {found['model']}: {found['asked']}."],
            [
                f"{label:<32}{''.join(f'{cell:>11}' for cell in cells)}"
                for label, cells in _list_rows(steps, found["requests"])
            ],
            [*map(_format_memory, memory), *dict.fromkeys(map(_format_growth, memory))],
            [f"Not read: {each}" for each in found["unread"]],
            ["Answers to the requests that did not succeed:", *answers] if said else [],
            _list_conclusions(found),
        )
    )


def _list_rows(
    steps: Sequence[Document], requests: Document
) -> Iterator[tuple[str, Iterable[str]]]:
    engines = [step["engine"] for step in steps]
    yield "step", (f"{step['share']:.0%}" for step in steps)
    yield "clients", (str(step["clients"]) for step in steps)
    yield "streams open at once", (str(step["streams_most"]) for step in steps)
    yield "seconds", (f"{step['seconds']:.0f}" for step in steps)
    yield "requests", (str(step["requests"]["began"]) for step in steps)
    for outcome, name in NAMES.items():
        if requests[outcome] or outcome is Outcome.SUCCEEDED:
            yield f"  {name}", [str(step["requests"][outcome]) for step in steps]
    for field, name in LATENCIES.items():
        for share in QUANTILES:
            yield f"{name}, {share}", [_format_latency(step[field][share]) for step in steps]
    yield "tokens of a request, in + out", map(_format_tokens, steps)
    yield (
        "tokens generated per second",
        (_format_number(step["generation_tokens_per_second"]) for step in steps),
    )
    if any(step["offered_requests_per_second"] for step in steps):
        yield (
            "requests offered per second",
            (_format_number(step["offered_requests_per_second"]) for step in steps),
        )
    yield "requests per second", (_format_number(step["requests_per_second"]) for step in steps)
    yield "running, at most", (_format_number(engine["running_most"]) for engine in engines)
    yield "waiting, at most", (_format_number(engine["waiting_most"]) for engine in engines)
    ratios = (engine["kv_used_ratio_most"] for engine in engines)
    yield (
        "KV cache used, at most",
        (UNKNOWN if ratio is None else f"{ratio:.1%}" for ratio in ratios),
    )
    yield "preemptions", (_format_number(engine["preemptions"]) for engine in engines)
    for uuid, gpu in {gpu["uuid"]: gpu["gpu"] for step in steps for gpu in step["gpus"]}.items():
        for field, name in (
            ("held_most_bytes", "held, at most"),
            ("bytes_per_running_request", "held per running request"),
        ):
            yield (
                f"{name_device(gpu, uuid)} {name}",
                [_format_gpu(step, uuid, field) for step in steps],
            )


def _format_latency(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    unit, name = next((unit, name) for least, unit, name in UNITS if seconds >= least)
    return f"{seconds / unit:.3g} {name}"


def _format_tokens(step: Document) -> str:
    served, prompt, generated = (
        step["requests"][Outcome.SUCCEEDED],
        step["prompt_tokens"],
        step["generation_tokens"],
    )
    return (
        f"{prompt / served:.0f} + {generated / served:.0f}"
        if served and prompt is not None
        else UNKNOWN
    )


def _format_number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"  # noqa: PLR2004 - three digits


def _format_gpu(step: Document, uuid: str, field: str) -> str:
    value = next((gpu[field] for gpu in step["gpus"] if gpu["uuid"] == uuid), None)
    return UNKNOWN if value is None else format_size(value)


def _format_memory(series: Document) -> str:
    delta, rate = series["delta_bytes"], series["delta_bytes_per_thousand_requests"]
    change = f"{'+' if delta >= 0 else ''}{format_size(delta)}"
    rate_text = "" if rate is None else f", {format_size(rate)} per thousand requests"
    before, most, after = (
        format_size(series[field]) for field in ("before_bytes", "most_bytes", "after_bytes")
    )
    return f"{_name_series(series)}: {before} before, {most} at most, {after} after: {change}{rate_text}"


def _name_series(series: Document) -> str:
    return (
        f"GPU {series['gpu']} ({series['uuid']})"
        if "gpu" in series
        else f"Host memory of {series['process']}"
    )


def _format_growth(series: Document) -> str:
    if series["verdict"] == "cannot_tell":
        return f"Cannot tell whether it leaks: {series['reason']}"
    leak = series["leak_bytes_per_thousand_requests"]
    rate_text = (
        "" if leak is None else f", {format_size(leak)} per thousand requests by the detector"
    )
    return f"{_name_series(series)}: {GROWTHS[series['verdict']]}: {series['reason']}{rate_text}"


def _list_conclusions(found: Document) -> Iterator[str]:
    late = [step["own_delay_seconds"]["p99"] for step in found["steps"]]
    worst = max((seconds for seconds in late if seconds is not None), default=0.0)
    if worst > LATE_SECONDS:
        yield f"This process was short of CPU, up to {1000 * worst:.0f} ms late: the times contain this delay."
    if found["interrupted"]:
        yield "It was interrupted."
    elif len(found["steps"]) < len(SHARES):
        yield f"It ended {'with the engine' if found['engine_ended'] else 'at --max-requests'}, before the other steps."
    yield f"Trace of {found['samples']} samples: vllm-headroom replay {found['trace']}"
