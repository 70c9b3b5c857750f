"""Replicas that leak until they die, without the gates, with one and with both: requests lost, as processes show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.e2e.cluster.replicas import REPLICAS, Service, load, services

pytestmark = pytest.mark.bench

REQUESTS: Final = 1200
"""To each Service: each replica dies of some 300, which takes it one and a half hours."""

READY: Final = {"GATE_READY_SECONDS": "600"}
WORLDS: Final = {"no gate": {}, "`/gate/ready`": READY, "both": {**READY, "GATE_LIVE_SECONDS": "3600"}}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    with services(tmp_path_factory.mktemp("worlds"), WORLDS) as made:
        load(made.values(), REQUESTS)
        for name, each in made.items():
            told = ", ".join(f"{count} {word}" for word, count in sorted(each.became.items()))
            print(f"{name}: {told}; {each.deaths} deaths, {each.restarts} restarts")  # noqa: T201 - the figures of docs/gates.md
        yield made


def test_without_a_gate_every_replica_dies_and_loses_what_runs(worlds: dict[str, Service]) -> None:
    assert worlds["no gate"].deaths >= REPLICAS
    assert worlds["no gate"].lost >= REPLICAS


def test_the_ready_gate_alone_mends_no_leak(worlds: dict[str, Service]) -> None:
    assert worlds["`/gate/ready`"].deaths >= REPLICAS - 1


def test_with_both_none_dies_and_next_to_no_request_is_lost(worlds: dict[str, Service]) -> None:
    assert worlds["both"].deaths == 0
    assert worlds["both"].restarts >= REPLICAS
    assert 3 * worlds["both"].lost <= worlds["no gate"].lost
