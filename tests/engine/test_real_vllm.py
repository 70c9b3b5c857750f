"""The daemon beside a real vLLM: its numbers against what the client knows. Run by `make engine-test`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.serving import Engine, words
from tests.process import Daemon, daemon

pytestmark = pytest.mark.engine

TINY_CAPACITY_TOKENS = 2_097_152
"""1 GiB of KV cache at 2 layers x 2 KV heads x 32 x 2 (key, value) x 2 bytes = 512 bytes a token."""


@pytest.fixture(scope="module")
def sidecar(engine: Engine) -> Iterator[Daemon]:
    with daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="2", KV_BYTES_PER_TOKEN="512") as running:
        yield running


def test_the_capacity_is_what_the_engine_was_given(sidecar: Daemon) -> None:
    page = sidecar.sees(lambda page: page.has("engine_info"), "the engine is found")

    assert page.value("source_up", source="engine") == 1
    assert page.value("engine_kv_cache_capacity_tokens", model_name="tiny", engine="0") == TINY_CAPACITY_TOKENS
    assert page.value("engine_kv_cache_capacity_bytes", model_name="tiny", engine="0") == 2**30
    assert page.value("engine_awake", model_name="tiny") == 1


def test_counters_are_the_clients_counts(engine: Engine, sidecar: Daemon) -> None:
    old_page = sidecar.page()
    usages = [engine.complete(words(17 * turn, 40), 5) for turn in range(4)]

    page = sidecar.sees(
        lambda page: (
            page.value("engine_requests_finished_total") == old_page.value("engine_requests_finished_total") + 4
        ),
        "four more requests have finished",
    )

    for name, key in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        total = f"engine_{name}_tokens_total"
        assert page.value(total) - old_page.value(total) == sum(usage[key] for usage in usages)


def test_running_waiting_and_kv_under_load(engine: Engine, sidecar: Daemon) -> None:
    finished_before = sidecar.page().value("engine_requests_finished_total")
    has_seen = threading.Event()

    def keep_one_in_flight(client: int) -> int:
        done = 0
        while not has_seen.is_set():
            engine.complete(words(31 * client, 64), 300)
            done += 1
        return done

    with ThreadPoolExecutor(24) as pool:
        clients = [pool.submit(keep_one_in_flight, client) for client in range(24)]
        try:
            page = sidecar.sees(
                lambda page: (
                    page.value("engine_requests_running") == 16 and 1 <= page.value("engine_requests_waiting") <= 8
                ),
                "16 requests run (--max-num-seqs 16) and the rest of 24 wait",
                deadline_seconds=180,
            )
        finally:
            has_seen.set()
        done = sum(client.result() for client in clients)
    assert 64 <= page.value("engine_kv_cache_tokens_per_running_request") <= 64 + 300 + 128
    assert page.value("engine_kv_cache_bytes_per_running_request") == pytest.approx(
        512 * page.value("engine_kv_cache_tokens_per_running_request")
    )
    assert page.value("engine_additional_requests") == 0, "as many run as --max-num-seqs lets"
    sidecar.sees(
        lambda page: page.value("engine_requests_finished_total") - finished_before == done,
        "as many have finished as were asked",
    )


def test_repeated_prompts_are_prefix_hits(engine: Engine, sidecar: Daemon) -> None:
    old_page = sidecar.page()
    prompt = words(500, 512)
    for _ in range(5):
        engine.complete(prompt, 2)

    page = sidecar.sees(
        lambda page: (
            page.value("engine_requests_finished_total") == old_page.value("engine_requests_finished_total") + 5
        ),
        "five more requests have finished",
    )

    queries = page.value("engine_prefix_cache_queries_total") - old_page.value("engine_prefix_cache_queries_total")
    hits = page.value("engine_prefix_cache_hits_total") - old_page.value("engine_prefix_cache_hits_total")
    assert queries == 5 * 512
    assert hits == 4 * (512 - 128)  # the last block of 128 tokens is always computed, and the first request has no hit
    assert page.value("engine_prefix_cache_hit_ratio") > 0


def test_the_engines_processes_are_found(sidecar: Daemon) -> None:
    page = sidecar.sees(lambda page: page.has("host_memory_bytes", process="engine_core"), "the engine core is found")

    assert page.value("host_memory_bytes", process="api_server") > 50 * 2**20
    assert page.value("host_memory_bytes", process="engine_core") > 50 * 2**20


def test_killing_the_engine_removes_its_series(engine: Engine, sidecar: Daemon) -> None:
    os.killpg(engine.process.pid, signal.SIGKILL)

    page = sidecar.sees(lambda page: page.value("source_up", source="engine") == 0, "the engine is down")

    life = {f"headroom_engine_{name}" for name in ("state", "restarts_total", "exits_total", "start_timestamp_seconds")}
    assert page.names("headroom_engine_") <= life, "what is known of an engine whose page fails"
    assert not page.has("input_available")
    sidecar.sees(lambda page: not page.has("host_memory_bytes"), "its processes are gone")
