"""What the profile reads from recorded pages, against what the client that loaded the server knew."""

from __future__ import annotations

from typing import Final

import pytest

from tests.contract.recorded import CAPTURES, FOLDER, total

NOT_TOLD: Final = "no series before the first request"
IN_FLIGHT_DIFFERS: Final[dict[str, tuple[float | None, str]]] = {
    "vllm-0.10.2.post2/kv-after": (12, "the engine is dead, its last gauges stay"),
    "vllm-0.16.0/abort-right-after": (7, "the server has not seen all 12 closed sockets yet"),
    "vllm-0.32.0-api-server-count-2/abort-right-after": (12, "the server has not seen the closed sockets yet"),
    "vllm-0.32.0-api-server-count-2/idle": (None, NOT_TOLD),
    "vllm-0.32.0-data-parallel-2/idle": (None, NOT_TOLD),
    "vllm-0.32.0-disable-log-stats/idle": (None, "--disable-log-stats takes every series"),
    "vllm-0.32.0-engine-hung/engine-hung-8s-5-more-sent": (12, "a hung engine does not see 5 new requests"),
    "vllm-0.32.0-series/t003": (0, "the scrape outran the requests"),
    "vllm-0.32.0-series/t006": (3, "the scrape outran most of the requests"),
    "vllm-0.8.5.post2-v0/first-scrape-ever": (None, NOT_TOLD),
    "vllm-0.8.5.post2-v0/idle": (None, NOT_TOLD),
    "vllm-0.8.5.post2-v0-single-process/first-scrape-ever": (None, NOT_TOLD),
    "vllm-0.8.5.post2-v0-single-process/idle": (None, NOT_TOLD),
    "vllm-0.9.2.post2-v0/first-scrape-ever": (None, NOT_TOLD),
    "vllm-0.9.2.post2-v0/idle": (None, NOT_TOLD),
}
FINISHED_DIFFERS: Final[dict[str, tuple[float | None, str]]] = {
    "vllm-0.32.0-disable-log-stats/idle": (None, "--disable-log-stats takes every series"),
    "vllm-0.32.0-observability/after-n3": (25, "one request with n=3 finishes three times"),
    "vllm-0.32.0-pooling/after-60-embeddings": (60, "the client did not count its embeddings"),
}
QUERIES_DIFFER: Final[dict[str, tuple[float, str]]] = {
    "vllm-0.10.2.post2/kv-after": (391732, "requests that wait for blocks are counted at every step"),
    "vllm-0.13.0/kv-after": (29600, "requests that wait for blocks are counted at every step"),
    "vllm-0.16.0/kv-after": (29600, "requests that wait for blocks are counted at every step"),
    "vllm-0.20.2/kv-after": (5000, "requests that wait for blocks are counted at every step"),
    "vllm-0.32.0-observability/after-n3": (8660, "the prompt of a request with n=3 is looked up three times"),
    "vllm-0.32.0-pooling/after-60-embeddings": (24000, "the client did not count its embeddings"),
}
BLOCK_TOKENS: Final = 128
HITS: Final = {
    # 10 times the same 1,024 tokens: all but the first hit every full block but the one of the last token
    "after-prefix-hits": 9 * 7 * BLOCK_TOKENS,
    "vllm-0.32.0-data-parallel-2/after-prefix-hits": 8 * 7 * BLOCK_TOKENS,  # the first on each of two engines
    # 6 times the same 900 tokens
    "vllm-0.32.0-observability/kv-after-prefix-hits": 5 * 7 * BLOCK_TOKENS,
    "vllm-0.32.0-observability/after-n3": 5 * 7 * BLOCK_TOKENS,
    "vllm-0.33.0/after-prefix-hits": 3 * 2 * 128,  # prompts of 301 tokens, two whole blocks of 128 in common
}


def test_every_recorded_page_has_its_truth_and_the_other_way_round() -> None:
    pages = {f"{page.parent.name}/{page.stem}" for page in FOLDER.glob("*/*.prom")}

    assert pages == set(CAPTURES)


def test_every_known_difference_names_a_recorded_page() -> None:
    assert IN_FLIGHT_DIFFERS.keys() | FINISHED_DIFFERS.keys() | QUERIES_DIFFER.keys() <= set(CAPTURES)


def test_running_and_waiting_are_the_requests_in_flight(subtests: pytest.Subtests) -> None:
    for capture in CAPTURES.values():
        with subtests.test(capture.name):
            page = capture.read()
            running, waiting = total(page, "running"), total(page, "waiting")
            in_flight = None if running is None or waiting is None else running + waiting
            lowest, highest = sorted((capture.before["in_flight"], capture.after["in_flight"]))

            if capture.name in IN_FLIGHT_DIFFERS:
                assert in_flight == IN_FLIGHT_DIFFERS[capture.name][0]
            else:
                assert in_flight is not None
                assert lowest <= in_flight <= highest


