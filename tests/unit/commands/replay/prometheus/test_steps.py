from __future__ import annotations

from tests.fakes.prometheus_server import PrometheusServer
from tests.unit.commands.replay.prometheus.history import BEGIN, add_dcgm, add_vllm, records


def test_steps_are_no_finer_than_the_scrapes_of_the_gpus(server: PrometheusServer) -> None:
    add_dcgm(server, 60, every=60)
    add_vllm(server, 60, every=30)

    record_list = records(server, 60)

    assert [record["t"] - BEGIN for record in record_list[:3]] == [0, 60, 120]
    assert all(record["gpus"] and record["engines"] for record in record_list)


def test_a_slower_engine_is_there_between_its_scrapes(server: PrometheusServer) -> None:
    add_dcgm(server, 60)
    add_vllm(server, 60, every=60)

    assert all(record["engines"] for record in records(server, 60))


def test_scrapes_at_different_moments_meet_at_every_step(server: PrometheusServer) -> None:
    add_dcgm(server, 60)
    add_vllm(server, 60, offset_seconds=11.3)

    assert all(record["gpus"] and record["engines"] for record in records(server, 60)[1:])


def test_pages_join_without_a_seam(server: PrometheusServer) -> None:
    add_dcgm(server, 20 * 60, every=300)
    add_vllm(server, 20 * 60, every=300)

    record_list = records(server, 20 * 60, "--step", "5m")

    assert [record["t"] for record in record_list] == [BEGIN + 300 * place for place in range(241)]
    assert all(record["gpus"] and record["engines"] for record in record_list)
    pages = {(form["start"], form["end"]) for form in server.forms if form["step"] == "300.000"}
    assert len(pages) == 4


def test_no_page_asks_for_more_points_than_prometheus_gives(server: PrometheusServer) -> None:
    add_dcgm(server, 20, every=1)
    add_vllm(server, 20, every=1)

    record_list = records(server, 240, "--step", "1s")

    assert len(record_list) == 240 * 60 + 1
    assert record_list[1200]["gpus"]
    assert record_list[1203]["gpus"] is None
