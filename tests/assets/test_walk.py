"""The walk through all alerts is written down as Prometheus plays it, and leaves out none."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Final

import pytest

from alerts.tests.walk import ANY, BOXES, EVENTS, LONG_MINUTES, REMOVED, STEPS, Box
from tests.assets.promql import RULES, written_rules
from tests.assets.situations import play
from tests.conftest import Golden

TABLE: Final = RULES.parent / "tests" / "walk.md"
MINUTES: Final = 240
HEAD: Final = """\
# When each alert fires

Each event is played by promtool over the shipped rules, and these are the minutes from the event to the alert. An
event that depends on the size of a card is played at `--gpu-memory-utilization` 0.85, 0.92 and 0.95 on a card of 80 GB,
and at 0.92 on a MIG slice of 10 GB and on an L4 of 24 GB; what does not, once. `-` means that it did not fire.
"Silent if" is what keeps an alert silent although something like its event happens. The states that the detector
reports are part of an event: [docs/leaks.md](../../docs/leaks.md) has how soon it reports them.
The last row is of an alert that was removed, and is not played.
`pytest --update-golden tests/assets/test_walk.py` writes this file.

"""
COLUMNS: Final = ("alert", "event", *(box.name for box in BOXES), "silent if", "verdict")

Minutes = Mapping[tuple[str, str, str], int]
"""Minutes from the event to an alert, by event, box and alert."""


@pytest.fixture(scope="module")
def minutes(tmp_path_factory: pytest.TempPathFactory) -> Minutes:
    """Play all events."""
    first_minutes: dict[tuple[str, str, str], int] = {}
    for is_long, length, interval in ((False, MINUTES, 1), (True, LONG_MINUTES, 10)):
        played = {
            event.situation(key, box).namespace: (key, box, event.situation(key, box))
            for key, event in EVENTS.items()
            if event.is_long == is_long
            for box in event.boxes
        }
        situations = [situation for _, _, situation in played.values()]
        for alert in play(situations, tmp_path_factory.mktemp("walk"), minutes=length, interval=interval):
            key, box, _ = played[alert.labels["namespace"]]
            place = (key, box.name, alert.name)
            delay_minutes = alert.first - EVENTS[key].minute
            first_minutes[place] = min(delay_minutes, first_minutes.get(place, delay_minutes))
    return first_minutes


def test_every_alert_is_walked_through_once() -> None:
    assert sorted(step.alert for step in STEPS) == sorted(rule["alert"] for rule in written_rules() if "alert" in rule)
    assert {step.event for step in STEPS} == set(EVENTS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
def test_the_table_is_what_prometheus_plays(minutes: Minutes, golden: Golden) -> None:
    golden(TABLE, write_table(minutes))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
def test_every_alert_fires_in_its_event_and_before_the_card_is_full(minutes: Minutes) -> None:
    for step in STEPS:
        event = EVENTS[step.event]
        fired = [minutes.get((step.event, box.name, step.alert)) for box in event.boxes]

        assert any(delay_minutes is not None and delay_minutes >= 0 for delay_minutes in fired), step.alert
        if event.full is not None:
            assert all(delay_minutes is not None and delay_minutes < event.full for delay_minutes in fired), (
                step.alert,
                fired,
            )


def write_table(minutes: Minutes) -> str:
    """Return the walk as a table."""
    rows = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    for step in STEPS:
        event = EVENTS[step.event]
        text = f"{event.text} (then it is full at {event.full})" if event.full else event.text
        cells = [
            _cell(minutes, step.event, step.alert, box) for box in (event.boxes if event.boxes != ANY else ANY * 5)
        ]
        rows.append(_row([f"[{step.alert}](../runbooks/{step.alert}.md)", text, *cells, step.silent, step.verdict]))
    for alert, text, silent, verdict in REMOVED:
        rows.append(_row([alert, text, *["-"] * len(BOXES), silent, verdict]))
    return HEAD + "\n".join(rows) + "\n"


def _cell(minutes: Minutes, event: str, alert: str, box: Box) -> str:
    delay_minutes = minutes.get((event, box.name, alert))
    return "-" if delay_minutes is None else str(delay_minutes)


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
