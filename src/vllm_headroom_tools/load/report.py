"""Judge a load, and build its report."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_headroom import catalog
from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.model import Metric, name_device
from vllm_headroom.vocabulary import IncidentKind, Source
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.history import Histogram, LeakCourse, LeakReplay, LeakVerdict, judge_course
from vllm_headroom_tools.load.order import LoadOrder
from vllm_headroom_tools.load.report_text import render_document
from vllm_headroom_tools.load.run import Stage
from vllm_headroom_tools.load.sampling import LoadObservation, SeriesSummary
from vllm_headroom_tools.load.stream import Outcome
from vllm_headroom_tools.load.tally import QUANTILES

GATED_QUANTILE: Final = 0.99
"""The quantile limited by --max-ttft-p99 and --max-latency-p99."""

TOLERATED_RATIO: Final = 0.01
"""Our choice: the share of requests that may fail. A higher share is a fault. A lower share is not
a fault. Among hundreds of connections, one may break through no fault of the server.
"""


def build_report(
    order: LoadOrder,
    model: str,
    stages: Sequence[Stage],
    overall: LoadObservation,
    detector: LeakReplay,
    *,
    is_interrupted: bool,
) -> Report:
    """Return the report; in its data, unknown figures are None.

    `overall` and the detector must have received all samples. If there is any fault, the verdict is
    "not good".
    """
    # Totals over all steps; each step's own figures are in its column.
    outcomes = sum((stage.tally.outcomes for stage in stages), Counter[Outcome]())
    texts = sum((stage.tally.texts for stage in stages), Counter[tuple[Outcome, str]]())
    gpus = _describe_gpus(overall, detector)
    host = _describe_host(overall, detector)
    engine_end = _explain_engine_end(stages, overall, detector)
    faults = list(
        list_load_faults(outcomes, engine_end, (*gpus, *host), is_interrupted=is_interrupted)
    )
    faults += list_slow_steps(order, stages)
    unread = list(_list_unread(overall, str(order.page_url)))
    verdict = _judge_load(outcomes, faults, is_interrupted=is_interrupted)
    document = {
        "faults": faults,
        "interrupted": is_interrupted,
        "engine_ended": engine_end,
        "target": str(order.url),
        "model": model,
        "asked": str(order),
        "requests": _count_requests(outcomes),
        "said": [
            {"outcome": outcome, "text": text, "count": count}
            for (outcome, text), count in texts.most_common()
        ],
        "steps": [_describe_stage(stage) for stage in stages],
        "preemptions": overall.count_growth(catalog.ENGINE_PREEMPTIONS),
        "gpus": gpus,
        "host": host,
        "unread": unread,
        "samples": overall.samples,
        "trace": str(order.trace),
    }
    explanation = "; ".join(faults)
    if not faults:
        explanation = _explain_no_fault(outcomes, is_interrupted=is_interrupted)
    headline = f"{verdict.replace('_', ' ').upper()}: {explanation}."
    findings = [Finding("fault", Conclusion.NOT_GOOD, fault) for fault in faults]
    findings += [Finding("not read", Conclusion.CANNOT_TELL, source) for source in unread]
    return Report(
        verdict=verdict,
        headline=headline,
        findings=tuple(findings),
        data=document,
        lines=(*render_document(document), headline),
    )


def _explain_engine_end(
    stages: Sequence[Stage], overall: LoadObservation, detector: LeakReplay
) -> str | None:
    """Return how the engine ended during the load, with any known cause.

    Returns None if the engine did not end.
    """
    # The web server may keep responding after its engine has ended. Check the server's error
    # messages too.
    engine_end = overall.engine_end
    if engine_end is None and any(stage.tally.is_engine_dead for stage in stages):
        engine_end = "the engine died: its web server says so"
    if engine_end is None:
        return None
    # The detector knows causes that the page alone does not show.
    for event in detector.events:
        if event.kind is IncidentKind.ENDED:
            cause = judge_ending(event)[0]
            return f"{engine_end}. {cause.sentence.removesuffix('.')}"
    return engine_end


def list_load_faults(
    outcomes: Counter[Outcome],
    engine_end: str | None,
    memory: Iterable[Mapping[str, Any]],
    *,
    is_interrupted: bool,
) -> Iterator[str]:
    """Yield a text for each fault.

    Faults are failed requests, an engine that ended, and memory leaks.
    """
    out_of_memory = outcomes[Outcome.OUT_OF_MEMORY]
    succeeded = outcomes[Outcome.SUCCEEDED]
    if out_of_memory:
        yield f"{out_of_memory} answers were out of memory"
    if engine_end is not None:
        yield engine_end
    # A request that this machine could not send is not a fault. A request cancelled by a stop is
    # not a fault either.
    served_or_failed = outcomes.total() - outcomes[Outcome.NOT_SENT]
    if is_interrupted:
        served_or_failed -= outcomes[Outcome.UNFINISHED]
    unserved = served_or_failed - succeeded - out_of_memory
    # It is always a fault if not a single request succeeded.
    if served_or_failed and not succeeded:
        yield "no request succeeded"
    elif unserved > TOLERATED_RATIO * served_or_failed:
        yield f"{unserved} of {served_or_failed} requests were not served"
    for series in memory:
        if series["verdict"] is LeakVerdict.LEAKING:
            yield f"{_name_series(series)} leaks"


def list_slow_steps(order: LoadOrder, stages: Iterable[Stage]) -> Iterator[str]:
    """Yield a text for each step whose requests were too slow for the order.

    Steps above 100 % are omitted. Steps without a successful request are also omitted, because they
    are already reported as a fault or as incomplete.
    """
    for stage in stages:
        # A step above 100 % is not judged, because it only shows what happens under overload.
        if stage.share > 1:
            continue
        for name, times, most_seconds in (
            ("first token", stage.tally.first_token_seconds, order.most_first_token_seconds),
            ("whole request", stage.tally.end_to_end_seconds, order.most_request_seconds),
        ):
            p99_seconds = times.quantile(GATED_QUANTILE)
            if most_seconds is None or p99_seconds is None or p99_seconds <= most_seconds:
                continue
            yield (
                f"at {stage.share:.0%} the p99 of the {name} was {p99_seconds:.3g} s,"
                f" more than {most_seconds:g} s"
            )


def _name_series(series: Mapping[str, Any]) -> str:
    if "gpu" in series:
        return name_device(series["gpu"], series["uuid"])
    return f"host memory of {series['process']}"


def _judge_load(
    outcomes: Counter[Outcome], faults: Sequence[str], *, is_interrupted: bool
) -> Conclusion:
    """Return the verdict on a load.

    The verdict is "not good" if there are faults. Without faults, the verdict is "cannot tell" if
    the load is incomplete, and "good" if it is complete.
    """
    if faults:
        return Conclusion.NOT_GOOD
    # a load that was cut short is never "good"
    if is_interrupted or outcomes[Outcome.NOT_SENT] or not outcomes[Outcome.SUCCEEDED]:
        return Conclusion.CANNOT_TELL
    return Conclusion.GOOD


def _explain_no_fault(outcomes: Counter[Outcome], *, is_interrupted: bool) -> str:
    """Return the headline of a load without faults.

    The text says what succeeded, or why the load is not judged.
    """
    succeeded = outcomes[Outcome.SUCCEEDED]
    not_sent = outcomes[Outcome.NOT_SENT]
    if not_sent:
        return f"{not_sent} requests could not be sent by this machine"
    if is_interrupted:
        return f"it was interrupted after {succeeded} requests had succeeded"
    if succeeded:
        return f"{succeeded} of {outcomes.total()} requests succeeded, none was out of memory"
    return "no request had time to finish"


def _list_unread(overall: LoadObservation, page_url: str) -> Iterator[str]:
    """Yield a text for each source that failed, with the latest reason.

    Yields another text if none of the readable GPUs is the engine's.
    """
    for source, (count, failure) in overall.failures.items():
        problem = failure.message
        if source is Source.ENGINE:
            problem = f"{page_url} ({failure.reason})"
        yield f"{source} in {count} of {overall.samples} samples: {problem}"
    if overall.newest_snapshot is None:
        return
    # Attribution can fail even if all sources respond.
    gpus = overall.newest_snapshot.devices
    if gpus and all(gpu.attribution is None for gpu in gpus):
        yield "nvml: which of them are the engine's is not known: name them with --gpus"


def _count_requests(outcomes: Counter[Outcome]) -> dict[str, int]:
    counts = {"began": outcomes.total()}
    for outcome in Outcome:
        counts[str(outcome)] = outcomes[outcome]
    return counts


def _describe_stage(stage: Stage) -> dict[str, Any]:
    """Return the part of the report's data that describes a step."""
    tally = stage.tally
    # without token counts for some answers, the sums would be too low
    tokens = None
    prompt_tokens = None
    if tally.uncounted_answers == 0:
        tokens = tally.generation_tokens
        prompt_tokens = tally.prompt_tokens
    return {
        "share": stage.share,
        "clients": stage.clients,
        "seconds": stage.seconds,
        "streams_most": tally.most_streams,
        "requests": _count_requests(tally.outcomes),
        "time_to_first_token_seconds": _read_quantiles(tally.first_token_seconds),
        "time_per_output_token_seconds": _read_quantiles(tally.per_token_seconds),
        "inter_token_seconds": _read_quantiles(tally.inter_token_seconds),
        "end_to_end_seconds": _read_quantiles(tally.end_to_end_seconds),
        "prompt_tokens": prompt_tokens,
        "generation_tokens": tokens,
        "generation_tokens_per_second": _divide(tokens, tally.served_seconds),
        "offered_requests_per_second": stage.rate,
        "requests_per_second": _divide(tally.outcomes[Outcome.SUCCEEDED], tally.served_seconds),
        "own_delay_seconds": _read_quantiles(tally.own_delay_seconds),
        "engine": _describe_engine(stage.observation),
        "gpus": [
            {
                "gpu": int(index),
                "uuid": uuid,
                "held_most_bytes": stage.observation.gpu_bytes[index, uuid].highest,
                "bytes_per_running_request": stage.observation.find_bytes_per_request(
                    (index, uuid)
                ),
            }
            for index, uuid in sorted(stage.observation.gpu_bytes)
        ],
        "host": [
            {"process": role, "most_bytes": summary.highest}
            for (role,), summary in stage.observation.host_bytes.items()
        ],
    }


