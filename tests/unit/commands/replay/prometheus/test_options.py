from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_headroom.commands.cli import parser_of
from vllm_headroom.commands.replay.command import COMMAND
from vllm_headroom.commands.replay.prometheus.text import Span, matcher, span_between
from vllm_headroom.trace.errors import BadInput

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
    assert span_between(text, str(NOW + 1), "15s", NOW).start_ms == round(seconds * 1000)


def test_the_end_may_be_now() -> None:
    assert span_between("-1h", "now", "1m", NOW) == Span(
        start_ms=1_759_996_400_250, end_ms=1_760_000_000_250, step_ms=60_000
    )


@pytest.mark.parametrize(
    ("start", "end", "step", "message"),
    [
        (None, "now", "15s", "--from-prometheus needs --start: a time such as 2026-01-31T08:00:00Z, or -24h"),
        ("2025-10-09T08:53:20", "now", "15s", "--start 2025-10-09T08:53:20: not a time, write 2026-01-31T08:00:00Z,"),
        ("yesterday", "now", "15s", "--start yesterday: not a time, "),
        ("-24", "-1y", "15s", "--end -1y: not a duration, write -15s, -1m, -24h or -7d"),
        ("-1h", "now", "500ms", "--step 500ms: history is read at steps of at least 1s"),
        ("-1h", "now", "soon", "--step soon: not a duration"),
        ("-1h", "-2h", "15s", "--start -1h is not a time before --end -2h"),
        ("-1w9999999w", "now", "15s", "is not a time before"),
        ("9" * 400, "now", "15s", "not a time"),
        ("-" + "9" * 400 + "d", "now", "15s", "not a duration"),
    ],
)
def test_a_span_that_cannot_be_is_refused(start: str | None, end: str, step: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        span_between(start, end, step, NOW)

    assert message in str(caught.value)


@given(length=st.integers(0, 500), step=st.integers(1, 50), most=st.integers(1, 60))
def test_pages_are_the_span_in_parts(length: int, step: int, most: int) -> None:
    span = Span(start_ms=1000, end_ms=1000 + length, step_ms=step)

    pages = span.pages(most)

    assert [time for page in pages for time in page.times()] == list(span.times())
    assert max(len(page.times()) for page in pages) <= most


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
    assert matcher("--match", text) == promql


@pytest.mark.parametrize("text", ["vllm-0", '="a"', "vllm:x=1", ""])
def test_what_is_no_matcher_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match='write it as label="value", with =, !=, =~ or !~'):
        matcher("--match", text)


def test_the_command_takes_a_time_ago_as_a_value() -> None:
    words = ["--from-prometheus", "http://p:9090", "--start", "-24h", "--match", "a=b", "--match", "c=d"]

    args = parser_of(COMMAND, "replay").read(words, {})

    assert (args.start, args.end, args.step, args.match) == ("-24h", "now", "15s", ["a=b", "c=d"])
