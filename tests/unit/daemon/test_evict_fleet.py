"""Fleets that leak in step, with the guardrail and without: the table of docs/gates.md."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import Golden
from tests.fakes.api_server.cluster import LABELS, Cluster
from tests.fakes.api_server.fleet import Fleet

PAGE: Final = Path(__file__).parents[3] / "docs" / "gates.md"
HOUR: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A cluster, a fleet on it, and for how long."""

    cluster: dict[str, Any]
    fleet: dict[str, Any] = field(default_factory=dict)
    seconds: float = 6 * HOUR

    def run(self, *, has_guardrail: bool) -> Fleet:
        return Fleet(cluster=Cluster(**self.cluster), has_guardrail=has_guardrail, **self.fleet).run(self.seconds)


def budget(max_unavailable: int) -> dict[str, Any]:
    return {"budgets": ({"selector": {"matchLabels": LABELS}, "maxUnavailable": max_unavailable},)}


def gone(began: float, end_seconds: float) -> dict[str, Any]:
    return {"fault": lambda at, _: "gone" if began <= at < end_seconds else ""}


LONG: Final = {"near_seconds": 2 * HOUR, "life_seconds": 5 * HOUR}
SITUATIONS: Final = {
    "2 replicas": Situation(cluster={"replicas": 2}),
    "4 replicas": Situation(cluster={"replicas": 4}),
    "4 replicas of a StatefulSet": Situation(cluster={"replicas": 4, "is_stateful": True}),
    "4 replicas that load for 40 min, evicted 3 h before the end": Situation(
        cluster={"replicas": 4, "load_seconds": 2400.0},
        fleet={"near_seconds": 3 * HOUR, "life_seconds": 10 * HOUR},
        seconds=14 * HOUR,
    ),
    "4 replicas, a budget that allows 3 at once, counted 30 s late": Situation(
        cluster={"replicas": 4, "lag_seconds": 30.0, **budget(3)}
    ),
    "4 replicas, all sidecars restarted every 10 min": Situation(
        cluster={"replicas": 4}, fleet={"restart_seconds": 600.0}
    ),
    "4 replicas, clocks up to 12 h apart": Situation(cluster={"replicas": 4}, fleet={"clocks_apart_seconds": 6 * HOUR}),
    "4 replicas, API server away for 10 min of the last 30": Situation(cluster={"replicas": 4}, fleet=gone(9300, 9900)),
    "4 replicas, every answer to an eviction lost": Situation(
        cluster={"replicas": 4}, fleet={"fault": lambda _, path: "cut" if path.endswith("/eviction") else ""}
    ),
    "4 replicas, API server gone": Situation(cluster={"replicas": 4}, fleet=gone(0, 1e9)),
    "4 replicas, no budget": Situation(cluster={"replicas": 4, "budgets": ()}),
    "20 replicas": Situation(cluster={"replicas": 20}, seconds=4 * HOUR),
    "20 replicas, evicted 2 h before the end": Situation(cluster={"replicas": 20}, fleet=LONG),
    "20 replicas that end 2 min apart": Situation(
        cluster={"replicas": 20}, fleet={"spread_seconds": 120.0}, seconds=5 * HOUR
    ),
}
each_situation = pytest.mark.parametrize("name", SITUATIONS)


@cache
def run(name: str, *, has_guardrail: bool = True) -> Fleet:
    return SITUATIONS[name].run(has_guardrail=has_guardrail)


@each_situation
def test_one_restart_at_a_time_and_never_fewer_replicas_for_longer_than_it(name: str) -> None:
    plain, guarded = run(name, has_guardrail=False), run(name)
    restart_seconds = guarded.cluster.load_seconds + guarded.cluster.grace_seconds

    assert guarded.most_voluntary <= 1
    assert guarded.fewer_than(plain) <= restart_seconds
    assert guarded.least_ready >= plain.least_ready
    assert guarded.out_of_memory <= plain.out_of_memory
    assert guarded.nobody_seconds <= plain.nobody_seconds


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_one_is_restarted_at_a_time(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - a simulation
    faults = ("gone", "cut", "late", *[""] * chance.choice((3, 9, 30)))
    cluster = Cluster(
        replicas=chance.randint(2, 8),
        load_seconds=chance.choice((20.0, 90.0, 200.0, 600.0)),
        grace_seconds=chance.choice((5.0, 60.0, 300.0)),
        lag_seconds=chance.choice((0.0, 15.0)),
        is_stateful=chance.random() < 0.5,
        **budget(8),
    )
    fleet = Fleet(
        cluster=cluster,
        life_seconds=1.5 * HOUR,
        fault=lambda _at, _path: chance.choice(faults),
        restart_seconds=chance.choice((None, 95.0, 900.0)),
        clocks_apart_seconds=6 * HOUR,
        spread_seconds=chance.choice((0.0, 30.0)),
    ).run(2.5 * HOUR)

    assert fleet.most_voluntary <= 1
    assert fleet.evictions


@pytest.mark.parametrize("name", ["2 replicas", "4 replicas", "20 replicas, evicted 2 h before the end"])
def test_with_time_enough_no_engine_is_out_of_memory(name: str) -> None:
    assert run(name, has_guardrail=False).out_of_memory >= SITUATIONS[name].cluster["replicas"]
    assert run(name).out_of_memory == 0


def test_the_table_is_what_was_measured(golden: Golden) -> None:
    rows = []
    for name in SITUATIONS:
        plain, guarded = run(name, has_guardrail=False), run(name)
        figures = (
            f"{theirs:.0f} / {ours:.0f}"
            for theirs, ours in (
                (plain.out_of_memory, guarded.out_of_memory),
                (plain.least_ready, guarded.least_ready),
                (plain.nobody_seconds, guarded.nobody_seconds),
            )
        )
        rows.append(f"| {name} | {' | '.join(figures)} | {guarded.most_voluntary} |")
    head = (
        "| without / with the guardrail | engines out of memory | fewest serve | seconds without any | at once |",
        "| --- | --- | --- | --- | --- |",
    )
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- fleets: generated by pytest --update-golden -->\n", "<!-- end of fleets -->"
    text_before, _, text_after = text.partition(begin)

    golden(PAGE, text_before + begin + "\n".join((*head, *rows)) + "\n" + end + text_after.partition(end)[2])
