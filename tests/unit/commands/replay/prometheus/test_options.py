from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_headroom.inputs import show_value
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import build_parser
from vllm_headroom_tools.options import BadOptions, Value
from vllm_headroom_tools.replay.command import COMMAND, MATCHER, STEP, TIME
from vllm_headroom_tools.replay.prometheus.api import TimeSpan, build_span

NOW = 1_760_000_000.25


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2025-10-09T08:53:20Z", 1_760_000_000),
        ("2025-10-09T10:53:20+02:00", 1_760_000_000),
        ("2025-10-09T08:53:20.5Z", 1_760_000_000.5),
        ("1759999999", 1_759_999_999),
        ("-24h", NOW - 86_400),
        ("-1d12h", NOW - 129_600),
        ("-90", NOW - 90),
    ],
)
def test_a_time_is_a_date_or_epoch_seconds_or_a_while_ago(text: str, seconds: float) -> None:
    assert build_span(TIME(text), TIME(str(NOW + 1)), 15.0, NOW).start_ms == round(seconds * 1000)


def test_the_end_may_be_now() -> None:
    assert build_span(TIME("-1h"), TIME("now"), STEP("1m"), NOW) == TimeSpan(
        start_ms=1_759_996_400_250, end_ms=1_760_000_000_250, step_ms=60_000
    )


@pytest.mark.parametrize(("start", "end"), [("-1h", "-2h"), ("-1w9999999w", "now")])
def test_a_span_that_ends_before_it_begins_is_refused(start: str, end: str) -> None:
    with pytest.raises(BadInput, match=r"^--start is not a time before --end$"):
        build_span(TIME(start), TIME(end), 15.0, NOW)


def test_a_history_needs_a_start() -> None:
    with pytest.raises(
        BadInput, match=r"^--from-prometheus needs --start: a time such as 2026-01-31T08:00:00Z, or -24h$"
    ):
        build_span(None, TIME("now"), 15.0, NOW)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--start", "2025-10-09T08:53:20"),
        ("--start", "yesterday"),
        ("--end", "-1y"),
        ("--start", "9" * 400),
        ("--start", "-" + "9" * 400 + "d"),
        ("--step", "500ms"),
        ("--step", "soon"),
        ("--match", "vllm-0"),
        ("--match-gpu", '="a"'),
        ("--match-engine", "vllm:x=1"),
        ("--match", ""),
    ],
)
def test_what_cannot_be_understood_is_refused_with_what_is_accepted(option: str, text: str) -> None:
    kinds: dict[str, Value[Any]] = {"--start": TIME, "--end": TIME, "--step": STEP}

    with pytest.raises(BadOptions) as caught:
        build_parser(COMMAND, "replay").read([f"{option}={text}"])

    (line,) = caught.value.lines
    assert line == f"{option}: got {show_value(text)}, accepts {kinds.get(option, MATCHER).accepts}"


def test_every_mistake_is_reported_at_once() -> None:
    words = ["--from-prometheus", "http://p:9090", "--start", "yesterday", "--step", "soon", "--match", "vllm-0"]

    with pytest.raises(BadOptions) as caught:
        build_parser(COMMAND, "replay").read(words)

    assert [line.partition(":")[0] for line in caught.value.lines] == ["--start", "--step", "--match"]


@given(length=st.integers(0, 500), step=st.integers(1, 50), page_size=st.integers(1, 60))
def test_pages_are_the_span_in_parts(length: int, step: int, page_size: int) -> None:
    span = TimeSpan(start_ms=1000, end_ms=1000 + length, step_ms=step)

    pages = span.pages(page_size)

    assert [time for page in pages for time in page.times()] == list(span.times())
    assert max(len(page.times()) for page in pages) <= page_size


@pytest.mark.parametrize(
    ("text", "promql"),
    [
        ('pod="vllm-0"', 'pod="vllm-0"'),
        ("pod=vllm-0", 'pod="vllm-0"'),
        ("pod =~ vllm-.*", 'pod=~"vllm-.*"'),
        ("pod!='a'", "pod!='a'"),
        ('pod=a"b\\c', 'pod="a\\"b\\\\c"'),
        ('pod="a",x="b"', 'pod="\\"a\\",x=\\"b\\""'),
    ],
)
def test_a_matcher_gets_back_the_quotes_a_shell_took(text: str, promql: str) -> None:
    assert MATCHER(text) == promql


def test_the_command_takes_a_time_ago_as_a_value() -> None:
    words = ["--from-prometheus", "http://p:9090", "--start", "-24h", "--match", "a=b", "--match", "c=d"]

    args = build_parser(COMMAND, "replay").read(words)

    assert (args.start, args.end, args.step, args.match) == ((True, -86400.0), (True, 0.0), 15.0, ['a="b"', 'c="d"'])
