"""The worst outages and some ordinary days, in a time lapse: who is notified, when and how often."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.e2e.paging import MISSING
from tests.e2e.play import ROWS, WELL, play
from tests.e2e.time_lapse import TimeLapse

PLAY_MINUTES: Final = 28
GRACE_MINUTES: Final = 1.5
"""A busy machine is late by seconds, and there a second is half a minute."""

LATEST_MINUTES: Final = {
    "16 of 16 crash in service and load for 33 minutes": ("HeadroomModelDown", 3),
    "1 of 1 crash in service and load for 3 minutes": ("HeadroomModelDown", 3),
    "the only one runs out of memory and serves again after 90 s": ("HeadroomModelDown", 3),
    "one of five runs out of memory and serves again after 90 s": ("HeadroomEngineDied", 6),
    "out of memory with 8,200 running requests at 7.5 and 15.25 minutes": ("HeadroomModelDown", 3),
    "the only one hangs": ("HeadroomModelDown", 3),
}


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: apt-get install {' '.join(MISSING)}")
def test_each_loss_is_one_notification_in_time_and_nobody_hears_of_a_deploy(tmp_path: Path) -> None:
    situations = [row for row in ROWS if row.name in LATEST_MINUTES or row in WELL]

    played = play(situations, tmp_path, minutes=PLAY_MINUTES)

    arrived = [(notification.situation.name, *notification.alerts) for notification in played.notifications]
    assert sorted(arrived) == sorted((name, alert) for name, (alert, _) in LATEST_MINUTES.items()), played
    for notification in played.notifications:
        _, latest = LATEST_MINUTES[notification.situation.name]
        assert 0 < notification.after_minutes <= latest + GRACE_MINUTES, notification


def test_a_time_lapse_divides_what_lasts_and_leaves_what_is_compared() -> None:
    lapse = TimeLapse(factor=60, origin_seconds=1000)

    assert lapse.simulated_seconds(1002) == 1120
    assert lapse.shorten_settings("group_wait: 30s # 5m") == "group_wait: 500ms # 5m"
    assert lapse.shorten_rules("    for: 1m") == "    for: 1000ms"
    assert lapse.shorten_rules("max_over_time(x[1w:1h] offset 30m) < 840") == (
        "max_over_time(x[10080000ms:60000ms] offset 30000ms) < 840"
    )
    assert lapse.shorten_rules("60 * rate(x[5m]) > 1") == "60 * (rate(x[5000ms]) / 60) > 1"
    assert lapse.shorten_rules("time() - y > 60") == "((time() - 1000.000) * 60 + 1000.000) - y > 60"
