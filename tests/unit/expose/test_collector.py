"""The published samples as a page."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.exposition import choose_encoder

from vllm_headroom import catalog
from vllm_headroom.expose.metrics import HeadroomCollector
from vllm_headroom.model import Published, Sample

BUILD = ("1.2.3", "abc", "3.11.7")


def collector(published: Published | None, now: float = 107.5) -> HeadroomCollector:
    return HeadroomCollector(lambda: published, lambda: now, BUILD)


def page(published: Published | None) -> str:
    return generate_latest(collector(published)).decode()


def own_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("headroom_")]


def test_before_the_first_sample_only_the_build_is_known() -> None:
    assert own_lines(page(None)) == ['headroom_build_info{python_version="3.11.7",revision="abc",version="1.2.3"} 1.0']


def test_samples_come_in_the_catalogues_order_with_their_age_at_the_scrape() -> None:
    published = Published(
        samples=(
            Sample(catalog.ENGINE_RUNNING, ("m", "0"), 3.0),
            Sample(catalog.SOURCE_FAILURES, ("engine", "timeout"), 2.0),
            Sample(catalog.ENGINE_RUNNING, ("m", "1"), 4.0),
        ),
        monotonic_seconds=100.0,
    )

    assert own_lines(page(published))[1:] == [
        'headroom_source_failures_total{reason="timeout",source="engine"} 2.0',
        "headroom_sample_age_seconds 7.5",
        'headroom_engine_requests_running{engine="0",model_name="m"} 3.0',
        'headroom_engine_requests_running{engine="1",model_name="m"} 4.0',
    ]


def test_when_the_last_incident_was_is_there_where_there_was_one() -> None:
    published = Published(samples=(), monotonic_seconds=100.0)
    incident = Sample(catalog.LAST_INCIDENT, (), 1_760_000_000.0)
    headroom_collector = HeadroomCollector(lambda: published, lambda: 107.5, BUILD, lambda: [incident])

    assert "headroom_last_incident_timestamp_seconds 1.76e+09" in own_lines(
        generate_latest(headroom_collector).decode()
    )
    assert "last_incident" not in "".join(own_lines(page(published)))


def test_hostile_label_values_are_escaped() -> None:
    name = 'a"b\\c\nd'
    published = Published(samples=(Sample(catalog.ENGINE_RUNNING, (name, "0"), 1.0),), monotonic_seconds=100.0)

    assert 'model_name="a\\"b\\\\c\\nd"' in page(published)


def test_openmetrics_has_the_same_series_and_ends_with_eof() -> None:
    published = Published(samples=(Sample(catalog.ENGINE_FINISHED, ("m", "0"), 9.0),), monotonic_seconds=100.0)

    encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
    text = encode(collector(published)).decode()

    assert 'headroom_engine_requests_finished_total{engine="0",model_name="m"} 9.0' in text
    assert text.endswith("# EOF\n")
