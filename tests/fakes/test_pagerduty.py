"""What the stand-in for PagerDuty refuses, so that a test that it accepts says something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.pagerduty import PagerDuty

KEY = "0123456789abcdef0123456789abcdef"
TRIGGER: dict[str, Any] = {
    "routing_key": KEY,
    "event_action": "trigger",
    "dedup_key": "one",
    "payload": {"summary": "it leaks", "source": "engine-0", "severity": "critical", "custom_details": {"n": 1}},
    "links": [{"href": "https://runbooks.example/it", "text": "Runbook"}],
}
RESOLVE: dict[str, Any] = {"routing_key": KEY, "event_action": "resolve", "dedup_key": "one"}


@pytest.fixture
def pagerduty() -> Iterator[PagerDuty]:
    with PagerDuty([KEY]) as server:
        yield server


def post(server: PagerDuty, event: object) -> httpx.Response:
    return httpx.post(server.url, json=event, timeout=10)


def with_payload(**fields: object) -> dict[str, Any]:
    return TRIGGER | {"payload": TRIGGER["payload"] | fields}


def test_only_what_opens_an_alert_notifies(pagerduty: PagerDuty) -> None:
    for event in (TRIGGER, TRIGGER, RESOLVE, RESOLVE, TRIGGER):
        assert post(pagerduty, event).status_code == 202

    assert [event.notifies for event in pagerduty.events] == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (TRIGGER | {"routing_key": KEY[1:]}, "Length of 'routing_key' is incorrect (should be 32 characters)"),
        (TRIGGER | {"routing_key": KEY + "\n"}, "Length of 'routing_key' is incorrect (should be 32 characters)"),
        (TRIGGER | {"routing_key": "f" * 32}, "Invalid routing key"),
        (TRIGGER | {"event_action": "page"}, "'event_action' is invalid"),
        (TRIGGER | {"dedup_key": "x" * 256}, "'dedup_key' is too long"),
        (TRIGGER | {"payload": None}, "'payload.summary' is missing or blank"),
        (with_payload(summary=" "), "'payload.summary' is missing or blank"),
        (with_payload(summary="x" * 1025), "'payload.summary' is too long"),
        (with_payload(source=""), "'payload.source' is missing or blank"),
        (with_payload(severity="page"), "'payload.severity' is invalid"),
        (with_payload(severity="Critical"), "'payload.severity' is invalid"),
        (with_payload(custom_details="text"), "'payload.custom_details' is invalid"),
        (TRIGGER | {"links": [{"href": "", "text": "Runbook"}]}, "'links.href' is missing or blank"),
        (RESOLVE | {"dedup_key": ""}, "'dedup_key' is missing or blank"),
        ({name: value for name, value in RESOLVE.items() if name != "dedup_key"}, "'dedup_key' is missing or blank"),
        ([TRIGGER], "'event_action' is invalid"),
    ],
)
def test_an_invalid_event_is_refused(pagerduty: PagerDuty, event: object, error: str) -> None:
    answer = post(pagerduty, event)

    assert answer.status_code == 400
    assert (answer.json()["status"], answer.json()["message"]) == ("invalid event", "Event object is invalid")
    assert any(problem.startswith(error) for problem in answer.json()["errors"])
    assert not pagerduty.events
    assert len(pagerduty.refused) == 1
