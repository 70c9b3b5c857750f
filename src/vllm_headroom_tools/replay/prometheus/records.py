"""The records of a trace from the history in Prometheus."""

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

from msgspec.structs import replace

from vllm_headroom_tools.progress import track
from vllm_headroom_tools.replay.prometheus.api import PrometheusApi, TimeSpan, build_span
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
from vllm_headroom_tools.trace import BadInput

MOST_STEPS: Final = 10_000
"""Prometheus refuses a range query for more than 11,000 points per series."""

_STRIDE_MS: Final = 600_000
_WINDOW_MS: Final = 595_000
"""Samples are counted over slightly less than the stride: scrapes every 5, 10, 15, 20, 30 or 60 s then give at most
stride / interval, whether or not the window includes its ends."""

_GPUS: Final = (OWN_GPUS, DCGM_GPUS, SMI_GPUS)
_ENGINES: Final = (OWN_ENGINES, *ENGINES)
_HISTORIES: Final = (
    (OWN_GPUS, OWN_ENGINES),
    *((gpus, engine) for gpus in (DCGM_GPUS, SMI_GPUS) for engine in ENGINES),
)
"""The pairs, best first: only this exporter's series have the holder of memory."""


def find_sources(
    api: PrometheusApi,
    span: TimeSpan,
    gpu_matchers: tuple[str, ...],
    engine_matchers: tuple[str, ...],
) -> list[Scraped]:
    """Find the sources of the best history in the span, GPUs first; raises BadInput where a side is missing."""
    start_ms = span.end_ms - (span.end_ms - span.start_ms) // _STRIDE_MS * _STRIDE_MS
    look = TimeSpan(start_ms=start_ms, end_ms=span.end_ms, step_ms=_STRIDE_MS)
    gpu_names = _find_present(api, look, _GPUS, gpu_matchers)
    engine_names = _find_present(api, look, (*_ENGINES, OWN_PROCESSES), engine_matchers)
    for gpus, engines in _HISTORIES:
        if gpu_names.intersection(gpus.lead) and engine_names.intersection(engines.lead):
            sides = [(gpus, gpu_names, gpu_matchers), (engines, engine_names, engine_matchers)]
            if engines is OWN_ENGINES and engine_names.intersection(OWN_PROCESSES.lead):
                sides.append((OWN_PROCESSES, engine_names, engine_matchers))
            return [_build_source(api, look, *side) for side in sides]
    begin, end = (
        datetime.fromtimestamp(time_ms / 1000, UTC)
        .isoformat(timespec="seconds")
        .replace("+00:00", "Z")
        for time_ms in (span.start_ms, span.end_ms)
    )
    between = f"in {api.shown} from {begin} to {end}"
    if gpu_names:
        missing = _explain_missing("engine", between, _ENGINES, engine_matchers)
        raise BadInput(f"{missing}, beside {', '.join(sorted(gpu_names))}")
    raise BadInput(_explain_missing("GPU", between, _GPUS, gpu_matchers))


def _find_present(
    api: PrometheusApi, look: TimeSpan, kinds: tuple[Exporter, ...], matchers: tuple[str, ...]
) -> frozenset[str]:
    selected = build_selector([name for kind in kinds for name in kind.lead], matchers)
    expression = f"count by (__name__) (last_over_time({selected}[{_WINDOW_MS}ms]))"
    return frozenset(
        series.name
        for page in look.pages(MOST_STEPS)
        for series in api.query_range(expression, page)
    )


def _build_source(
    api: PrometheusApi,
    look: TimeSpan,
    kind: Exporter,
    names: frozenset[str],
    matchers: tuple[str, ...],
) -> Scraped:
    """Build a source with the shortest scrape interval in the span."""
    lead = next(name for name in kind.lead if name in names)
    expression = f"max(count_over_time({build_selector((lead,), matchers)}[{_WINDOW_MS}ms]))"
    found = [
        series for page in look.pages(MOST_STEPS) for series in api.query_range(expression, page)
    ]
    most = max((value for series in found for value in series.values.values()), default=1.0)
    return Scraped(
        kind=kind, matchers=matchers, lead=lead, interval_ms=round(_STRIDE_MS / max(most, 1.0))
    )


def _explain_missing(
    side: str, between: str, kinds: tuple[Exporter, ...], matchers: tuple[str, ...]
) -> str:
    wanted = " or ".join(kind.lead[0] for kind in kinds)
    if not matchers:
        return f"no {side} {between}: looked for {wanted}"
    advice = "labels that only one side has go to --match-gpu or --match-engine"
    return f"no {side} {between} with {', '.join(matchers)} ({advice}): looked for {wanted}"


_LONGEST_PAGE_MS: Final = 6 * 3600 * 1000
"""A page is held in memory: 8 GPUs and their engine at steps of 15 s are 5 MB of JSON."""

_NEARLY: Final = 1.1
"""The error of the scrape interval, which comes from a count of scrapes."""


def read_records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the records of a trace of the span, without a header; raises BadInput.

    A side without values at a time is null there. A value is at most one and a half scrape intervals old.
    """
    span = build_span(args.start, args.end, args.step, time.time())
    both, gpu, engine = (tuple(each) for each in (args.match, args.match_gpu, args.match_engine))
    api = PrometheusApi(
        args.from_prometheus, bearer_token_file=args.bearer_token_file, ca_file=args.ca_file
    )
    with closing(api):
        sources = find_sources(api, span, both + gpu, both + engine)
        if sources[0].interval_ms > span.step_ms * _NEARLY:
            span = replace(span, step_ms=sources[0].interval_ms)
        pages = span.pages(min(MOST_STEPS, _LONGEST_PAGE_MS // span.step_ms))
        shown = track(pages, "Reading history", len(pages), lambda _: 1, patience_seconds=0.0)
        for page in shown:
            sides = [(source.kind, read_series(api, source, page)) for source in sources]
            for time_ms in page.times():
                record: dict[str, Any] = {
                    "t": time_ms / 1000,
                    "gpus": None,
                    "engines": None,
                    "processes": None,
                }
                for kind, found in sides:
                    values = [
                        (series, series.values[time_ms])
                        for series in found
                        if time_ms in series.values
                    ]
                    record[kind.side] = kind.sample(values) or None
                yield record
