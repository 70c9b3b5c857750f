"""Render the report of a load as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm_headroom.model import name_device
from vllm_headroom.units import format_size
from vllm_headroom_tools.load.run import SHARES
from vllm_headroom_tools.load.stream import Outcome
from vllm_headroom_tools.load.tally import QUANTILES
from vllm_headroom_tools.terminal import join_paragraphs

ReportDocument = Mapping[str, Any]
"""The report as JSON, or a part of the report."""

Row = tuple[str, list[str]]
"""A label and one cell per step."""

OUTCOME_LABELS: Final = {
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
LATENCY_LABELS: Final = {
    "time_to_first_token_seconds": "to the first token (TTFT)",
    "time_per_output_token_seconds": "per token after it (TPOT)",
    "inter_token_seconds": "between two tokens (ITL)",
    "end_to_end_seconds": "to the end",
}
"""The label of each latency, by field. Names and meanings are the same as in vLLM's own benchmark.
"""

GROWTH_LABELS: Final = {"leaking": "LEAKING", "growing": "growing", "no_leak": "no leak"}
TIME_UNITS: Final = ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "us"))
"""The units of time. Each entry has the shortest time shown in the unit. The unit's length in
seconds and its name follow.
"""

NO_FIGURE: Final = "-"
"""The text that represents an unknown figure."""

NOTABLE_DELAY_SECONDS: Final = 0.05
"""If 1 % of this process's delays are longer, they affect its figures. The report then says so."""

LABEL_COLUMNS: Final = 32
CELL_COLUMNS: Final = 11


def render_document(document: ReportDocument) -> Iterator[str]:
    """Yield the lines of the report, without its headline."""
    memory = [*document["gpus"], *document["host"]]
    # remove duplicates, so that a sentence about several GPUs is shown once
    growths = dict.fromkeys(_format_growth(series) for series in memory)
    yield from join_paragraphs(
        (
            [f"{document['target']}, model {document['model']}: {document['asked']}."],
            [_format_row(row) for row in _list_rows(document)],
            [*(_format_memory(series) for series in memory), *growths],
            [f"Not read: {source}" for source in document["unread"]],
            _list_texts(document["said"]),
            _list_conclusions(document),
        )
    )


def _list_texts(texts: Sequence[ReportDocument]) -> list[str]:
    """Return a heading and a line for each error text.

    Without any texts, the list is empty.
    """
    if not texts:
        return []
    return [
        "Answers to the requests that did not succeed:",
        *(
            f"{text['count']:>7} x {OUTCOME_LABELS[text['outcome']]}: {text['text']}"
            for text in texts
        ),
    ]


def _format_row(row: Row) -> str:
    label, cells = row
    return f"{label:<{LABEL_COLUMNS}}" + "".join(f"{cell:>{CELL_COLUMNS}}" for cell in cells)


def _list_rows(document: ReportDocument) -> Iterator[Row]:
    """Yield the rows of the table of steps."""
    steps = document["steps"]
    yield from _list_request_rows(document)
    for field, label in LATENCY_LABELS.items():
        for quantile in QUANTILES:
            yield f"{label}, {quantile}", [_format_latency(step[field][quantile]) for step in steps]
    yield "tokens of a request, in + out", [_format_tokens(step) for step in steps]
    yield _build_row("tokens generated per second", steps, "generation_tokens_per_second")
    # The table has an offered rate only if a rate was given. Without a given rate, each client
    # sends its next request after an answer.
    if any(step["offered_requests_per_second"] for step in steps):
        yield _build_row("requests offered per second", steps, "offered_requests_per_second")
    yield _build_row("requests per second", steps, "requests_per_second")
    engines = [step["engine"] for step in steps]
    yield _build_row("running, at most", engines, "running_most")
    yield _build_row("waiting, at most", engines, "waiting_most")
    yield _build_row("KV cache used, at most", engines, "kv_used_ratio_most", _format_ratio)
    yield _build_row("preemptions", engines, "preemptions")
    yield from _list_gpu_rows(steps)


def _list_request_rows(document: ReportDocument) -> Iterator[Row]:
    """Yield the rows for each step's size and for its requests by outcome.

    An outcome that did not occur has no row, but success always has one.
    """
    steps = document["steps"]
    yield "step", [f"{step['share']:.0%}" for step in steps]
    yield "clients", [str(step["clients"]) for step in steps]
    yield "streams open at once", [str(step["streams_most"]) for step in steps]
    yield "seconds", [f"{step['seconds']:.0f}" for step in steps]
    yield "requests", [str(step["requests"]["began"]) for step in steps]
    for outcome, label in OUTCOME_LABELS.items():
        if document["requests"][outcome] or outcome is Outcome.SUCCEEDED:
            yield f"  {label}", [str(step["requests"][outcome]) for step in steps]


