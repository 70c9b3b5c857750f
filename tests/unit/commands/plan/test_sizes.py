"""The traffic of a running engine: which sizes hold it, and what of its memory is never used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Final

import pytest
from msgspec.structs import replace

from tests.command import read_data, run_command
from tests.samples import engine, gpu, page, snapshot
from tests.unit.commands.advise import traces
from tests.unit.commands.advise.test_causes import HEALTHY, answer
from tests.unit.commands.plan.asked import of
from tests.unit.commands.watch.test_watch import sidecar
from tests.unit.expose.views import day
from vllm_headroom.expose.snapshot import build_document
from vllm_headroom.expose.view import History
from vllm_headroom.units import GIB
from vllm_headroom_tools.conclusion import Conclusion

RECORDED: Final = Path(__file__).parents[3] / "contract/card/h100-leak.jsonl.gz"
NAME: Final = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA: Final = of("llama-3.1-8b")
PRESSED: Final = (traces.too_many_requests, traces.thrashing, traces.too_small_a_cache, traces.kv_cache_blow_out)


def size(records: traces.Records, *words: str) -> CompletedProcess[str]:
    return run_command("plan", "--trace", "-", *words, stdin=traces.text(records))


def judge(records: traces.Records, *words: str) -> dict[str, Any]:
    """Return the data of the answer with the traffic among them, and the headline."""
    printed = json.loads(size(records, *words, "--json").stdout)
    return {**printed["data"], "headline": printed["headline"], "status": printed["status"]}


def test_an_engine_with_an_idle_cache_is_larger_than_its_traffic_needs() -> None:
    judged = judge(traces.name_model(traces.healthy(25)))
    traffic = judged["traffic"]

    assert judged["status"] == 0
    assert judged["fits"] is True
    assert judged["headline"].startswith("It is larger than this traffic needs: ")
    assert traffic["highest_running"] == 90
    assert traffic["needed_max_num_seqs"] == 113
    assert traffic["needed_tokens"] == pytest.approx(1.25 * 0.45 * traces.CAPACITY)
    assert traffic["unused_kv_cache_bytes"] == pytest.approx((traces.CAPACITY - traffic["needed_tokens"]) * 131072)
    free_mib = traces.USABLE_MIB - traces.HEALTHY_MIB - 20
    assert traffic["unused_card_bytes"] == free_mib * traces.MIB
    assert traffic["now"]["name"] == "1 x H100"


def test_what_is_proposed_starts_and_holds_the_traffic_by_plan_itself() -> None:
    traffic = judge(traces.name_model(traces.healthy()))["traffic"]
    proposed = [*traffic["smaller"], *traffic["larger"]]

    assert traffic["smaller"]
    for proposal in proposed[:6]:
        options = [word for pair in proposal["settings"].items() for word in pair]
        name = proposal["name"].split(" x ")[1]
        planned = read_data(run_command("plan", "--model", NAME, "--gpu", name, *options, "--json").stdout)

        assert planned["fits"] is True, proposal
        assert planned["kv_capacity_tokens"] >= traffic["needed_tokens"], proposal
        assert proposal["used_ratio"] <= 0.8
    share = traffic["smaller_share"]
    planned = read_data(
        run_command("plan", "--model", NAME, "--gpu", "H100", *sum(share["settings"].items(), ()), "--json").stdout
    )
    assert planned["kv_capacity_tokens"] >= traffic["needed_tokens"]
    assert planned["kv_capacity_tokens"] < 1.1 * traffic["needed_tokens"]


def test_a_smaller_share_is_of_the_caches_size_where_that_is_set() -> None:
    records = [
        {**record, "engines": [{**record["engines"][0], "kv_cache_memory_bytes": 50 * GIB}]}
        for record in traces.healthy(1)
    ]
    settings = judge(records, *LLAMA)["traffic"]["smaller_share"]["settings"]

    assert int(settings["--kv-cache-memory-bytes"]) == pytest.approx(1.25 * 0.45 * traces.CAPACITY * 131072, rel=0.03)


def test_a_full_cache_needs_room_for_those_that_wait() -> None:
    judged = judge(traces.too_many_requests(), *LLAMA)
    traffic = judged["traffic"]
    request_tokens = 0.99 * traces.CAPACITY / 200

    assert judged["status"] == 1
    assert judged["fits"] is False
    assert traffic["queued_waiting"] == 90
    assert traffic["needed_tokens"] == pytest.approx(1.25 * 290 * request_tokens, rel=0.02)
    assert judged["headline"].startswith("It is too small: its KV cache was full for 1 h 0 min and preempted; ")
    assert all(larger_size["capacity_tokens"] >= traffic["needed_tokens"] for larger_size in traffic["larger"])
    assert traffic["smaller_share"] is None
    assert not traffic["smaller"]


def test_a_queue_in_front_of_a_cache_with_room_asks_for_more_requests() -> None:
    judged = judge(traces.too_few_requests(), *LLAMA)
    traffic = judged["traffic"]

    assert judged["status"] == 0
    assert judged["headline"].endswith(
        f" although its KV cache has room: --max-num-seqs {judged['traffic']['needed_max_num_seqs']} lets them run."
    )
    assert traffic["needed_max_num_seqs"] == ceil(1.25 * (32 + traffic["queued_waiting"]))
    assert traffic["needed_tokens"] == pytest.approx(1.25 * (32 + traffic["queued_waiting"]) * 2500, rel=0.02)


@pytest.mark.parametrize("trace", [*HEALTHY[:4], *PRESSED])
def test_it_agrees_with_advise(trace: traces.Trace) -> None:
    judged = judge(trace(), *LLAMA)

    is_pressed = answer(trace).verdict is Conclusion.NOT_GOOD
    assert (judged["status"] == 1) == is_pressed == (trace in PRESSED)
    if trace is not traces.too_small_a_cache and is_pressed:
        # That one has a cache which is too small for its own model: another model is planned here.
        assert not judged["traffic"]["smaller"]


def test_ranks_and_gpus_are_those_of_the_trace() -> None:
    def two_ranks() -> Iterator[traces.Record]:
        for record in traces.healthy(1):
            (engine_record,), (gpu_record,) = record["engines"], record["gpus"]
            gpus = [{**gpu_record, "gpu": index, "uuid": f"GPU-{index}"} for index in range(4)]
            yield {
                **record,
                "gpus": gpus,
                "engines": [engine_record, {**engine_record, "engine": "1", "kv_used_ratio": 0.6}],
            }

    judged = judge(two_ranks(), *LLAMA)

    assert (judged["data_parallel_size"], judged["tensor_parallel_size"]) == (2, 2)
    assert judged["traffic"]["highest_kv_cache_used_ratio"] == 0.6
    assert judged["traffic"]["now"]["name"] == "4 x H100"


def test_only_the_time_since_the_cache_has_its_present_size_counts() -> None:
    def resized() -> Iterator[traces.Record]:
        for step, record in enumerate(traces.healthy(2)):
            is_old = step < 120
            old_fields = {"kv_capacity_tokens": 200_000, "kv_used_ratio": 0.97} if is_old else {}
            yield {**record, "engines": [{**record["engines"][0], **old_fields}]}

    traffic = judge(resized(), *LLAMA)["traffic"]

    assert traffic["highest_kv_cache_used_ratio"] == 0.45
    assert traffic["seconds"] == pytest.approx(3600, rel=0.02)


def test_a_line_gives_the_options_that_a_trace_does_not_show() -> None:
    words = ("--", "vllm", "serve", NAME, "--max-model-len", "16384")
    judged = judge(traces.healthy(1), *words)

    assert judged["max_model_len"] == 16384
    assert "with --max-model-len 16384;" in judged["notes"][0]


def test_an_unknown_part_of_the_model_leaves_the_size_open() -> None:
    words = ("--layers", "32", "--kv-heads", "8", "--head-size", "128", "--max-model-len", "8192")
    judged = judge(traces.healthy(1), *words)

    assert judged["status"] == 2
    assert judged["fits"] is None
    assert judged["headline"].startswith("Cannot tell what holds this traffic. Not known: the weights")


def test_the_recorded_trace_of_a_real_engine() -> None:
    process = run_command("plan", "--trace", str(RECORDED), *LLAMA, "--json")
    traffic = read_data(process.stdout)["traffic"]

    assert process.returncode == 0, process.stderr
    assert traffic["kv_capacity_tokens"] == 442512
    assert traffic["highest_kv_cache_used_ratio"] < 0.01
    assert traffic["smaller"]


def test_a_sidecar_has_the_last_day() -> None:
    history = History()
    for minute in range(3 * 60):
        at = snapshot(
            at=60.0 * minute,
            engines=page(engine(model_name=NAME)),
            gpus=(gpu(uuid="GPU-0", total=80 * GIB, used=70 * GIB),),
        )
        history.step(at, (), 40.0 if minute == 90 else 4.0, 0.5 if minute == 100 else 0.1)
    document = build_document(replace(day(minutes=1), history=history))
    document["engines"] = [{"model_name": NAME, "kv_cache_capacity_tokens": 400_000.0, "prefix_cache_hits_total": 0.0}]
    (entry,) = document["gpus"]
    entry["info"] = {"name": "NVIDIA H100 80GB HBM3", "attribution": "process"}
    with sidecar(200, json.dumps(document).encode()) as url:
        process = run_command("plan", "--headroom-url", url, "--json")
    traffic = read_data(process.stdout)["traffic"]

    assert process.returncode == 0, process.stderr
    assert (traffic["highest_running"], traffic["highest_kv_cache_used_ratio"]) == (40, 0.5)
    assert traffic["needed_tokens"] == 250_000
    assert traffic["unused_card_bytes"] == pytest.approx(10 * GIB)
    assert traffic["now"]["name"] == "1 x H100"


@pytest.mark.parametrize(
    ("records", "words", "why"),
    [
        (traces.healthy(0.1), (), "--model m: not a model that is known here"),
        ([traces.sample(0, running=0)], LLAMA, "standard input: no request ran in it"),
        ([traces.sample(0, kv_used_ratio=None)], LLAMA, "it does not show how much of the KV cache was in use"),
        ([traces.down(0)], LLAMA, "the engine's own page was not read in it"),
        ([traces.sample(0)], (*LLAMA, "--headroom-url", "http://a"), "takes --trace or --headroom-url, and not both"),
    ],
)
def test_a_trace_without_traffic_is_one_line(records: traces.Records, words: tuple[str, ...], why: str) -> None:
    process = size(records, *words)

    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert why in process.stderr


def test_a_document_of_another_shape_is_one_line() -> None:
    broken = build_document(day(minutes=1)) | {"engines": [None]}
    with sidecar(200, json.dumps(broken).encode()) as url:
        process = run_command("plan", "--headroom-url", url)

    assert process.returncode == 2
    assert process.stderr.startswith("vllm-headroom plan: what answers is not vllm-headroom")
