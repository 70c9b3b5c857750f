"""The records of a trace, built from data in Prometheus."""

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

from msgspec.structs import replace

from vllm_headroom.units import to_datetime
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.progress import track
from vllm_headroom_tools.replay.prometheus.api import (
    PrometheusApi,
    Series,
    TimeSpan,
    build_span,
)
from vllm_headroom_tools.replay.prometheus.join import (
    DCGM_GPUS,
    ENGINES,
    OWN_ENGINES,
    OWN_GPUS,
    OWN_PROCESSES,
    SMI_GPUS,
    Exporter,
    Scraped,
    build_selector,
    read_series,
)

MOST_STEPS: Final = 10_000
"""The maximum number of steps in a query. Prometheus rejects more than 11,000 points per series."""

_STRIDE_MS: Final = 600_000
"""Our choice: the step of the queries that search for sources."""

_WINDOW_MS: Final = 595_000
"""The window over which samples are counted, which is slightly shorter than the stride.

Let the scrape interval be 5, 10, 15, 20, 30 or 60 s. Such a window then contains at most stride /
interval samples. This is true whether or not its ends are included.
"""

_GPUS: Final = (OWN_GPUS, DCGM_GPUS, SMI_GPUS)
_ENGINES: Final = (OWN_ENGINES, *ENGINES)
_HISTORIES: Final = (
    (OWN_GPUS, OWN_ENGINES),
    *((gpus, engine) for gpus in (DCGM_GPUS, SMI_GPUS) for engine in ENGINES),
)
"""The pairs of sources that a trace can be built from, best pair first.

Only this project's series show which process holds the memory.
"""


def find_sources(
    api: PrometheusApi,
    span: TimeSpan,
    gpu_matchers: tuple[str, ...],
    engine_matchers: tuple[str, ...],
) -> list[Scraped]:
    """Return the best sources in the span: GPUs, engines, and processes if there are any.

    Raises BadInput if the span has no source for the GPUs or for the engines.
    """
    # The search covers whole strides up to the span's end. It does not begin before the span's
    # start.
    start_ms = span.end_ms - (span.end_ms - span.start_ms) // _STRIDE_MS * _STRIDE_MS
    search = TimeSpan(start_ms=start_ms, end_ms=span.end_ms, step_ms=_STRIDE_MS)
    gpu_names = _find_present(api, search, _GPUS, gpu_matchers)
    engine_names = _find_present(api, search, (*_ENGINES, OWN_PROCESSES), engine_matchers)
    # The best pair comes first: this project's own series contain the most facts.
    for gpus, engines in _HISTORIES:
        if not gpu_names.intersection(gpus.lead) or not engine_names.intersection(engines.lead):
            continue
        sources = [
            _build_source(api, search, gpus, gpu_names, gpu_matchers),
            _build_source(api, search, engines, engine_names, engine_matchers),
        ]
        if engines is OWN_ENGINES and engine_names.intersection(OWN_PROCESSES.lead):
            processes = _build_source(api, search, OWN_PROCESSES, engine_names, engine_matchers)
            sources.append(processes)
        return sources

    begin = _format_time(span.start_ms)
    end = _format_time(span.end_ms)
    place = f"in {api.shown} from {begin} to {end}"
    if gpu_names:
        missing = _explain_missing("engine", place, _ENGINES, engine_matchers)
        raise BadInput(f"{missing}, beside {', '.join(sorted(gpu_names))}")
    raise BadInput(_explain_missing("GPU", place, _GPUS, gpu_matchers))


def _format_time(time_ms: int) -> str:
    moment = to_datetime(time_ms / 1000)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _find_present(
    api: PrometheusApi, search: TimeSpan, kinds: tuple[Exporter, ...], matchers: tuple[str, ...]
) -> frozenset[str]:
    """Return which of the exporters' leading metrics exist in the span."""
    selected = build_selector([name for kind in kinds for name in kind.lead], matchers)
    expression = f"count by (__name__) (last_over_time({selected}[{_WINDOW_MS}ms]))"
    return frozenset(
        series.name
        for page in search.pages(MOST_STEPS)
        for series in api.query_range(expression, page)
    )


