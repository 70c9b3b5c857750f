"""Parse the samples with selected names from Prometheus text."""

import re
from functools import lru_cache
from itertools import chain
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import Reason, Source

_EXPOSITION: Final = re.compile(
    r"^(?:# (?:HELP|TYPE|EOF)\b"
    r"|[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{.*\})?[ \t]+"  # a name and its labels
    r"[-+]?(?:\.?[0-9][0-9.eE+-]*|Inf|NaN)(?:[ \t]+-?[0-9]+)?[ \t\r]*$)",  # a value and a timestamp
    re.MULTILINE,
)
"""A comment or a sample in the text format. A page without a comment or a sample is not a metrics
page.
"""

MOST_SAMPLES: Final = 5000
"""The maximum number of samples read from a page; 150 engines have about this many."""

LONGEST_LINE: Final = 16 * 2**10
"""The maximum number of characters in a line. vLLM's longest line has 1,061 characters. A longest
line of only escapes takes 10 ms to parse.
"""

MOST_LABELS: Final = 128
"""The maximum number of labels in a line. vLLM's settings have 37."""

MOST_CHARACTERS: Final = 512 * 2**10
"""The maximum number of characters in all lines that are read. About 230 engines have this many.
The most expensive page possible took 0.4 s.
"""

ONE_SERVER: Final = (
    "point HEADROOM_ENGINE_URL at one vLLM server's own /metrics, not at a page that gathers many."
)

_EXCERPT_LENGTH: Final = 60
"""The number of characters that a message quotes from a foreign page. The characters are enough to
recognise a login page, but too few to fill a log.
"""

_MOST_SHORT_SERIES: Final = 2048
"""The maximum number of cached series of up to _LONGEST_SHORT_SERIES characters. The 64 engines
that a node's daemon watches at most have 1,216 of these.
"""

_LONGEST_SHORT_SERIES: Final = 256
"""The maximum number of characters in a short series. Most of vLLM's have 50 to 90."""

_MOST_LONG_SERIES: Final = 256
"""The maximum number of longer series that are cached. Each of a node's 64 engines has one: the
settings of its KV cache. With this number, the two caches cannot exceed 16 MiB.
"""

_LONGEST_LONG_SERIES: Final = 2048
"""The maximum number of characters in a cached series. A line of vLLM has up to 1.1 kB."""

_SERIES: Final = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?')
_PLAIN_VALUE: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?", re.ASCII)
"""The form of nearly all values; any other form is read by the library's parser."""


def check_page(page: str) -> Failure | None:
    """Return a failure if the page is empty, not metrics, or truncated.

    Returns None for any other page.

    A page is metrics if at least one line is in the text format. A page is truncated if its last
    line does not end in a line break.
    """
    if not page.strip():
        return refuse_page(
            "is empty: look at the engine's log, and for a proxy that answers in its place.",
            Reason.NOT_METRICS,
        )
    if not _EXPOSITION.search(page):
        return refuse_page(
            f"is not metrics, it starts with {_cut_excerpt(page)!r}: point HEADROOM_ENGINE_URL at"
            " vLLM's own /metrics, past any proxy that wants a login.",
            Reason.NOT_METRICS,
        )
    last_line = page[page.rfind("\n") + 1 :]  # not rpartition, which would copy the page
    if last_line.strip() not in ("", "# EOF"):
        return refuse_page(
            f"is cut off, it ends with {_cut_excerpt(last_line)!r}: look for a proxy that limits"
            " the answer, or an engine that died in the middle of it.",
            Reason.INCOMPLETE,
        )
    return None


