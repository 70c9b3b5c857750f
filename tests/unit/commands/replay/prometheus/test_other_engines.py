"""Histories of engines other than vLLM, read by their profiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.prometheus_server import PrometheusServer
from tests.unit.commands.replay.prometheus.history import TARGET, add_dcgm, level, records, scraped


@pytest.fixture
def server() -> Iterator[PrometheusServer]:
    with PrometheusServer() as server:
        add_dcgm(server, 20)
        yield server


def test_sglang_is_read_by_the_total_and_by_the_sum_of_its_parts(server: PrometheusServer) -> None:
    rank = {**TARGET, "model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    for priority, count in (("", 6), ("0", 4), ("5", 2)):
        server.add("sglang:num_running_reqs", scraped(20, level(count)), priority=priority, **rank)
    server.add("sglang:full_token_usage", scraped(20, level(0.5)), priority="", **rank)
    for streaming, count in (("true", 30), ("false", 12)):
        mine = {**TARGET, "model_name": "m", "is_streaming": streaming}
        server.add("sglang:num_requests_total", scraped(20, level(count)), **mine)

    [engine] = records(server, 20)[40]["engines"]

    assert engine == {"model_name": "m", "engine": "0", "running": 6, "finished_total": 42, "kv_used_ratio": 0.5}


def test_tgi_is_read_without_labels_and_its_cache_by_two_series(server: PrometheusServer) -> None:
    for name, value in (
        ("tgi_batch_current_size", 5),
        ("tgi_request_success", 91),
        ("tgi_batch_current_max_tokens", 4096),
        ("tgi_batch_max_total_tokens", 16384),
    ):
        server.add(name, scraped(20, level(value)), **TARGET)

    [engine] = records(server, 20)[40]["engines"]

    assert (engine["running"], engine["finished_total"], engine["kv_used_ratio"]) == (5, 91, 0.25)


def test_llama_cpp_counts_no_finished_requests(server: PrometheusServer) -> None:
    server.add("llamacpp:requests_processing", scraped(20, level(2)), **TARGET)

    [engine] = records(server, 20)[40]["engines"]

    assert engine == {"model_name": "llama_cpp", "engine": "0", "running": 2}