def test_finished_requests_are_those_the_client_saw_finish(subtests: pytest.Subtests) -> None:
    for capture in CAPTURES.values():
        with subtests.test(capture.name):
            finished = total(capture.read(), "finished_total")

            if capture.name in FINISHED_DIFFERS:
                assert finished == FINISHED_DIFFERS[capture.name][0]
            elif capture.is_v0 and capture.before["finished_ok"] == 0:
                assert finished is None
            else:
                assert finished is not None
                assert capture.before["finished_ok"] <= finished <= capture.after["finished_ok"]


def test_prefix_queries_are_the_prompt_tokens_when_all_is_done(subtests: pytest.Subtests) -> None:
    for capture in [
        capture
        for capture in CAPTURES.values()
        if capture.after["in_flight"] == capture.after["client_aborted"] == 0
        and not capture.is_v0
        and "disable-log-stats" not in capture.name
    ]:
        with subtests.test(capture.name):
            queries = total(capture.read(), "prefix_queries_total")

            assert queries == QUERIES_DIFFER.get(capture.name, (capture.after["prompt_tokens_of_finished"], ""))[0]


def test_prefix_hits_are_what_the_repeated_prompts_must_give(subtests: pytest.Subtests) -> None:
    for capture in [
        capture
        for capture in CAPTURES.values()
        if not capture.is_v0 and (capture.name in HITS or capture.name.endswith("/after-prefix-hits"))
    ]:
        with subtests.test(capture.name):
            expected = HITS.get(capture.name, HITS["after-prefix-hits"])

            assert total(capture.read(), "prefix_hits_total") == expected


def test_v0_tells_its_hit_rate_of_its_lifetime_instead_of_counters() -> None:
    (engine,) = CAPTURES["vllm-0.8.5.post2-v0-single-process/after-prefix-hits"].read().engines

    assert engine.prefix_hit_lifetime_ratio == pytest.approx(0.9)
    assert (engine.prefix_queries_total, engine.prefix_hits_total) == (None, None)


def test_capacity_is_what_the_command_line_gives_each_engine(subtests: pytest.Subtests) -> None:
    for capture in CAPTURES.values():
        with subtests.test(capture.name):
            blocks = capture.option("num-gpu-blocks-override")
            expected = int(blocks) * BLOCK_TOKENS if blocks else 2097152  # 1 GiB of 512-byte tokens
            capacities = {engine.kv_capacity_tokens for engine in capture.read().engines}

            assert capacities == (set() if "disable-log-stats" in capture.name else {expected})


def test_the_model_is_the_first_served_name(subtests: pytest.Subtests) -> None:
    for capture in CAPTURES.values():
        with subtests.test(capture.name):
            names = {engine.model_name for engine in capture.read().engines}
            first_name = capture.option("served-model-name") or "tiny"
            nothing_served_yet = capture.is_v0 and IN_FLIGHT_DIFFERS.get(capture.name, ("", ""))[1] == NOT_TOLD

            if "disable-log-stats" in capture.name:
                assert names == set()
            else:
                assert names == {"" if nothing_served_yet else first_name}


def test_preemptions_show_where_the_kv_cache_was_too_small(subtests: pytest.Subtests) -> None:
    for name in [name for name in CAPTURES if name.endswith("/kv-many-preemptions")]:
        with subtests.test(name=name):
            preemptions = total(CAPTURES[name].read(), "preemptions_total")

            assert preemptions is not None
            assert preemptions >= 5


def test_a_sleeping_engine_is_not_awake() -> None:
    (engine,) = CAPTURES["vllm-0.32.0/after-reset-prefix-cache"].read().engines

    assert engine.awake is False


def test_a_restart_shows_in_the_start_time() -> None:
    (engine_before,) = CAPTURES["vllm-0.32.0-series/t026"].read().engines
    (engine_after,) = CAPTURES["vllm-0.32.0-series/t030"].read().engines

    assert engine_before.started_at_seconds is not None
    assert engine_after.started_at_seconds is not None
    assert engine_after.started_at_seconds > engine_before.started_at_seconds


def test_disabled_statistics_are_no_failure_and_offer_nothing() -> None:
    page = CAPTURES["vllm-0.32.0-disable-log-stats/idle"].read()

    assert page.engines == ()
    assert not any(is_available for _, is_available in page.inputs)