def parse_samples(page: str, names_pattern: str) -> list[Sample] | Failure:
    """Return the samples whose name matches `names_pattern`, a regular expression, in page order.

    Returns the failure MALFORMED if a matching line cannot be parsed. Returns the failure
    OUT_OF_BOUNDS if the lines exceed a limit. Only matching lines are passed to prometheus-client's
    parser. The parser is slow but reads every label correctly. For one engine's page (51 kB),
    selecting and parsing these lines takes 0.14 ms. Parsing the whole page would take 5.5 ms.
    """
    lines = _select_lines(page, names_pattern)
    if isinstance(lines, Failure):
        return lines
    samples: list[Sample] = []
    for line in lines:
        try:
            samples += _parse_line(line)
        # OverflowError is raised if the line's timestamp does not fit into a float.
        except (ValueError, IndexError, OverflowError):
            # The parser's error names neither line nor column. The message therefore quotes the
            # line.
            return refuse_page(
                f"has a line that is not Prometheus text, {_cut_excerpt(line)!r}: look for a proxy"
                " that rewrites the page, and report the line if there is none.",
                Reason.MALFORMED,
            )
    return samples


def _select_lines(page: str, names_pattern: str) -> list[str] | Failure:
    """Return the lines to parse, or a failure if they exceed a limit.

    The limits are checked before parsing, so they also limit the cost of parsing.
    """
    # The check is line by line. An oversized page thus costs no more than a page at the limit.
    lines: list[str] = []
    characters = 0
    line_pattern = rf"((?:{names_pattern})[{{ \t].*)"
    first_line = re.match(line_pattern, page)
    # A pattern that starts with a line feed skips from line to line. A search with a line feed is
    # 3.5 times as fast as one with `^`.
    later_lines = re.finditer(rf"\n{line_pattern}", page)
    for match in chain([first_line] if first_line else [], later_lines):
        line = match[1]
        lines.append(line)
        characters += len(line)
        excess = None
        if len(line) > LONGEST_LINE:
            excess = (
                f"a line of {len(line)} characters, at most {LONGEST_LINE} are read:"
                f" {_cut_excerpt(line)!r}"
            )
        elif line.count('="') > MOST_LABELS:
            excess = f"a line of more than {MOST_LABELS} labels: {_cut_excerpt(line)!r}"
        elif len(lines) > MOST_SAMPLES or characters > MOST_CHARACTERS:
            excess = (
                f"more than {MOST_SAMPLES} series or {MOST_CHARACTERS} characters of those that are"
                " read"
            )
        if excess is not None:
            return refuse_page(f"has {excess}: {ONE_SERVER}")
    return lines


def refuse_page(problem: str, reason: Reason = Reason.OUT_OF_BOUNDS) -> Failure:
    """Return the failure for a page with this problem."""
    return Failure(source=Source.ENGINE, reason=reason, message=f"The engine's page {problem}")


def _parse_line(line: str) -> tuple[Sample, ...]:
    """Return the samples in a line, usually one; raise the parser's errors.

    The labels of previously parsed series are cached.
    """
    series, _, value = line.rpartition(" ")
    # Only the values change from page to page. Parsing the labels again would take most of the
    # time.
    if len(series) <= _LONGEST_LONG_SERIES and _PLAIN_VALUE.fullmatch(value):
        is_short = len(series) <= _LONGEST_SHORT_SERIES
        samples = _parse_short_series(series) if is_short else _parse_long_series(series)
        if samples:
            return tuple([Sample(sample.name, sample.labels, float(value)) for sample in samples])
    return _parse_whole(line)


def _parse_series(series: str) -> tuple[Sample, ...]:
    """Return the samples of a series, each with the value 0.

    A series is a name with or without labels. Returns an empty result for any other text. For
    example, the line may have a timestamp.
    """
    return _parse_whole(f"{series} 0") if _SERIES.fullmatch(series) else ()


_parse_short_series = lru_cache(maxsize=_MOST_SHORT_SERIES)(_parse_series)
_parse_long_series = lru_cache(maxsize=_MOST_LONG_SERIES)(_parse_series)


def _parse_whole(line: str) -> tuple[Sample, ...]:
    """Return the samples of a line, as parsed by the library."""
    return tuple(
        sample for family in text_string_to_metric_families(line) for sample in family.samples
    )


def _cut_excerpt(text: str) -> str:
    """Return the beginning of a text as a single line, for use in a message."""
    start = " ".join(text[: 4 * _EXCERPT_LENGTH].split())
    return start if len(start) <= _EXCERPT_LENGTH else start[:_EXCERPT_LENGTH] + "…"
