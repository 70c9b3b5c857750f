"""Histories of engines other than vLLM, read by their profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.recorded import OTHERS
from tests.fakes.prometheus_server import PrometheusServer
from tests.unit.commands.replay.prometheus.history import TARGET, add_dcgm, level, records, scraped
from vllm_headroom.model import EnginePage
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.trace import parse_snapshot

PAGES: Final = sorted(OTHERS.glob("*.prom"))
TELL_NO_LOAD: Final = {"dynamo-component"}
KEPT: Final = ("running", "waiting", "finished_total", "kv_used_ratio")
"""What a history is queried for, besides whether the engine is awake."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_history_says_what_the_page_says(server: PrometheusServer, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name if f"\n{sample.name}" in text else sample.name.removesuffix("_total")  # the parser's own
            server.add(name, scraped(20, level(sample.value)), **{**sample.labels, **TARGET})
    read = parse_engines(text)
    assert isinstance(read, EnginePage)
    if page.stem in TELL_NO_LOAD:
        with pytest.raises(BadInput, match="no engine in"):
            records(server, 20)
        return

    snapshot = parse_snapshot(records(server, 20)[40])
    replayed = snapshot.engines
    assert isinstance(replayed, EnginePage)
    assert [(engine.model_name, engine.engine) for engine in replayed.engines] == [
        (engine.model_name, engine.engine) for engine in read.engines
    ]
    for ours, theirs in zip(replayed.engines, read.engines, strict=True):
        for name in KEPT:
            assert getattr(ours, name) == getattr(theirs, name), name
