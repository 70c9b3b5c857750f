"""The container's log comes from the API server, over a restart of the container."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import PageReader, Reply
from vllm_headroom.scrape.log.batch import LogBatch
from vllm_headroom.scrape.log.kubernetes import PodLog
from vllm_headroom.vocabulary import Reason, Source


class Api:
    """An API server that has one pod with the container vllm."""

    def __init__(self) -> None:
        self.restarts = 0
        self.current: list[str] = []
        self.previous: list[str] = []
        self.requests: list[dict[str, list[str]]] = []
        self.answer: Reply | Failure | None = None
        """Replaces every answer."""

    async def send(self, method: str, path: str, body: object) -> Reply | Failure:
        assert (method, body) == ("GET", None)
        if self.answer is not None:
            return self.answer
        parts = urlsplit(path)
        if parts.path == "/api/v1/namespaces/n/pods/p":
            status = [{"name": "headroom", "restartCount": 7}, {"name": "vllm", "restartCount": self.restarts}]
            return Reply(status=200, text=json.dumps({"status": {"containerStatuses": status}}))
        assert parts.path == "/api/v1/namespaces/n/pods/p/log"
        query = parse_qs(parts.query)
        self.requests.append(query)
        lines = self.previous if query["previous"] == ["true"] else self.current
        if not lines:
            return Reply(status=400, text="{}")
        # The API server compares whole seconds.
        since = query.get("sinceTime", [""])[0][:19]
        return Reply(status=200, text="".join(f"{line}\n" for line in lines if line[:19] >= since))


def build(api: Api, container: str = "vllm") -> PodLog:
    return PodLog(cast(PageReader, api), namespace="n", pod="p", container=container)


def fetch(source: PodLog) -> Any:
    source._next_seconds = 0.0
    return asyncio.run(source.fetch(5.0))


def test_each_line_comes_once() -> None:
    api = Api()
    api.current = ["2026-01-01T00:00:01.5Z a", "2026-01-01T00:00:01.51Z b"]
    source = build(api)

    assert fetch(source).content == b"2026-01-01T00:00:01.5Z a\n2026-01-01T00:00:01.51Z b\n"
    assert fetch(source) == LogBatch(content=b"")
    api.current.append("2026-01-01T00:00:01.6Z c")
    assert fetch(source) == LogBatch(content=b"2026-01-01T00:00:01.6Z c\n")


def test_after_a_restart_the_last_words_of_the_container_before_come_first() -> None:
    api = Api()
    api.current = ["2026-01-01T00:00:01Z serves"]
    source = build(api)
    fetch(source)
    api.previous = [*api.current, "2026-01-01T00:00:02Z OutOfMemoryError"]
    api.current = ["2026-01-01T00:00:09Z starts"]
    api.restarts = 1

    assert fetch(source).content == b"2026-01-01T00:00:02Z OutOfMemoryError\n2026-01-01T00:00:09Z starts\n"
    assert [request["previous"] for request in api.requests[1:]] == [["true"], ["false"]]


def test_a_line_that_a_bound_cuts_off_is_read_by_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    source = build(api)

    async def cut(method: str, path: str, body: object) -> Reply | Failure:
        reply = await Api.send(api, method, path, body)
        assert isinstance(reply, Reply)
        return reply if "/log?" not in path else Reply(status=200, text=reply.text[:-3])

    api.current = ["2026-01-01T00:00:01Z a", "2026-01-01T00:00:02Z b"]
    monkeypatch.setattr(api, "send", cut)
    assert fetch(source).content == b"2026-01-01T00:00:01Z a\n"
    monkeypatch.undo()
    assert fetch(source).content == b"2026-01-01T00:00:02Z b\n"


def test_between_two_rounds_nothing_is_asked() -> None:
    api = Api()
    api.current = ["2026-01-01T00:00:01Z a"]
    source = build(api)

    async def fetch_twice() -> tuple[LogBatch | Failure, LogBatch | Failure]:
        return await source.fetch(5.0), await source.fetch(5.0)

    _, second = asyncio.run(fetch_twice())
    assert second == LogBatch(content=b"")
    assert len(api.requests) == 1


def test_a_container_that_waits_to_start_has_no_lines_and_is_no_failure() -> None:
    assert fetch(build(Api())).content == b""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Reply(status=403, text=""), Reason.NO_PERMISSION),
        (Reply(status=401, text=""), Reason.UNAUTHORIZED),
        (Reply(status=500, text=""), Reason.HTTP_STATUS),
        (Reply(status=200, text="[]"), Reason.MALFORMED),
        (Reply(status=200, text='{"status": {"containerStatuses": 1}}'), Reason.MALFORMED),
        (Failure(source=Source.ENGINE, reason=Reason.UNREACHABLE, message="m"), Reason.UNREACHABLE),
        (Failure(source=Source.ENGINE, reason=Reason.NOT_METRICS, message="m"), Reason.UNAVAILABLE),
    ],
)
def test_a_refusal_is_a_failure_of_the_log(answer: Reply | Failure, reason: Reason) -> None:
    api = Api()
    api.answer = answer
    failure = fetch(build(api))

    assert isinstance(failure, Failure)
    assert (failure.source, failure.reason) == (Source.LOG, reason)


def test_another_name_of_the_container_is_said() -> None:
    failure = fetch(build(Api(), container="server"))

    assert failure.reason is Reason.NOT_FOUND
    assert "HEADROOM_ENGINE_CONTAINER" in failure.message
