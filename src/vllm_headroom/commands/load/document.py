"""What a load came to, as the one object of `load --json`."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from vllm_headroom import catalog
from vllm_headroom.commands.load.answer import Outcome
from vllm_headroom.commands.load.observed import Labels, Observed
from vllm_headroom.commands.load.quantiles import Quantiles
from vllm_headroom.commands.load.report import Kind, Memory, Report
from vllm_headroom.commands.load.run import Step
from vllm_headroom.model import Metric

SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def document(report: Report) -> dict[str, Any]:
    """Return the object; None is what is unknown."""
    return {
        "verdict": report.verdict,
        "faults": list(report.faults),
        "interrupted": report.stopped,
        "target": report.target,
        "model": report.model,
        "asked": report.asked,
        "requests": _requests(report.outcomes),
        "said": [
            {"outcome": outcome, "text": text, "count": count} for (outcome, text), count in report.texts.most_common()
        ],
        "steps": [_step(step) for step in report.steps],
        "preemptions": report.preemptions,
        "gpus": [_memory(memory) for memory in report.memory if memory.kind is Kind.GPU],
        "host": [_memory(memory) for memory in report.memory if memory.kind is Kind.HOST],
        "unread": list(report.unread),
        "samples": report.samples,
        "trace": report.trace,
    }


def _requests(outcomes: Counter[Outcome]) -> dict[str, int]:
    return {"began": outcomes.total()} | {str(outcome): outcomes[outcome] for outcome in Outcome}


def _step(step: Step) -> dict[str, Any]:
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
    preemptions = observed.engine(catalog.ENGINE_PREEMPTIONS)
    return {
        "running_most": _most(observed, catalog.ENGINE_RUNNING),
        "waiting_most": _most(observed, catalog.ENGINE_WAITING),
        "kv_used_ratio_most": _most(observed, catalog.ENGINE_KV_USED),
        "preemptions": None if preemptions is None else preemptions.grown,
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


def _memory(memory: Memory) -> dict[str, Any]:
    gpu = {"gpu": int(memory.name), "uuid": memory.uuid} if memory.kind is Kind.GPU else {"process": memory.name}
    growth = memory.growth
    per_request = growth.bytes_per_request
    return gpu | {
        "before_bytes": memory.span.first,
        "most_bytes": memory.span.most,
        "after_bytes": memory.span.last,
        "delta_bytes": memory.delta_bytes,
        "requests_finished": memory.finished,
        "delta_bytes_per_thousand_requests": memory.bytes_per_thousand_requests,
        "verdict": growth.verdict,
        "reason": growth.reason,
        "leak_state": growth.state,
        "leak_bytes_per_thousand_requests": None if per_request is None else 1000 * per_request,
    }


def _quantiles(values: Quantiles) -> dict[str, float | None]:
    return {name: values.at(share) for name, share in SHARES.items()}
