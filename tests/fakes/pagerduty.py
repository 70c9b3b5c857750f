"""A PagerDuty that takes alert events as its Events API v2 does, and shows when somebody would have been notified."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from tests.fakes.local_server import LocalServer

PATH: Final = "/v2/enqueue"
MOST_BYTES: Final = 512_000
KEY_LENGTH: Final = 32
MOST_DEDUP_KEY: Final = 255
MOST_SUMMARY: Final = 1024
ACTIONS: Final = ("trigger", "acknowledge", "resolve")
SEVERITIES: Final = ("critical", "warning", "error", "info")

Answer = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One accepted event; `notifies` when it opened an alert, as only then somebody is notified."""

    body: Mapping[str, Any]
    notifies: bool
    arrival_seconds: float
    """When it arrived, in Unix time."""

    @property
    def action(self) -> str:
        return str(self.body["event_action"])

    @property
    def routing_key(self) -> str:
        return str(self.body["routing_key"])

    @property
    def dedup_key(self) -> str:
        return str(self.body["dedup_key"])

    @property
    def payload(self) -> Mapping[str, Any]:
        payload: Mapping[str, Any] = self.body.get("payload") or {}
        return payload


class PagerDuty(LocalServer):
    """Listens from construction until `close`; `keys` are the integration keys it knows.

    `events` are those accepted, `refused` the answers to all others; `throttled` many next requests get 429.
    """

    def __init__(self, keys: Iterable[str], address: str = "127.0.0.1") -> None:
        self.events: list[Event] = []
        self.refused: list[Answer] = []
        self.throttled = 0
        self._keys = frozenset(keys)
        self._open: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        super().__init__(self._handler(), address)

    @property
    def url(self) -> str:
        return super().url + PATH

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = server.answered(self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def answered(self, path: str, body: bytes) -> Answer:
        """Take a request and return what PagerDuty answers to it."""
        with self._lock:
            if self.throttled:
                self.throttled -= 1
                return self._refuse(
                    429,
                    {"status": "throttle exceeded", "message": "Requests for this service are arriving too quickly"},
                )
            if path != PATH:
                return self._refuse(404, {"status": "not found", "message": "Not Found"})
            if len(body) > MOST_BYTES:
                return self._refuse(413, {"status": "too large", "message": "Payload Too Large"})
            event = parsed(body)
            if errors := list(faults(event, self._keys)):
                refusal = {"status": "invalid event", "message": "Event object is invalid", "errors": errors}
                return self._refuse(400, refusal)
            return self._accept(event)

    def _refuse(self, status: int, answer: Mapping[str, Any]) -> Answer:
        self.refused.append((status, answer))
        return status, answer

    def _accept(self, body: dict[str, Any]) -> Answer:
        body.setdefault("dedup_key", uuid.uuid4().hex)
        alert = (body["routing_key"], body["dedup_key"])
        opens = body["event_action"] == "trigger" and alert not in self._open
        if opens:
            self._open.add(alert)
        if body["event_action"] == "resolve":
            self._open.discard(alert)
        self.events.append(Event(body=body, notifies=opens, arrival_seconds=time.time()))
        return 202, {"status": "success", "message": "Event processed", "dedup_key": body["dedup_key"]}


def parsed(body: bytes) -> dict[str, Any]:
    """Return the event, or an empty one when the body is not a JSON object."""
    try:
        event = json.loads(body)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def faults(event: Mapping[str, Any], keys: frozenset[str]) -> Iterator[str]:
    """Return what PagerDuty finds wrong with an event, in its own words where they are known."""
    action = event.get("event_action")
    if action not in ACTIONS:
        yield f"'event_action' is invalid (must be one of the following: {', '.join(map(repr, ACTIONS))})"
    yield from key_faults(event.get("routing_key"), keys)
    yield from dedup_key_faults(event.get("dedup_key"), required=action != "trigger")
    if action == "trigger":
        payload = event.get("payload")
        yield from payload_faults(payload if isinstance(payload, dict) else {})
    for name, field in (("links", "href"), ("images", "src")):
        if any(not isinstance(item, dict) or not item.get(field) for item in event.get(name) or ()):
            yield f"'{name}.{field}' is missing or blank"


def key_faults(key: object, keys: frozenset[str]) -> Iterator[str]:
    """Return what is wrong with an integration key."""
    if not isinstance(key, str) or len(key) != KEY_LENGTH:
        yield "Length of 'routing_key' is incorrect (should be 32 characters)"
    elif key not in keys:
        yield "Invalid routing key"


def dedup_key_faults(key: object, *, required: bool) -> Iterator[str]:
    """Return what is wrong with the key of an alert; a trigger may leave it to PagerDuty."""
    if key is None and not required:
        return
    if not isinstance(key, str) or not key:
        yield "'dedup_key' is missing or blank"
    elif len(key) > MOST_DEDUP_KEY:
        yield "'dedup_key' is too long (maximum is 255 characters)"


def payload_faults(payload: Mapping[str, Any]) -> Iterator[str]:
    """Return what is wrong with what a trigger says."""
    for name in ("summary", "source"):
        if not isinstance(payload.get(name), str) or not payload[name].strip():
            yield f"'payload.{name}' is missing or blank"
    if len(str(payload.get("summary", ""))) > MOST_SUMMARY:
        yield "'payload.summary' is too long (maximum is 1024 characters)"
    if payload.get("severity") not in SEVERITIES:
        yield "'payload.severity' is invalid (must be one of the following: 'critical', 'warning', 'error' or 'info')"
    if not isinstance(payload.get("custom_details", {}), dict):
        yield "'payload.custom_details' is invalid (must be an object)"
