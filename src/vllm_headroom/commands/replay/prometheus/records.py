"""A trace's records out of the history that a Prometheus server keeps."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vllm_headroom.commands.replay.prometheus.api import Api, Series
from vllm_headroom.commands.replay.prometheus.find import MOST_STEPS, find_sources
from vllm_headroom.commands.replay.prometheus.join import Source, read
from vllm_headroom.commands.replay.prometheus.text import Span, matcher, span_between

_LONGEST_PAGE_MS: Final = 6 * 3600 * 1000
"""What is held in memory at once: a page of 8 GPUs and their engine at steps of 15 s is 5 MB of JSON."""

_NEARLY: Final = 1.1
"""The interval of scrapes is known no better: they are counted."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a replay from Prometheus; a value such as -24h is then none of an option's."""
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # noqa: SLF001 - as argparse has it from Python 3.14 on
    group = parser.add_argument_group(
        "history",
        "Reads this exporter's series, or DCGM's or nvidia_gpu_exporter's together with\n"
        "vLLM's own. A history is as coarse as the interval of its scrapes, and what\n"
        "happened between two of them is not in it.",
    )
    group.add_argument("--from-prometheus", metavar="URL", help="Prometheus, such as http://prometheus:9090")
    group.add_argument("--start", metavar="TIME", help="2026-01-31T08:00:00Z, seconds since the epoch, or -24h")
    group.add_argument("--end", metavar="TIME", default="now", help="the same, or now, which is the default")
    group.add_argument(
        "--step", metavar="TIME", default="15s", help="between samples: 15s, or the scrape interval where it is longer"
    )
    for option, whose in (("--match", "all"), ("--match-gpu", "the GPUs'"), ("--match-engine", "the engine's")):
        text = f"choose among {whose} series; may be given again"
        group.add_argument(option, metavar='LABEL="VALUE"', action="append", default=[], help=text)
    group.add_argument("--bearer-token-file", metavar="FILE", type=Path, help="a token for Prometheus")
    group.add_argument("--ca-file", metavar="FILE", type=Path, help="the authority behind its certificate, PEM")


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
        with contextlib.closing(_shown(pages)) as shown:
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


def _shown(pages: Sequence[Span]) -> Generator[Span]:
    """Yield the pages, with a bar on a terminal where rich is installed."""
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console  # noqa: PLC0415 - an optional extra
            from rich.progress import track  # noqa: PLC0415 - the same

            yield from track(pages, "Reading history", console=Console(stderr=True), transient=True)
            return
    yield from pages