def _build_source(
    api: PrometheusApi,
    search: TimeSpan,
    kind: Exporter,
    names: frozenset[str],
    matchers: tuple[str, ...],
) -> Scraped:
    """Build a source, and estimate its scrape interval from the highest number of samples."""
    lead = next(name for name in kind.lead if name in names)
    expression = f"max(count_over_time({build_selector((lead,), matchers)}[{_WINDOW_MS}ms]))"
    scrape_count = 1.0
    for page in search.pages(MOST_STEPS):
        for series in api.query_range(expression, page):
            scrape_count = max(scrape_count, max(series.values.values(), default=1.0))
    interval_ms = round(_STRIDE_MS / scrape_count)
    return Scraped(kind=kind, matchers=matchers, lead=lead, interval_ms=interval_ms)


def _explain_missing(
    side: str, place: str, kinds: tuple[Exporter, ...], matchers: tuple[str, ...]
) -> str:
    """Return the error message for missing GPUs or engines, with the metrics searched for."""
    wanted = " or ".join(kind.lead[0] for kind in kinds)
    if not matchers:
        return f"no {side} {place}: looked for {wanted}"
    advice = "labels that only one side has go to --match-gpu or --match-engine"
    return f"no {side} {place} with {', '.join(matchers)} ({advice}): looked for {wanted}"


_LONGEST_PAGE_MS: Final = 6 * 3600 * 1000
"""The maximum time span of a page, which is held in memory.

For 8 GPUs and their engine, a page is 5 MB of JSON. The step is then 15 s.
"""

_INTERVAL_ERROR: Final = 1.1
"""The scrape interval is computed from a count of scrapes. It may be too high by up to this factor.
"""


def read_records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the records of a trace that covers the span, without a header.

    In each record, a side without values at that time is None. The sides are the GPUs, engines and
    processes. Values are at most one and a half scrape intervals old. If the GPUs' scrape interval
    is longer than --step, it becomes the step. Raises BadInput if the data cannot be read or a side
    is missing.
    """
    span = build_span(args.start, args.end, args.step, time.time())
    gpu_matchers = (*args.match, *args.match_gpu)
    engine_matchers = (*args.match, *args.match_engine)
    api = PrometheusApi(
        args.from_prometheus, bearer_token_file=args.bearer_token_file, ca_file=args.ca_file
    )
    with closing(api):
        sources = find_sources(api, span, gpu_matchers, engine_matchers)
        gpu_interval_ms = sources[0].interval_ms
        # Steps shorter than the scrape interval would only repeat values.
        if gpu_interval_ms > span.step_ms * _INTERVAL_ERROR:
            span = replace(span, step_ms=gpu_interval_ms)
        pages = span.pages(min(MOST_STEPS, _LONGEST_PAGE_MS // span.step_ms))
        shown = track(pages, "Reading history", len(pages), lambda _: 1, patience_seconds=0.0)
        # The generator is closed here to erase the progress bar before an error is reported.
        with closing(shown):
            for page in shown:
                sides = [(source.kind, read_series(api, source, page)) for source in sources]
                for time_ms in page.times():
                    yield _build_record(sides, time_ms)


def _build_record(sides: list[tuple[Exporter, list[Series]]], time_ms: int) -> dict[str, Any]:
    """Return the trace record for one time; a side without values is None."""
    record: dict[str, Any] = {
        "t": time_ms / 1000,
        "gpus": None,
        "engines": None,
        "processes": None,
    }
    for kind, side_series in sides:
        values = [
            (series, series.values[time_ms]) for series in side_series if time_ms in series.values
        ]
        record[kind.side] = kind.sample(values) or None
    return record