def _divide(count: float | None, divisor: float | None) -> float | None:
    """Return a quotient, or None if either figure is unknown or 0."""
    if not count or not divisor:
        return None
    return count / divisor


def _describe_engine(observation: LoadObservation) -> dict[str, float | None]:
    """Return the engine's highest figures under load, as data for --json."""
    return {
        "running_most": _find_highest(observation, catalog.ENGINE_RUNNING),
        "waiting_most": _find_highest(observation, catalog.ENGINE_WAITING),
        "kv_used_ratio_most": _find_highest(observation, catalog.ENGINE_KV_USED),
        "preemptions": observation.count_growth(catalog.ENGINE_PREEMPTIONS),
    }


def _find_highest(observation: LoadObservation, metric: Metric) -> float | None:
    """Return the highest value of a metric, or None if it was never sampled."""
    summary = observation.find_engine_figure(metric)
    return None if summary is None else summary.highest


def _describe_gpus(overall: LoadObservation, detector: LeakReplay) -> list[dict[str, Any]]:
    """Return each GPU's memory under load, as data for --json."""
    return [
        {
            "gpu": int(index),
            "uuid": uuid,
            **_describe_memory(summary, overall, detector.course(uuid)),
        }
        for (index, uuid), summary in sorted(overall.gpu_bytes.items())
    ]


