from __future__ import annotations

import pytest

from tests.fakes.prometheus_server import PrometheusServer
from tests.unit.commands.replay.prometheus.history import (
    BEGIN,
    MODEL,
    TARGET,
    UUID,
    add_dcgm,
    add_vllm,
    level,
    records,
    scraped,
)
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.trace import parse_snapshot

MIB = 2**20


def test_dcgm_and_vllm_make_a_record(server: PrometheusServer) -> None:
    add_dcgm(server, 20)
    add_vllm(server, 20)

    record_list = records(server, 20)

    assert [record["t"] for record in record_list] == [BEGIN + 15 * place for place in range(81)]
    assert record_list[40] == {
        "t": BEGIN + 600,
        "gpus": [
            {
                "gpu": 0,
                "uuid": UUID,
                "total": 81920 * MIB,
                "used": 40970 * MIB,
                "reserved": 500 * MIB,
                "engine": None,
                "other": None,
            }
        ],
        "engines": [
            {
                "model_name": "m",
                "engine": "0",
                "running": 4,
                "waiting": 1,
                "finished_total": 1200,
                "kv_used_ratio": 0.25,
                "started_at": BEGIN - 100,
            }
        ],
        "processes": None,
    }


def test_nvidia_gpu_exporter_has_the_index_in_a_series_of_its_own(server: PrometheusServer) -> None:
    add_vllm(server, 20)
    server.add("nvidia_smi_memory_used_bytes", scraped(20, level(3000)), uuid=UUID)
    server.add("nvidia_smi_memory_total_bytes", scraped(20, level(9000)), uuid=UUID)
    server.add("nvidia_smi_index", scraped(20, level(3)), uuid=UUID)

    assert records(server, 20)[5]["gpus"] == [
        {"gpu": 3, "uuid": UUID, "total": 9000, "used": 3000, "reserved": None, "engine": None, "other": None}
    ]


def test_its_own_series_come_first_and_tell_whose_the_memory_is(server: PrometheusServer) -> None:
    add_dcgm(server, 20)
    add_vllm(server, 20)
    gpu = {"gpu": "1", "uuid": UUID}
    server.add("headroom_gpu_memory_used_bytes", scraped(20, level(100)), **gpu)
    server.add("headroom_gpu_memory_total_bytes", scraped(20, level(1000)), **gpu)
    for holder, held_bytes in (("engine", 70), ("other", 20), ("unattributed", 10)):
        server.add("headroom_gpu_memory_held_bytes", scraped(20, level(held_bytes)), **gpu, holder=holder)
    server.add("headroom_engine_requests_running", scraped(20, level(2)), **MODEL)
    server.add("headroom_engine_requests_finished_total", scraped(20, lambda s: s), **MODEL)
    server.add("headroom_engine_awake", scraped(20, level(0)), **MODEL)
    server.add("headroom_host_memory_bytes", scraped(20, level(5000)), process="engine_core")
    server.add("headroom_host_swap_bytes", scraped(20, level(700)), process="engine_core")

    record = records(server, 20)[4]

    assert record["gpus"] == [
        {"gpu": 1, "uuid": UUID, "total": 1000, "used": 100, "reserved": None, "engine": 70, "other": 20}
    ]
    assert record["engines"] == [{**MODEL, "running": 2, "finished_total": 60, "awake": False}]
    assert record["processes"] == [{"role": "engine_core", "rss": 5000, "swap": 700}]


def test_a_gpu_that_was_not_taken_for_the_engines_is_left_out(server: PrometheusServer) -> None:
    server.add("headroom_engine_requests_running", scraped(20, level(2)), **MODEL)
    for place, attribution in enumerate(("process", "")):
        gpu = {"gpu": str(place), "uuid": f"GPU-{place}"}
        server.add("headroom_gpu_memory_used_bytes", scraped(20, level(100)), **gpu)
        server.add(
            "headroom_gpu_info", scraped(20, level(1)), **gpu, **({"attribution": attribution} if attribution else {})
        )

    assert [gpu["uuid"] for gpu in records(server, 20)[3]["gpus"]] == ["GPU-0"]


def test_every_record_is_one_a_trace_may_have(server: PrometheusServer) -> None:
    add_dcgm(server, 20)
    add_vllm(server, 10)

    assert list(map(parse_snapshot, records(server, 20)))


def test_a_side_that_was_not_scraped_is_null_and_not_filled_from_before(server: PrometheusServer) -> None:
    add_dcgm(server, 45)
    add_vllm(server, 15)
    add_vllm(server, 45, offset_seconds=1800)

    record_list = records(server, 45)
    has_engines = [record["engines"] is not None for record in record_list]

    assert has_engines == [record["t"] <= BEGIN + 915 or record["t"] >= BEGIN + 1800 for record in record_list]
    assert all(record["gpus"] for record in record_list)


def test_a_value_that_is_no_number_is_unknown(server: PrometheusServer) -> None:
    add_dcgm(server, 20)
    add_vllm(server, 20)
    server.add("vllm:engine_sleep_state", scraped(20, level(float("nan"))), **TARGET, **MODEL, sleep_state="awake")

    assert records(server, 20)[9]["engines"][0].get("awake") is None


def test_without_a_reserved_part_the_room_that_is_left_is_still_right(server: PrometheusServer) -> None:
    add_vllm(server, 20)
    server.add("DCGM_FI_DEV_FB_USED", scraped(20, level(100)), gpu="0", UUID=UUID)
    server.add("DCGM_FI_DEV_FB_FREE", scraped(20, level(28)), gpu="0", UUID=UUID)

    gpu = records(server, 20)[3]["gpus"][0]

    assert (gpu["total"] - gpu["used"], gpu["reserved"]) == (28 * MIB, None)


def test_no_gpu_says_what_was_looked_for(server: PrometheusServer) -> None:
    add_vllm(server, 20)

    with pytest.raises(BadInput) as caught:
        records(server, 20)

    assert str(caught.value) == (
        f"no GPU in {server.url} from 2025-10-09T08:53:20Z to 2025-10-09T09:13:20Z: looked for"
        " headroom_gpu_memory_used_bytes or DCGM_FI_DEV_FB_USED or nvidia_smi_memory_used_bytes"
    )


def test_no_engine_says_that_a_matcher_may_fit_one_side_only(server: PrometheusServer) -> None:
    add_dcgm(server, 20, Hostname="a")
    add_vllm(server, 20)

    with pytest.raises(BadInput) as caught:
        records(server, 20, "--match", "Hostname=a")

    assert str(caught.value) == (
        f'no engine in {server.url} from 2025-10-09T08:53:20Z to 2025-10-09T09:13:20Z with Hostname="a"'
        " (labels that only one side has go to --match-gpu or --match-engine): looked for"
        " headroom_engine_requests_running or vllm:num_requests_running or sglang:num_running_reqs"
        " or trtllm_num_requests_running or nv_trt_llm_request_metrics or lmdeploy:num_requests_running"
        " or tgi_batch_current_size"
        " or llamacpp:requests_processing or aphrodite:num_requests_running, beside DCGM_FI_DEV_FB_USED"
    )
