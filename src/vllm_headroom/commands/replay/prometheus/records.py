"""A trace's records out of the history that a Prometheus server keeps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from vllm_headroom.commands.progress import followed
from vllm_headroom.commands.replay.prometheus.api import Api, Series
from vllm_headroom.commands.replay.prometheus.find import MOST_STEPS, find_sources
from vllm_headroom.commands.replay.prometheus.join import Source, read
from vllm_headroom.commands.replay.prometheus.text import Span, matcher, span_between

_LONGEST_PAGE_MS: Final = 6 * 3600 * 1000
"""What is held in memory at once: a page of 8 GPUs and their engine at steps of 15 s is 5 MB of JSON."""

_NEARLY: Final = 1.1
"""The interval of scrapes is known no better: they are counted."""


def records_from(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what a trace would hold of the time asked for, in its order and without its header.

    A side of which nothing is known at a time is null there. A value is at most one and a half scrape intervals old.
    Raises BadInput, on the first record at the earliest.
    """
    span = span_between(args.start, args.end, args.step, time.time())
    both, gpu, engine = (
        tuple(matcher(option, text) for text in texts)
        for option, texts in (
            ("--match", args.match),
            ("--match-gpu", args.match_gpu),
            ("--match-engine", args.match_engine),
        )
    )
    with Api(args.from_prometheus, bearer_token_file=args.bearer_token_file, ca_file=args.ca_file) as api:
        sources = find_sources(api, span, both + gpu, both + engine)
        if sources[0].interval_ms > span.step_ms * _NEARLY:
            span = replace(span, step_ms=sources[0].interval_ms)
        pages = span.pages(min(MOST_STEPS, _LONGEST_PAGE_MS // span.step_ms))
        shown = followed(pages, "Reading history", len(pages), lambda _: 1, patience_seconds=0.0)
        for page in shown:
            yield from _records(page, [(source, read(api, source, page)) for source in sources])


def _records(page: Span, sides: Iterable[tuple[Source, Sequence[Series]]]) -> Iterator[dict[str, Any]]:
    sides = tuple(sides)
    for time_ms in page.times():
        record: dict[str, Any] = {"t": time_ms / 1000, "gpus": None, "engines": None, "processes": None}
        for source, found in sides:
            values = [(series, series.values[time_ms]) for series in found if time_ms in series.values]
            record[source.kind.side] = source.kind.sample(values) or None
        yield record
