"""Drawn fleets: no rollout pages, and of a hundred lost models ninety-five page in time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from alerts.tests.fleets import EVENT, MINUTES, make_losses, make_rollouts
from tests.assets.promql import written_rules
from tests.assets.situations import Fired, play

ROLLOUTS: Final = make_rollouts(200)
LOSSES: Final = make_losses(100)
FOR_ALL_BUT: Final = 5
"""Losses of a hundred that may page late."""

PAGES: Final = [
    rule["alert"]
    for rule in written_rules()
    if "alert" in rule and rule["labels"]["severity"] == "page" and rule["labels"]["area"] != "memory"
]
"""What a fleet without a word on its memory can page for."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[Fired]]:
    """Play all fleets, and return by namespace what paged."""
    everything = [*ROLLOUTS, *(loss.situation for loss in LOSSES)]
    with ThreadPoolExecutor(2) as pool:
        plays = [
            pool.submit(play, part, tmp_path_factory.mktemp("fleets"), minutes=MINUTES, interval=1, only=PAGES)
            for part in (everything[0::4], everything[1::4], everything[2::4], everything[3::4])
        ]
    fired = [alert for done in plays for alert in done.result()]
    names = {situation.namespace for situation in everything}
    paged: dict[str, list[Fired]] = {name: [] for name in names}
    for alert in fired:
        if alert.name in PAGES:
            paged[alert.labels["namespace"]].append(alert)
    return paged


@needs_promtool
def test_no_rollout_pages(pages: Mapping[str, Sequence[Fired]]) -> None:
    paged = {rollout.name: {alert.name: alert.first for alert in pages[rollout.namespace]} for rollout in ROLLOUTS}

    assert {name: alerts for name, alerts in paged.items() if alerts} == {}


@needs_promtool
def test_a_lost_model_pages_in_time(pages: Mapping[str, Sequence[Fired]]) -> None:
    late = {}
    for loss in LOSSES:
        minutes = [alert.first - EVENT for alert in pages[loss.situation.namespace] if alert.last >= EVENT]
        first_minute = min(minutes, default=None)
        if first_minute is None or first_minute > loss.within:
            late[loss.situation.name] = first_minute

    assert len(late) <= FOR_ALL_BUT, late