def _describe_host(overall: LoadObservation, detector: LeakReplay) -> list[dict[str, Any]]:
    return [
        {"process": role, **_describe_memory(summary, overall, detector.course(role))}
        for (role,), summary in sorted(overall.host_bytes.items())
    ]


def _describe_memory(
    summary: SeriesSummary, overall: LoadObservation, course: LeakCourse
) -> dict[str, Any]:
    """Return the memory of a GPU or role, and the leak detector's verdict.

    Figures per request are None if no request finished or their number is unknown.
    """
    delta_bytes = summary.newest - summary.start
    finished = overall.count_growth(catalog.ENGINE_FINISHED)
    delta_per_thousand = None
    if finished:
        delta_per_thousand = 1000 * delta_bytes / finished
    leak_per_thousand = None
    if course.last_alarm is not None and course.last_alarm.bytes_per_request is not None:
        leak_per_thousand = 1000 * course.last_alarm.bytes_per_request
    verdict, reason = judge_course(course, overall.seconds)
    return {
        "before_bytes": summary.start,
        "most_bytes": summary.highest,
        "after_bytes": summary.newest,
        "delta_bytes": delta_bytes,
        "requests_finished": finished,
        "delta_bytes_per_thousand_requests": delta_per_thousand,
        "verdict": verdict,
        "reason": reason,
        "leak_state": course.state,
        "leak_bytes_per_thousand_requests": leak_per_thousand,
    }


def _read_quantiles(values: Histogram) -> dict[str, float | None]:
    return {name: values.quantile(share) for name, share in QUANTILES.items()}
