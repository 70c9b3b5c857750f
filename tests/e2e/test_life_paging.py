"""From the end of an engine to the phone: Prometheus, Alertmanager and what PagerDuty is notified of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.incidents import closed, find_events, first, history
from tests.e2e.paging import DEADLINE_SECONDS, KEYS, MISSING, Target, paging
from tests.fakes.engine_server import Answer, EngineServer, page
from tests.fakes.pagerduty import PagerDuty
from tests.process import eventually

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: apt-get install {' '.join(MISSING)}")

STATES: Final = ("unknown", "down", "starting", "serving", "stalled", "asleep")
REPLICAS: Final = 20
ENOUGH_SCRAPES: Final = 6
"""A scrape a second: more than a rule, a group or a repeat waits for here."""


def living(state: str, *, exits: int = 0, out_of_memory: int = 0, running: int = 0) -> Answer:
    """Return the page of a sidecar whose engine is in this state, runs so many requests, and has exited so often."""
    lines = [f'headroom_engine_state{{state="{listed_state}"}} {int(listed_state == state)}' for listed_state in STATES]
    lines += [f'headroom_engine_exits_total{{reason="gone"}} {exits}']
    lines += [f'headroom_engine_exits_total{{reason="out_of_memory"}} {out_of_memory}']
    if state == "serving":
        lines += ['headroom_engine_info{model_name="llama",engine="0",profile="vllm"} 1']
        lines += [f'headroom_engine_requests_running{{model_name="llama",engine="0"}} {running}']
    return page("\n".join((*lines, "")), headers=("Content-Type: text/plain; version=0.0.4",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Replicas in the namespace `prod` that Prometheus has seen serve, and who is notified of them."""

    pagerduty: PagerDuty
    replicas: dict[str, EngineServer]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    replicas = {name: EngineServer(living("serving")) for name in ("down", "full", "loops")}
    targets = [target(engine, name) for name, engine in replicas.items()]
    with PagerDuty(KEYS.values()) as pagerduty, paging(tmp_path_factory.mktemp("life"), pagerduty.url, targets):
        scraped(replicas["down"], ENOUGH_SCRAPES)
        yield Bench(pagerduty=pagerduty, replicas=replicas)
    for engine in replicas.values():
        engine.close()
    assert not pagerduty.refused


def target(engine: EngineServer, pod: str) -> Target:
    labels = {"namespace": "prod", "app": "llama", "pod": pod}
    return Target(address=f"127.0.0.1:{engine.port}", labels=labels)


def scraped(engine: EngineServer, times: int) -> None:
    """Wait until Prometheus has read the page so many times more."""
    wanted = len(engine.requests) + times
    eventually(lambda: len(engine.requests) >= wanted, f"{times} more scrapes", DEADLINE_SECONDS)


def test_an_engine_that_is_down_is_paged_once_and_closed_when_one_serves_again(bench: Bench) -> None:
    pagerduty, replica = bench.pagerduty, bench.replicas["down"]
    replica.answer = living("down", exits=1)
    opened = first(pagerduty, source="prod/down", severity="critical")
    replica.answer = living("starting", exits=1)
    scraped(replica, ENOUGH_SCRAPES)
    actions = [event.action for event in history(pagerduty, opened)]
    replica.answer = living("serving", exits=1)
    closed(pagerduty, opened)

    assert "resolve" not in actions, "to load is not to serve"
    assert opened.routing_key == KEYS["ml-platform"]
    assert opened.payload["summary"] == "llama is down. prod/down"
    assert opened.body["links"][0]["href"] == "https://runbooks.example/HeadroomEngineDown"


def test_a_death_under_load_is_one_notification_with_its_cause_however_soon_the_next_run_serves(bench: Bench) -> None:
    pagerduty, replica = bench.pagerduty, bench.replicas["full"]
    replica.answer = living("serving", running=7)
    scraped(replica, ENOUGH_SCRAPES)
    replica.answer = living("starting", out_of_memory=1)
    scraped(replica, 2)
    replica.answer = living("serving", out_of_memory=1)
    opened = first(pagerduty, source="prod/full", severity="warning")
    scraped(replica, ENOUGH_SCRAPES)

    assert [event.action for event in find_events(pagerduty, source="prod/full")] == ["trigger"], (
        "for minutes, and once"
    )
    text = opened.payload["custom_details"]["firing"]
    assert "prod/full: at most 7 requests ran in it within a quarter of an hour; it ran out of GPU memory." in text


def test_an_engine_that_ends_again_and_again_is_paged_and_two_ends_are_not(bench: Bench) -> None:
    pagerduty, replica = bench.pagerduty, bench.replicas["loops"]
    for ends in (1, 2):
        replica.answer = living("serving", exits=ends)
        scraped(replica, ENOUGH_SCRAPES)
    earlier_events = find_events(pagerduty, source="prod/loops")
    replica.answer = living("serving", exits=3)
    opened = first(pagerduty, source="prod/loops", severity="critical")

    assert earlier_events == []
    assert opened.routing_key == KEYS["ml-platform"]
    assert opened.payload["summary"] == "llama exits again and again. prod/loops"
    assert "exited 3 times" in opened.payload["custom_details"]["firing"]


def test_one_bad_release_on_twenty_replicas_is_one_incident_of_the_model(tmp_path: Path) -> None:
    with (
        PagerDuty(KEYS.values()) as pagerduty,
        EngineServer(living("serving")) as engine,
        paging(
            tmp_path, pagerduty.url, [target(engine, f"{replica}") for replica in range(REPLICAS)], by_workload=True
        ),
    ):
        scraped(engine, ENOUGH_SCRAPES * REPLICAS)
        engine.answer = living("down", exits=1)
        eventually(
            lambda: [event for event in pagerduty.events if event.payload["summary"].startswith("Replicas of llama")],
            "an event of all replicas",
            DEADLINE_SECONDS,
        )

    (opened,) = [event for event in find_events(pagerduty) if event.notifies]
    assert {event.dedup_key for event in pagerduty.events} == {opened.dedup_key}
    assert opened.payload["summary"].startswith("Replicas of llama are lost. prod/llama")
