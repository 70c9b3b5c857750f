"""From the end of an engine to the phone: Prometheus, Alertmanager and what PagerDuty is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.e2e.incidents import closed, first, found, history
from tests.e2e.paging import DEADLINE_SECONDS, KEYS, MISSING, Target, paging
from tests.fakes.engine_server import Answer, EngineServer, page
from tests.fakes.pagerduty import PagerDuty
from tests.process import eventually

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: apt-get install {' '.join(MISSING)}")

STATES: Final = ("unknown", "down", "starting", "serving", "stalled", "asleep")
REPLICAS: Final = 20
ENOUGH_SCRAPES: Final = 10
"""Ten times as many as any rule, group or repeat waits for here."""


def living(state: str, *, exits: int = 0, out_of_memory: int = 0) -> Answer:
    """Return the page of a sidecar whose engine is in this state and whose engines ended so often."""
    lines = [f'headroom_engine_state{{state="{each}"}} {int(each == state)}' for each in STATES]
    lines += [f'headroom_engine_exits_total{{reason="gone"}} {exits}']
    lines += [f'headroom_engine_exits_total{{reason="out_of_memory"}} {out_of_memory}']
    if state == "serving":
        lines += ['headroom_engine_info{model_name="llama",engine="0",profile="vllm"} 1']
    return page("\n".join((*lines, "")), headers=("Content-Type: text/plain; version=0.0.4",))


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    with EngineServer(living("serving")) as server:
        yield server


@pytest.fixture
def pagerduty() -> Iterator[PagerDuty]:
    with PagerDuty(KEYS.values()) as server:
        yield server
        assert not server.refused


def scraped(engine: EngineServer, times: int) -> None:
    """Wait until Prometheus has read the page so many times more."""
    wanted = len(engine.requests) + times
    eventually(lambda: len(engine.requests) >= wanted, f"{times} more scrapes", DEADLINE_SECONDS)


def target(engine: EngineServer, pod: str) -> Target:
    labels = {"namespace": "prod", "app": "llama", "pod": pod}
    return Target(address=f"127.0.0.1:{engine.port}", labels=labels)


@pytest.fixture
def replica(
    engine: EngineServer, pagerduty: PagerDuty, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """Yield the engine of the pod llama-0 when Prometheus has seen it serve."""
    with paging(tmp_path_factory.mktemp("life"), pagerduty.url, [target(engine, "llama-0")]):
        scraped(engine, ENOUGH_SCRAPES)
        yield engine


def test_an_engine_that_is_down_is_paged_once_and_closed_when_one_serves_again(
    replica: EngineServer, pagerduty: PagerDuty
) -> None:
    replica.answer = living("down", exits=1)
    opened = first(pagerduty, source="prod/llama-0", severity="critical")
    replica.answer = living("starting", exits=1)
    scraped(replica, ENOUGH_SCRAPES)
    told = [event.action for event in history(pagerduty, opened)]
    replica.answer = living("serving", exits=1)
    closed(pagerduty, opened)

    assert "resolve" not in told, "to load is not to serve"
    assert opened.routing_key == KEYS["ml-platform"]
    assert opened.payload["summary"] == "llama is down. prod/llama-0"
    assert opened.body["links"][0]["href"] == "https://runbooks.example/HeadroomEngineDown"


def test_a_life_that_ran_out_of_memory_is_paged_with_its_cause_though_the_next_one_loads(
    replica: EngineServer, pagerduty: PagerDuty
) -> None:
    replica.answer = living("starting", out_of_memory=1)
    opened = first(pagerduty, source="prod/llama-0", severity="critical")
    replica.answer = living("serving", out_of_memory=1)
    closed(pagerduty, opened)

    assert (
        "prod/llama-0: the engine ended and does not serve; it ran out of GPU memory."
        in (opened.payload["custom_details"]["firing"])
    )


def test_an_engine_that_ends_again_and_again_is_paged_and_two_ends_are_not(
    replica: EngineServer, pagerduty: PagerDuty
) -> None:
    for ends in (1, 2):
        replica.answer = living("serving", exits=ends)
        scraped(replica, ENOUGH_SCRAPES)
    before = list(pagerduty.events)
    replica.answer = living("serving", exits=3)
    opened = first(pagerduty, source="prod/llama-0", severity="critical")

    assert before == []
    assert opened.routing_key == KEYS["ml-platform"]
    assert opened.payload["summary"] == "llama ends again and again. prod/llama-0"
    assert "ended 3 times" in opened.payload["custom_details"]["firing"]


def test_one_bad_release_on_twenty_replicas_is_told_once_where_the_workload_is_the_group(
    engine: EngineServer, pagerduty: PagerDuty, tmp_path_factory: pytest.TempPathFactory
) -> None:
    targets = [target(engine, f"llama-{number}") for number in range(REPLICAS)]
    with paging(tmp_path_factory.mktemp("workload"), pagerduty.url, targets, by_workload=True):
        scraped(engine, ENOUGH_SCRAPES * REPLICAS)
        engine.answer = living("down", exits=1)
        eventually(
            lambda: [each for each in pagerduty.events if f"({REPLICAS} alerts)" in each.payload["summary"]],
            "an event of all replicas",
            DEADLINE_SECONDS,
        )

    (opened,) = [event for event in found(pagerduty) if event.notifies]
    assert {event.dedup_key for event in pagerduty.events} == {opened.dedup_key}
    assert opened.payload["summary"].startswith("llama is down. prod/llama")
