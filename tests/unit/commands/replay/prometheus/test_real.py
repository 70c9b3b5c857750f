"""The same against a real Prometheus, where one is installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.unit.commands.replay.prometheus.history import MODEL, TARGET, UUID, lazily
from tests.unit.commands.replay.prometheus.real_prometheus import (
    INSTALLED,
    running_prometheus,
    write_blocks,
    write_series,
)
from vllm_headroom_tools.bad_input import BadInput

pytestmark = pytest.mark.skipif(not INSTALLED, reason="prometheus and promtool are not installed")

MIB = 2**20
SECONDS = 2 * 3600
STEP = 15
GAP = range(3600, 4200)
AFTER = 7.213


@dataclass(frozen=True, kw_only=True)
class History:
    url: str
    begin: int


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    """Two hours of a leak, by this exporter on one node and by DCGM and vLLM on another, with ten minutes' gap."""
    folder = tmp_path_factory.mktemp("prometheus")
    begin = int(time.time()) // STEP * STEP - SECONDS - 600
    scrapes = [place for place in range(0, SECONDS + 1, STEP) if place not in GAP]
    lines: dict[str, list[str]] = {}

    def add(name: str, /, slope: float, base: float, **labels: str) -> None:
        write_series(lines, name, ((begin + place + AFTER, base + slope * place) for place in scrapes), labels)

    own = {"gpu": "0", "uuid": UUID, "instance": "node-a:9839", "job": "headroom"}
    add("headroom_gpu_memory_total_bytes", 0, 1000 * MIB, **own)
    add("headroom_gpu_memory_used_bytes", MIB / STEP, 100 * MIB, **own)
    add("headroom_gpu_memory_held_bytes", MIB / STEP, 90 * MIB, **own, holder="engine")
    add("headroom_gpu_info", 0, 1, **own, attribution="process", name="H200")
    add("headroom_engine_requests_running", 0, 4, **MODEL, instance="node-a:9839", job="headroom")
    add("headroom_engine_requests_finished_total", 2, 0, **MODEL, instance="node-a:9839", job="headroom")
    add("headroom_host_memory_bytes", 0, 5 * MIB, process="worker", instance="node-a:9839", job="headroom")
    dcgm = {"gpu": "1", "UUID": UUID, "instance": "node-b:9400", "job": "dcgm", "Hostname": "b"}
    add("DCGM_FI_DEV_FB_USED", 1 / STEP, 100, **dcgm)
    add("DCGM_FI_DEV_FB_FREE", -1 / STEP, 880, **dcgm)
    add("DCGM_FI_DEV_FB_RESERVED", 0, 20, **dcgm)
    for pod in ("vllm-0", "vllm-1"):
        target = {**TARGET, "pod": pod, "instance": f"{pod}:8000"}
        add("vllm:num_requests_running", 0, 4, **MODEL, **target)
        for reason in ("stop", "length"):
            add("vllm:request_success_total", 1, 0, **MODEL, **target, finished_reason=reason)
        add("process_start_time_seconds", 0, begin - 100, **target)
    blocks = write_blocks(folder, lines)
    with running_prometheus(folder, blocks) as url:
        yield History(url=url, begin=begin)


def records(history: History, *words: str, start: int = 0, end: int = SECONDS) -> list[dict[str, Any]]:
    span = ("--start", str(history.begin + start), "--end", str(history.begin + end))
    return list(lazily(history.url, *span, *words))


def test_the_series_of_this_exporter_come_back_as_they_went(history: History) -> None:
    record_list = records(history)

    assert [record["t"] for record in record_list] == [history.begin + place for place in range(0, SECONDS + 1, STEP)]
    assert record_list[101] == {
        "t": history.begin + 1515,
        "gpus": [
            {"gpu": 0, "uuid": UUID, "total": 1000 * MIB, "used": 200 * MIB, "reserved": None, "engine": 190 * MIB}
            | {"other": None}
        ],
        "engines": [{**MODEL, "running": 4, "finished_total": 3000}],
        "processes": [{"role": "worker", "rss": 5 * MIB}],
    }


def test_a_gap_is_no_longer_filled_after_one_and_a_half_scrapes(history: History) -> None:
    away = [record["t"] - history.begin for record in records(history) if record["gpus"] is None]

    assert away == [0, *range(GAP.start + 15, GAP.stop + 1, STEP)]


def test_dcgm_and_vllm_come_back_as_they_went(history: History) -> None:
    record = records(history, "--match", 'job!="headroom"', "--match-engine", 'pod="vllm-1"')[101]

    gpu, engine = record["gpus"][0], record["engines"][0]
    assert (gpu["gpu"], gpu["total"], gpu["used"], gpu["reserved"]) == (1, 1000 * MIB, 200 * MIB, 20 * MIB)
    assert (engine["running"], engine["finished_total"], engine["started_at"]) == (4, 3000, history.begin - 100)


def test_two_pods_alike_are_refused(history: History) -> None:
    with pytest.raises(BadInput, match=r"pod is \"vllm-0\" or \"vllm-1\""):
        records(history, "--match", 'job!="headroom"')


def test_a_span_of_two_pages_is_read_at_the_steps_of_the_scrapes(history: History) -> None:
    record_list = records(history, "--step", "1s", start=-8 * 3600)

    assert [record["t"] - history.begin for record in record_list] == list(range(-8 * 3600, SECONDS + 1, STEP))
    assert sum(record["gpus"] is not None for record in record_list) == (SECONDS - 600) // STEP


def test_a_matcher_prometheus_does_not_understand_is_answered_in_its_words(history: History) -> None:
    with pytest.raises(BadInput, match=r"answers 400 Bad Request to a query: .*error parsing regexp"):
        records(history, "--match", 'job=~"("')


def test_a_span_before_the_history_has_nothing(history: History) -> None:
    with pytest.raises(BadInput, match=f"no GPU in {history.url} from "):
        records(history, start=-7200, end=-3600)
