from __future__ import annotations

import pytest

from tests.fakes.prometheus_server import PrometheusServer
from tests.unit.commands.replay.prometheus.history import BEGIN, add_dcgm, add_vllm, level, records, scraped
from vllm_headroom_tools.bad_input import BadInput


def test_several_gpus_and_ranks_are_kept_apart(server: PrometheusServer) -> None:
    add_dcgm(server, 20)
    add_dcgm(server, 20, uuid="GPU-9", gpu="1")
    add_vllm(server, 20)
    add_vllm(server, 20, engine="1")

    record = records(server, 20)[7]

    assert [gpu["gpu"] for gpu in record["gpus"]] == [0, 1]
    assert [(engine["engine"], engine["running"]) for engine in record["engines"]] == [("0", 4), ("1", 4)]


def test_each_engine_has_the_start_of_its_own_target(server: PrometheusServer) -> None:
    add_dcgm(server, 20)
    add_vllm(server, 20)
    add_vllm(server, 20, offset_seconds=300, model_name="n", instance="10.0.0.2:8000")
    server.add("process_start_time_seconds", scraped(20, level(1)), job="node", instance="node-a:9100")

    starts = {engine["model_name"]: engine["started_at"] for engine in records(server, 20)[60]["engines"]}

    assert starts == {"m": BEGIN - 100, "n": BEGIN + 200}


def test_a_pod_that_followed_another_is_the_same_engine_started_again(server: PrometheusServer) -> None:
    add_dcgm(server, 20)
    add_vllm(server, 10)
    add_vllm(server, 20, offset_seconds=607, pod="vllm-1", instance="10.0.0.2:8000")

    engines = [record["engines"][0] for record in records(server, 20)]

    assert {engine["started_at"] for engine in engines} == {BEGIN - 100, BEGIN + 507}
    assert engines[40]["finished_total"] == 1200
    assert engines[-1]["finished_total"] < 1200


def test_two_engines_that_look_the_same_are_refused_with_the_labels_that_tell_them_apart(
    server: PrometheusServer,
) -> None:
    add_dcgm(server, 20)
    add_vllm(server, 20)
    add_vllm(server, 20, pod="vllm-1", instance="10.0.0.2:8000")

    with pytest.raises(BadInput) as caught:
        records(server, 20)

    assert str(caught.value) == (
        '2 series of vllm:num_requests_running{engine="0", model_name="m"} at once: choose one, as with '
        "--match-engine 'instance=\"10.0.0.2:8000\"'"
        ' (instance is "10.0.0.1:8000" or "10.0.0.2:8000"; pod is "vllm-0" or "vllm-1")'
    )
    assert records(server, 20, "--match-engine", 'pod="vllm-1"')[9]["engines"][0]["running"] == 4


def test_two_gpus_that_look_the_same_are_refused_with_the_option_for_gpus(server: PrometheusServer) -> None:
    add_vllm(server, 20)
    for instance in "12":
        add_dcgm(server, 20, GPU_I_ID=instance)

    with pytest.raises(BadInput, match=r"--match-gpu 'GPU_I_ID=\"2\"'"):
        records(server, 20)


def test_match_narrows_both_sides(server: PrometheusServer) -> None:
    add_dcgm(server, 20, node="a")
    add_dcgm(server, 20, uuid="GPU-9", node="b")
    add_vllm(server, 20, node="a")
    add_vllm(server, 20, node="b")

    record = records(server, 20, "--match", 'node="b"')[9]

    assert [gpu["uuid"] for gpu in record["gpus"]] == ["GPU-9"]
    assert len(record["engines"]) == 1
