from __future__ import annotations

import pytest
from prometheus_client.samples import Sample

from vllm_headroom.model import Failure
from vllm_headroom.parse import exposition
from vllm_headroom.parse.exposition import check_page, parse_samples
from vllm_headroom.scrape.proc.node import MOST_NODE_ENGINES
from vllm_headroom.vocabulary import Reason, Source

WANTED = "vllm:(?:num_requests_running|cache_config_info)|process_start_time_seconds"


@pytest.mark.parametrize(
    ("page", "quoted"),
    [
        ("<!DOCTYPE html>\n<html><body>Log in</body></html>\n", "'<!DOCTYPE html> <html><body>Log in</body></html>'"),
        ('{"error": "unauthorized"}', '\'{"error": "unauthorized"}\''),
        ("[]\n", "'[]'"),
        ("Not Found", "'Not Found'"),
        ("# just a remark\n", "'# just a remark'"),
        ("\x8b\x08\x00", "'\\x8b\\x08\\x00'"),
    ],
)
def test_a_page_without_a_line_of_metrics_is_quoted_in_the_failure(page: str, quoted: str) -> None:
    assert check_page(page) == Failure(
        source=Source.ENGINE,
        reason=Reason.NOT_METRICS,
        message=f"The engine's page is not metrics, it starts with {quoted}: "
        "point HEADROOM_ENGINE_URL at vLLM's own /metrics, past any proxy that wants a login.",
    )


def test_a_long_foreign_page_is_quoted_in_part() -> None:
    failure = check_page("<html>" + "x" * 10_000)

    assert failure is not None
    assert f"'<html>{'x' * 54}…'" in failure.message


@pytest.mark.parametrize("page", ["", "\n", " \n\n"])
def test_an_empty_page_is_a_failure(page: str) -> None:
    failure = check_page(page)

    assert failure is not None
    assert failure.reason is Reason.NOT_METRICS
    assert failure.message.startswith("The engine's page is empty: ")


@pytest.mark.parametrize(
    "line",
    [
        "# HELP up Is it up.",
        "# TYPE up gauge",
        "# EOF",
        "up 1",
        "up NaN",
        "up -Inf",
        "up +1.5e-07 1700000000000",
        "up\t.5 ",
        'vllm:up{a="}",b="\\"} x"} 3.0',
        "up 1\r",
    ],
)
def test_one_line_of_metrics_makes_a_page(line: str) -> None:
    assert check_page(f"\n{line}\n") is None


def test_a_page_whose_last_line_does_not_end_is_cut_off() -> None:
    assert check_page('# TYPE up gauge\nup 1\nvllm:num_requests_running{engine="0",mod') == Failure(
        source=Source.ENGINE,
        reason=Reason.INCOMPLETE,
        message="The engine's page is cut off, it ends with 'vllm:num_requests_running{engine=\"0\",mod': "
        "look for a proxy that limits the answer, or an engine that died in the middle of it.",
    )


def test_the_end_mark_of_openmetrics_ends_a_page_without_a_line_feed() -> None:
    assert check_page("up 1\n# EOF") is None


def test_only_samples_of_the_wanted_names_come_out() -> None:
    page = (
        "process_start_time_seconds 5.0\n"
        "# HELP vllm:num_requests_running Number of requests.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model_name="m"} 3.0\n'
        'vllm:num_requests_running_created{model_name="m"} 1.7e9\n'
        'vllm:num_requests_running_total{model_name="m"} 4.0\n'
        'not_vllm:num_requests_running{model_name="m"} 5.0\n'
        'other{text="vllm:num_requests_running 6"} 6.0\n'
    )
    samples = parse_samples(page, WANTED)

    assert not isinstance(samples, Failure)
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        ("process_start_time_seconds", {}, 5.0),
        ("vllm:num_requests_running", {"model_name": "m"}, 3.0),
    ]


def test_labels_with_escapes_braces_and_commas_are_read_right() -> None:
    samples = parse_samples('vllm:num_requests_running{model_name="a\\"b\\\\c\\n,}{"} 1 1700000000000\n', WANTED)

    assert not isinstance(samples, Failure)
    assert [(sample.labels, sample.value) for sample in samples] == [({"model_name": 'a"b\\c\n,}{'}, 1.0)]


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running x",
        'vllm:num_requests_running{model_name="m} 1',
        'vllm:num_requests_running{model_name="m",model_name="n"} 1',
        'vllm:num_requests_running{engine="0", ="m"} 1',
    ],
)
def test_a_wanted_line_that_cannot_be_parsed_is_quoted_in_the_failure(line: str) -> None:
    assert parse_samples(f"up 1\nprocess_start_time_seconds 5.0\n{line}\n", WANTED) == Failure(
        source=Source.ENGINE,
        reason=Reason.MALFORMED,
        message=f"The engine's page has a line that is not Prometheus text, {line!r}: "
        "look for a proxy that rewrites the page, and report the line if there is none.",
    )


def test_an_unwanted_line_that_cannot_be_parsed_does_no_harm() -> None:
    samples = parse_samples("broken{ x\nprocess_start_time_seconds 5.0\n", WANTED)

    assert not isinstance(samples, Failure)
    assert [sample.value for sample in samples] == [5.0]


@pytest.mark.parametrize("length", [1, 10_000])
def test_a_line_that_comes_again_is_read_alike(length: int) -> None:
    page = f'vllm:num_requests_running{{model_name="{"m" * length}"}} 1\n'
    first_samples = parse_samples(page, WANTED)

    assert not isinstance(first_samples, Failure)
    assert first_samples == parse_samples(page, WANTED)
    assert [(sample.labels, sample.value) for sample in first_samples] == [({"model_name": "m" * length}, 1.0)]


def test_the_labels_of_as_many_engines_as_a_node_may_have_are_parsed_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_lines: list[str] = []
    parse_line = exposition._parse_whole

    def count_line(line: str) -> tuple[Sample, ...]:
        parsed_lines.append(line)
        return parse_line(line)

    monkeypatch.setattr(exposition, "_parse_whole", count_line)
    settings = "s" * 1000  # as long as vLLM's line with the settings of the KV cache

    def parse_all(value: int) -> int:
        parsed_lines.clear()
        for engine in range(MOST_NODE_ENGINES):
            labels = f'model_name="node-{engine}"'
            series = [f'vllm:num_requests_running{{{labels},reason="{number}"}} {value}' for number in range(24)]
            series.append(f'vllm:num_requests_running{{{labels},settings="{settings}"}} {value}')
            samples = parse_samples("\n".join(series) + "\n", WANTED)
            assert not isinstance(samples, Failure)
            assert [sample.value for sample in samples] == [value] * 25
        return len(parsed_lines)

    assert parse_all(1) == 25 * MOST_NODE_ENGINES
    assert parse_all(2) == 0
