"""What PagerDuty was notified of: waited for, and looked through."""

from __future__ import annotations

from tests.e2e.paging import DEADLINE_SECONDS, Alertmanager
from tests.fakes.pagerduty import Event, PagerDuty
from tests.process import eventually


def find_events(pagerduty: PagerDuty, **wanted: str) -> list[Event]:
    """Return the events with this action, these fields of the payload, or of the alert's own severity as `told`."""
    return [event for event in pagerduty.events if wanted.items() <= fields(event).items()]


def fields(event: Event) -> dict[str, str]:
    details = event.payload.get("custom_details", {})
    return {"action": event.action, "told": details.get("severity", ""), **event.payload}


def first(pagerduty: PagerDuty, **wanted: str) -> Event:
    return eventually(lambda: find_events(pagerduty, **wanted), f"an event with {wanted}", DEADLINE_SECONDS)[0]


def mutes(alertmanager: Alertmanager, name: str, **muted: str) -> None:
    """Wait until Alertmanager says that an alert of this name mutes the one with those labels."""
    eventually(lambda: name in alertmanager.muted(**muted), f"{name} mutes {muted}", DEADLINE_SECONDS)


def closed(pagerduty: PagerDuty, opened: Event) -> None:
    """Wait for the end of what this event opened, and check that between the two nothing else was opened or closed."""

    eventually(
        lambda: history(pagerduty, opened)[-1].action == "resolve",
        f"the end of {opened.payload['summary']}",
        DEADLINE_SECONDS,
    )
    events = history(pagerduty, opened)
    assert [event.notifies for event in events] == [True] + [False] * (len(events) - 1)
    assert [event.action for event in events].count("resolve") == 1
    firing_lists = [event.payload["custom_details"]["firing"] for event in events]
    assert len(firing_lists) == len(set(firing_lists)), "the same is not told twice"
    assert {event.routing_key for event in events} == {opened.routing_key}


def history(pagerduty: PagerDuty, opened: Event) -> list[Event]:
    """Return what was reported of the incident that this event opened."""
    return [event for event in pagerduty.events if event.dedup_key == opened.dedup_key]
