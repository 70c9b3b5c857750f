"""What a load came to, as the one object of `load --json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from vllm_headroom import catalog
from vllm_headroom.commands.load.command import Order
from vllm_headroom.commands.load.judge import faults, growth, verdict
from vllm_headroom.commands.load.observed import Labels, Observed, Span
from vllm_headroom.commands.load.run import Stage
from vllm_headroom.commands.load.stream import Outcome
from vllm_headroom.model import Failure, Metric
from vllm_headroom.trace.counter import Histogram
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.replay import Watch
from vllm_headroom.vocabulary import Source

SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
ENGINE_DIED: Final = "the engine died: its web server says so"
NOT_CHOSEN: Final = "it cannot be told which of them are the engine's: name them with --gpus"


def document(
    order: Order, model: str, steps: Sequence[Stage], whole: Observed, watch: Watch, *, stopped: bool
) -> dict[str, Any]:
    """Return the object, in which None is what is unknown; `whole` has seen all, and the detector in `watch` too."""
    outcomes = sum((step.tally.outcomes for step in steps), Counter[Outcome]())
    texts = sum((step.tally.texts for step in steps), Counter[tuple[Outcome, str]]())
    gpus = [
        {"gpu": int(index), "uuid": uuid} | _memory(span, whole, watch.course(uuid))
        for (index, uuid), span in sorted(whole.held.items())
    ]
    host = [
        {"process": role} | _memory(span, whole, watch.course(role)) for (role,), span in sorted(whole.host.items())
    ]
    ended = whole.ended or (ENGINE_DIED if any(step.tally.engine_dead for step in steps) else None)
    found = list(faults(outcomes, ended, (*gpus, *host), stopped=stopped))
    return {
        "verdict": verdict(outcomes, is_faulty=bool(found), stopped=stopped),
        "faults": found,
        "interrupted": stopped,
        "target": str(order.url),
        "model": model,
        "asked": str(order),
        "requests": _requests(outcomes),
        "said": [{"outcome": outcome, "text": text, "count": count} for (outcome, text), count in texts.most_common()],
        "steps": [_step(step) for step in steps],
        "preemptions": whole.grown(catalog.ENGINE_PREEMPTIONS),
        "gpus": gpus,
        "host": host,
        "unread": list(_unread(whole, str(order.page))),
        "samples": whole.samples,
        "trace": str(order.trace),
    }


def _requests(outcomes: Counter[Outcome]) -> dict[str, int]:
    return {"began": outcomes.total()} | {str(outcome): outcomes[outcome] for outcome in Outcome}


def _step(step: Stage) -> dict[str, Any]:
    tally, observed = step.tally, step.observed
    tokens = None if tally.uncounted else tally.generation_tokens
    return {
        "share": step.share,
        "clients": step.clients,
        "seconds": step.seconds,
        "streams_most": tally.most_streams,
        "requests": _requests(tally.outcomes),
        "time_to_first_token_seconds": _quantiles(tally.to_first),
        "time_per_output_token_seconds": _quantiles(tally.per_token),
        "inter_token_seconds": _quantiles(tally.between),
        "end_to_end_seconds": _quantiles(tally.to_end),
        "prompt_tokens": None if tally.uncounted else tally.prompt_tokens,
        "generation_tokens": tokens,
        "generation_tokens_per_second": _rate(tokens, tally.served_seconds),
        "requests_per_second": _rate(tally.outcomes[Outcome.SUCCEEDED], tally.served_seconds),
        "own_delay_seconds": _quantiles(tally.delays),
        "engine": _engine(observed),
        "gpus": [_gpu(labels, observed) for labels in sorted(observed.held)],
        "host": [{"process": role, "most_bytes": span.most} for (role,), span in observed.host.items()],
    }


def _rate(count: int | None, seconds: float) -> float | None:
    return count / seconds if count and seconds else None


def _engine(observed: Observed) -> dict[str, float | None]:
    return {
        "running_most": _most(observed, catalog.ENGINE_RUNNING),
        "waiting_most": _most(observed, catalog.ENGINE_WAITING),
        "kv_used_ratio_most": _most(observed, catalog.ENGINE_KV_USED),
        "preemptions": observed.grown(catalog.ENGINE_PREEMPTIONS),
    }


def _most(observed: Observed, metric: Metric) -> float | None:
    span = observed.engine(metric)
    return None if span is None else span.most


def _gpu(labels: Labels, observed: Observed) -> dict[str, Any]:
    index, uuid = labels
    return {
        "gpu": int(index),
        "uuid": uuid,
        "held_most_bytes": observed.held[labels].most,
        "bytes_per_running_request": observed.bytes_per_request(labels),
    }


def _memory(span: Span, whole: Observed, course: Course) -> dict[str, Any]:
    """Return one series over the whole run: how it changed, and what the detector says of it."""
    delta_bytes, finished = span.last - span.first, whole.grown(catalog.ENGINE_FINISHED)
    leak = None if course.last is None else course.last.bytes_per_request
    judged, reason = growth(course, whole.seconds)
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


def _unread(whole: Observed, page: str) -> Iterator[str]:
    for source, (count, failure) in whole.failures.items():
        why = f"{page} ({failure.reason})" if source is Source.ENGINE else failure.message
        yield f"{source} in {count} of {whole.samples} samples: {why}"
    gpus = () if whole.last is None or isinstance(whole.last.gpus, Failure) else whole.last.gpus
    if gpus and all(gpu.attribution is None for gpu in gpus):
        yield f"nvml: {NOT_CHOSEN}"


def _quantiles(values: Histogram) -> dict[str, float | None]:
    return {name: values.quantile(share) for name, share in SHARES.items()}
