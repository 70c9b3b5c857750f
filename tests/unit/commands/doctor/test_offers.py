from __future__ import annotations

import pytest

from tests.contract.recorded import FOLDER, OTHERS
from tests.unit.commands.doctor.looking import RECORDED, Vllm, examined, lines
from vllm_headroom_tools.doctor.fixes import Check, Status

SGLANG = ('sglang:num_running_reqs{model_name="m"} 1', 'sglang:prompt_tokens_total{model_name="m"} 5')


def offers(metrics: str, name: str, **settings: str) -> Check:
    with Vllm(metrics) as server:
        return examined(ENGINE_URL=server.url, **settings)[name]


def read_recording(name: str) -> str:
    return (FOLDER / f"{name}.prom").read_text()


@pytest.mark.parametrize("version", ["0.13.0", "0.20.2", "0.32.0"])
def test_a_present_vllm_offers_all_that_is_needed(version: str) -> None:
    offer = offers(read_recording(f"vllm-{version}/load-waiting"), "engine_inputs")

    assert (offer.state, offer.absent, offer.fixes) == (Status.OK, (), ())
    assert "prefix_cache_hit_rate" in offer.details[0]


def test_what_an_older_vllm_does_not_offer_is_missing_with_its_series() -> None:
    offer = offers(read_recording("vllm-0.10.2.post2/load-waiting"), "engine_inputs")

    assert offer.state is Status.MISSING
    assert offer.text == "14 of 17 inputs offered, not sleep_state"
    assert offer.absent == ("headroom_engine_awake", "headroom_sleep_residue_bytes")
    assert lines(offer) == ["# 0.11.1 or newer, which offers all of them"]


def test_a_hit_ratio_that_the_engine_tells_itself_is_not_called_absent() -> None:
    offer = offers(read_recording("vllm-0.8.5.post2-v0-single-process/load-nowaiting"), "engine_inputs")

    assert "headroom_engine_prefix_cache_queries_total" in offer.absent
    assert "headroom_engine_prefix_cache_hit_ratio" not in offer.absent


@pytest.mark.parametrize("name", ["vllm-0.32.0-api-server-count-2/idle", "vllm-0.9.2.post2-v0/first-scrape-ever"])
def test_before_the_first_request_nothing_is_called_missing(name: str) -> None:
    offer = offers(read_recording(name), "engine_inputs")

    assert offer.state is Status.UNKNOWN
    assert "no request has been served yet" in offer.text
    assert lines(offer)[0].startswith("curl http://127.0.0.1:")
    assert "headroom_engine_requests_running" in offer.absent


@pytest.mark.parametrize(
    ("metrics", "settings", "text"),
    [
        (RECORDED, {}, "the engine's budget is 92% of each GPU (gpu_memory_utilization)"),
        (
            read_recording("vllm-0.32.0/load-waiting"),
            {"REPORTED_BYTES": "72GiB"},
            "HEADROOM_REPORTED_BYTES is 72.0 GiB on each GPU",
        ),
    ],
)
def test_what_memory_is_compared_with_is_reported(metrics: str, settings: dict[str, str], text: str) -> None:
    offer = offers(metrics, "reported_memory", **settings)

    assert (offer.state, offer.text) == (Status.OK, text)


def test_a_cache_of_a_given_size_leaves_no_budget() -> None:
    offer = offers(read_recording("vllm-0.32.0/load-waiting"), "reported_memory")

    assert offer.state is Status.MISSING
    assert offer.text.startswith("vLLM's KV cache was given its size, as by --kv-cache-memory-bytes, so ")
    assert lines(offer) == [
        "HEADROOM_REPORTED_BYTES=72GiB  # what it should hold of each GPU",
        "--kv-cache-memory-bytes",
    ]
    assert offer.absent[0] == "headroom_memory_reported_bytes"


def test_a_budget_that_is_not_reported_is_missing() -> None:
    offer = offers(RECORDED.replace("gpu_memory_utilization=", "other="), "reported_memory")

    assert offer.state is Status.MISSING
    assert "does not report one gpu_memory_utilization" in offer.text
    assert len(offer.fixes) == 1


def test_the_bytes_of_a_token_may_be_set() -> None:
    unset, configured = examined()["kv_bytes"], examined(KV_BYTES_PER_TOKEN="131072")["kv_bytes"]

    assert unset.state is Status.NOT_APPLICABLE
    assert [line.partition("=")[0] for line in lines(unset)[:2]] == [
        "HEADROOM_MODEL_CONFIG",
        "HEADROOM_KV_BYTES_PER_TOKEN",
    ]
    assert "headroom_engine_kv_cache_capacity_bytes" in unset.absent
    assert (configured.state, configured.text) == (Status.OK, "131072 bytes per token are set")


def test_bytes_of_the_kv_cache_come_from_the_models_configuration_where_the_page_tells_its_dtype() -> None:
    model = str(FOLDER.parents[1] / "unit" / "sizing" / "testdata" / "llama-3.1-8b.json")

    offer = offers(read_recording("vllm-0.32.0/load-waiting"), "kv_bytes", MODEL_CONFIG=model)
    untold = offers("vllm:num_requests_running 1\n", "kv_bytes", MODEL_CONFIG=model)

    assert (offer.state, untold.state) == (Status.OK, Status.MISSING)
    assert any("HEADROOM_MODEL_CONFIG=" in line for line in lines(untold))


def test_what_another_engine_never_tells_is_said_with_the_reason() -> None:
    offer = offers((OTHERS / "llama-cpp-idle.prom").read_text(), "engine_inputs")

    assert offer.state is Status.OK
    untold = "llama.cpp does not export requests_finished: it counts none: growth per request is not known"
    assert untold in offer.details


def test_another_engines_older_version_is_not_advised_to_take_a_newer_vllm() -> None:
    offer = offers("".join(f"{line}\n" for line in SGLANG), "engine_inputs")

    assert offer.state is Status.MISSING
    assert [fix.where for fix in offer.fixes] == ["in SGLang's image"]


def test_bytes_that_an_engine_tells_are_what_memory_is_compared_with() -> None:
    offer = offers((OTHERS / "tensorrt-llm.prom").read_text(), "reported_memory")

    assert (offer.state, offer.text) == (Status.OK, "the engine reports 70.0 GiB on each GPU")
