"""What `load --json` prints, in words for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from vllm_headroom.commands.load.run import SHARES
from vllm_headroom.commands.load.stream import Outcome
from vllm_headroom.commands.terminal import paragraphs
from vllm_headroom.model import called
from vllm_headroom.units import size

Found = Mapping[str, Any]
Row = tuple[str, Callable[[Found], str]]
"""A label, and the cell below each step."""

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
"""With the names that vLLM's own benchmark has for them, and means the same by."""

GROWTHS: Final = {
    "leaking": "LEAKING",
    "growing": "growing",
    "no_leak": "no leak",
}
UNITS: Final = ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "us"))
LABEL_WIDTH: Final = 32
CELL_WIDTH: Final = 11
UNKNOWN: Final = "-"
LATE_SECONDS: Final = 0.05
"""When this process is that late in one case of a hundred, its own delay shows in the figures."""


def text(found: Found) -> Iterator[str]:
    """Yield everything there is to tell, the steps side by side."""
    memory, steps = [*found["gpus"], *found["host"]], found["steps"]
    parts = (
        [f"{found['target']}, model {found['model']}: {found['asked']}."],
        [
            label.ljust(LABEL_WIDTH) + "".join(cell(step).rjust(CELL_WIDTH) for step in steps)
            for label, cell in _rows(steps, found["requests"])
        ],
        [*map(_memory, memory), *dict.fromkeys(map(_growth, memory))],
        [f"Not read: {each}" for each in found["unread"]],
        list(_said(found["said"])),
        list(_end(found)),
    )
    yield from paragraphs(parts)


def _rows(steps: Sequence[Found], requests: Found) -> Iterator[Row]:
    yield "step", lambda step: f"{step['share']:.0%}"
    yield "clients", lambda step: str(step["clients"])
    yield "streams open at once", lambda step: str(step["streams_most"])
    yield "seconds", lambda step: f"{step['seconds']:.0f}"
    yield "requests", lambda step: str(step["requests"]["began"])
    for outcome, name in NAMES.items():
        if requests[outcome] or outcome is Outcome.SUCCEEDED:
            yield f"  {name}", partial(_count, outcome)
    for field, name in LATENCIES.items():
        for share in ("p50", "p95", "p99"):
            yield f"{name}, {share}", partial(_latency, field, share)
    yield "tokens of a request, in + out", _tokens
    yield "tokens generated per second", lambda step: _number(step["generation_tokens_per_second"])
    yield "requests per second", lambda step: _number(step["requests_per_second"])
    yield "running, at most", lambda step: _number(step["engine"]["running_most"])
    yield "waiting, at most", lambda step: _number(step["engine"]["waiting_most"])
    yield "KV cache used, at most", lambda step: _share(step["engine"]["kv_used_ratio_most"])
    yield "preemptions", lambda step: _number(step["engine"]["preemptions"])
    for gpu, uuid in dict.fromkeys((gpu["gpu"], gpu["uuid"]) for step in steps for gpu in step["gpus"]):
        yield f"{called(gpu, uuid)} held, at most", partial(_gpu, uuid, "held_most_bytes")
        yield f"{called(gpu, uuid)} held per running request", partial(_gpu, uuid, "bytes_per_running_request")


def _count(outcome: Outcome, step: Found) -> str:
    return str(step["requests"][outcome])


def _latency(field: str, share: str, step: Found) -> str:
    seconds = step[field][share]
    if seconds is None:
        return UNKNOWN
    unit, name = next((unit, name) for least, unit, name in UNITS if seconds >= least)
    return f"{seconds / unit:.3g} {name}"


def _tokens(step: Found) -> str:
    served, prompt, generated = step["requests"][Outcome.SUCCEEDED], step["prompt_tokens"], step["generation_tokens"]
    return f"{prompt / served:.0f} + {generated / served:.0f}" if served and prompt is not None else UNKNOWN


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"  # noqa: PLR2004 - three digits


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _gpu(uuid: str, field: str, step: Found) -> str:
    value = next((gpu[field] for gpu in step["gpus"] if gpu["uuid"] == uuid), None)
    return UNKNOWN if value is None else size(value)


def _memory(series: Found) -> str:
    delta, rate = series["delta_bytes"], series["delta_bytes_per_thousand_requests"]
    change = f"{'+' if delta >= 0 else ''}{size(delta)}"
    told = "" if rate is None else f", {size(rate)} per thousand requests"
    before, most, after = (size(series[field]) for field in ("before_bytes", "most_bytes", "after_bytes"))
    return f"{_name(series)}: {before} before, {most} at most, {after} after: {change}{told}"


def _name(series: Found) -> str:
    return f"GPU {series['gpu']} ({series['uuid']})" if "gpu" in series else f"Host memory of {series['process']}"


def _growth(series: Found) -> str:
    if series["verdict"] == "cannot_tell":
        return f"Whether it leaks cannot be told: {series['reason']}"
    leak = series["leak_bytes_per_thousand_requests"]
    told = "" if leak is None else f", {size(leak)} per thousand requests by the detector"
    return f"{_name(series)}: {GROWTHS[series['verdict']]}: {series['reason']}{told}"


def _said(said: Sequence[Found]) -> Iterator[str]:
    if said:
        yield "What was said of those that did not succeed:"
    for each in said:
        yield f"{each['count']:>7} x {NAMES[each['outcome']]}: {each['text']}"


def _end(found: Found) -> Iterator[str]:
    late = [step["own_delay_seconds"]["p99"] for step in found["steps"]]
    worst = max((seconds for seconds in late if seconds is not None), default=0.0)
    if worst > LATE_SECONDS:
        yield f"This process was short of CPU, up to {1000 * worst:.0f} ms late to what came: times contain that."
    if found["interrupted"]:
        yield "It was interrupted."
    elif len(found["steps"]) < len(SHARES):
        yield "It ended at --max-requests, before the other steps."
    yield f"Trace of {found['samples']} samples: vllm-headroom replay {found['trace']}"
    reasons = "; ".join(found["faults"]) or _otherwise(found)
    yield f"{found['verdict'].replace('_', ' ').upper()}: {reasons}."


def _otherwise(found: Found) -> str:
    requests = found["requests"]
    if requests[Outcome.NOT_SENT]:
        return f"{requests[Outcome.NOT_SENT]} requests could not be sent by this machine"
    if found["interrupted"]:
        return f"it was interrupted after {requests[Outcome.SUCCEEDED]} requests had succeeded"
    if requests[Outcome.SUCCEEDED]:
        return f"{requests[Outcome.SUCCEEDED]} of {requests['began']} requests succeeded, none was out of memory"
    return "no request had the time to end"