def _list_gpu_rows(steps: Sequence[ReportDocument]) -> Iterator[Row]:
    """Yield two rows for each GPU: its held memory, and the memory per running request."""
    indices: dict[str, int] = {}
    for step in steps:
        # A GPU may be missing in some steps, so rows are built by UUID.
        for gpu in step["gpus"]:
            indices[gpu["uuid"]] = gpu["gpu"]
    for uuid, index in indices.items():
        name = name_device(index, uuid)
        yield f"{name} held, at most", _format_gpu_sizes(steps, uuid, "held_most_bytes")
        per_request = _format_gpu_sizes(steps, uuid, "bytes_per_running_request")
        yield f"{name} held per running request", per_request


def _format_gpu_sizes(steps: Sequence[ReportDocument], uuid: str, field: str) -> list[str]:
    """Return a GPU's size in this field for each step.

    An unknown size is "-".
    """
    cells = []
    for step in steps:
        sizes_bytes = [gpu[field] for gpu in step["gpus"] if gpu["uuid"] == uuid]
        is_known = bool(sizes_bytes) and sizes_bytes[0] is not None
        cells.append(format_size(sizes_bytes[0]) if is_known else NO_FIGURE)
    return cells


def _build_row(
    label: str,
    parts: Sequence[ReportDocument],
    field: str,
    format_figure: Callable[[float], str] | None = None,
) -> Row:
    """Return a row with the value of `field` in each part.

    An unknown value is shown as "-". Each part is a step, or an object within a step.
    """
    format_known = format_figure or _format_number
    cells = []
    for part in parts:
        value = part[field]
        cells.append(NO_FIGURE if value is None else format_known(value))
    return label, cells


def _format_number(value: float) -> str:
    """Format a number with three digits.

    A whole number, or one of at least 100, has no fraction.
    """
    if value >= 100 or value == int(value):  # noqa: PLR2004 - three digits
        return f"{value:.0f}"
    return f"{value:.3g}"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.1%}"


def _format_latency(seconds: float | None) -> str:
    """Format a time with three digits in a suitable unit.

    Returns "-" if the time is unknown.
    """
    if seconds is None:
        return NO_FIGURE
    for shortest_seconds, unit_seconds, name in TIME_UNITS:
        if seconds >= shortest_seconds:
            return f"{seconds / unit_seconds:.3g} {name}"
    return NO_FIGURE


def _format_tokens(step: ReportDocument) -> str:
    """Return the tokens in an average prompt and answer, or "-" if unknown."""
    succeeded = step["requests"][Outcome.SUCCEEDED]
    if not succeeded or step["prompt_tokens"] is None:
        return NO_FIGURE
    prompt_tokens = step["prompt_tokens"] / succeeded
    answer_tokens = step["generation_tokens"] / succeeded
    return f"{prompt_tokens:.0f} + {answer_tokens:.0f}"


def _format_memory(series: ReportDocument) -> str:
    """Return a line about a GPU's or role's memory: before, maximum, after, and change."""
    delta_bytes = series["delta_bytes"]
    sign = "+" if delta_bytes >= 0 else ""
    change = f"{sign}{format_size(delta_bytes)}"
    rate_bytes = series["delta_bytes_per_thousand_requests"]
    if rate_bytes is not None:
        change += f", {format_size(rate_bytes)} per thousand requests"
    before = format_size(series["before_bytes"])
    highest = format_size(series["most_bytes"])
    after = format_size(series["after_bytes"])
    return f"{_name_series(series)}: {before} before, {highest} at most, {after} after: {change}"


def _name_series(series: ReportDocument) -> str:
    if "gpu" in series:
        return f"GPU {series['gpu']} ({series['uuid']})"
    return f"Host memory of {series['process']}"


def _format_growth(series: ReportDocument) -> str:
    """Return the detector's verdict on a GPU or role.

    "cannot tell" does not name the series.
    """
    if series["verdict"] == "cannot_tell":
        return f"Cannot tell whether it leaks: {series['reason']}"
    growth = GROWTH_LABELS[series["verdict"]]
    text = f"{_name_series(series)}: {growth}: {series['reason']}"
    leak_bytes = series["leak_bytes_per_thousand_requests"]
    if leak_bytes is not None:
        text += f", {format_size(leak_bytes)} per thousand requests by the detector"
    return text


def _list_conclusions(document: ReportDocument) -> Iterator[str]:
    """Yield the closing lines.

    The conclusions are on this process's delays, why the load ended early, and the trace.
    """
    delays_seconds = [step["own_delay_seconds"]["p99"] for step in document["steps"]]
    longest_seconds = max(filter(None, delays_seconds), default=0.0)
    if longest_seconds > NOTABLE_DELAY_SECONDS:
        yield (
            f"This process was short of CPU, up to {1000 * longest_seconds:.0f} ms late: "
            "the times contain this delay."
        )
    if document["interrupted"]:
        yield "The load was interrupted."
    elif len(document["steps"]) < len(SHARES):
        end = "with the engine" if document["engine_ended"] else "at --max-requests"
        yield f"The load ended {end}, before the other steps."
    samples = document["samples"]
    yield f"Trace of {samples} samples: vllm-headroom replay {document['trace']}"
