"""Situations that a team on call meets: what fires in each, when and how often, and how many incidents it is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from alerts.tests.situations import DAYS, HOURS, ILL, WEEK, WELL, Situation
from tests.assets.alerts import series_faults
from tests.assets.situations import Fired, count_incidents, play

Played = Mapping[str, Sequence[Fired]]

GRACE: Final = 2
"""Minutes by which an alert may be late: groups of rules are evaluated in any order."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
each_ill = pytest.mark.parametrize("situation", ILL, ids=lambda situation: situation.name)
each_well = pytest.mark.parametrize("situation", [*WELL, *WEEK], ids=lambda situation: situation.name)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Play all of them once, beside each other, and return what fired in each."""
    turns = ((ILL, 60 * HOURS, 2), (WELL, 60 * HOURS, 2), (WEEK, DAYS * 24 * 60, 30))
    with ThreadPoolExecutor(2) as pool:
        plays = [
            pool.submit(play, batch, tmp_path_factory.mktemp("play"), minutes=minutes, interval=interval)
            for batch, minutes, interval in turns
        ]
    fired = [alert for done in plays for alert in done.result()]
    namespaces = {
        engine.namespace: situation.name for situation in (*ILL, *WELL, *WEEK) for engine in situation.located()
    }
    return {
        name: [alert for alert in fired if namespaces[alert.labels["namespace"]] == name]
        for name in namespaces.values()
    }


def test_a_hundred_situations_and_more_are_played_and_none_is_another() -> None:
    everything = (*ILL, *WELL, *WEEK)

    assert len(everything) >= 100
    assert len({listed_situation.namespace for listed_situation in everything}) == len(everything)
    for situation in everything:
        lengths = {sum(phase.minutes for phase in engine.phases) for engine in situation.engines}
        assert lengths == {DAYS * 24 * 60 if situation in WEEK else 60 * HOURS}, situation.name
    names = {
        series
        for listed_situation in everything
        for engine in listed_situation.located()
        for series, _ in engine.series()
    }
    ours = sorted(series for series in names if not series.startswith("kube_"))
    assert [fault for series in ours for fault in series_faults(series)] == []


@needs_promtool
@each_well
def test_of_the_healthy_nobody_hears(situation: Situation, played: Played) -> None:
    assert {alert.name: (alert.first, alert.labels.get("pod")) for alert in played[situation.name]} == {}


@needs_promtool
@each_ill
def test_an_ill_one_fires_what_it_should_in_time_and_as_often(situation: Situation, played: Played) -> None:
    fired = played[situation.name]

    assert {alert.name for alert in fired} == set(situation.fires)
    for name, (latest, times) in situation.fires.items():
        same_alerts = [alert for alert in fired if alert.name == name]
        assert min(alert.first for alert in same_alerts) <= latest + GRACE, name
        assert max(alert.times for alert in same_alerts) <= times, name


@needs_promtool
@each_ill
def test_one_cause_is_one_incident(situation: Situation, played: Played) -> None:
    assert count_incidents(played[situation.name]) == situation.incidents
