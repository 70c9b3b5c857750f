import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.engine_server import LOOPBACK, Answer, drip, hang, page, reset
from tests.fakes.ports import free_port
from tests.settings import load_as
from tests.unit.commands.smoke.serving import MODELS, Vllm
from tests.unit.commands.smoke.smoking import smoke, states
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import Reply
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.smoke.command import (
    EngineServer,
    SmokeSettings,
    request_completion,
    wait_until_healthy,
)

pytestmark = pytest.mark.usefixtures("nvml")
REST_SKIPPED = [Conclusion.NOT_GOOD, Conclusion.CANNOT_TELL, Conclusion.CANNOT_TELL, Conclusion.CANNOT_TELL]


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server that answers do so even to the last question, for which the deadline leaves next to no time."""
    ask = EngineServer.text

    async def text(reach: EngineServer, path: str, _seconds: float) -> str | Failure:
        return await ask(reach, path, 30.0)

    monkeypatch.setattr(EngineServer, "text", text)


def test_a_healthy_vllm_is_not_waited_for(vllm: Vllm) -> None:
    messages: list[str] = []

    assert smoke(vllm.url, say=messages.append)["health"].text.startswith("healthy after ")
    assert messages == []


def test_one_that_loads_is_waited_for_and_it_is_reported_for_what(vllm: Vllm) -> None:
    vllm.answers["/health"] = page("", status="503 Service Unavailable")
    messages: list[str] = []

    def say(line: str) -> None:
        messages.append(line)
        vllm.answers["/health"] = page("")

    steps = smoke(vllm.url, "--deadline", "10m", say=say)

    assert steps["health"].verdict is Conclusion.GOOD
    (line,) = messages
    assert re.match(r"waiting, (10 min 0|9 min \d+) s left: ", line)
    assert line.endswith("/health answers 503 Service Unavailable: look for the cause in the engine's log")


def test_one_that_does_not_listen_yet_is_waited_for() -> None:
    port = free_port()
    servers: list[Vllm] = []

    def say(line: str) -> None:
        assert "(Connection refused)" in line
        servers.append(Vllm(port=port))

    try:
        steps = smoke(f"http://{LOOPBACK}:{port}", say=say)
    finally:
        for server in servers:
            server.close()

    assert len(servers) == 1
    assert states(steps)[:3] == [Conclusion.GOOD, Conclusion.GOOD, Conclusion.GOOD]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (page("", status="503 Service Unavailable"), "answers 503 Service Unavailable"),
        (page("", status="404 Not Found"), "answers 404 Not Found"),
        (reset, "/health hung up or broke HTTP before it answered"),
    ],
    ids=["ill", "missing", "resets"],
)
@pytest.mark.usefixtures("unhurried")
def test_one_that_never_gets_healthy_fails_at_the_deadline_and_is_asked_for_nothing_more(
    vllm: Vllm, answer: object, words: str
) -> None:
    vllm.answers["/health"] = answer  # type: ignore[assignment]

    steps = smoke(vllm.url, "--deadline", "0.5s")

    assert states(steps) == REST_SKIPPED
    assert steps["health"].text.startswith("not healthy within 0 s: ")
    assert words in steps["health"].text
    assert {head.split()[1] for head in vllm.requests} == {"/health"}


@pytest.mark.parametrize("answer", [hang, drip("x" * 9999)], ids=["nothing", "a byte at a time"])
def test_one_that_stalls_fails_at_the_deadline(vllm: Vllm, answer: Answer) -> None:
    vllm.answers["/health"] = answer

    steps = smoke(vllm.url, "--deadline", "0.5s")

    assert states(steps) == REST_SKIPPED
    assert "/health did not answer within " in steps["health"].text


@pytest.mark.usefixtures("unhurried")
def test_nothing_that_listens_fails_at_the_deadline() -> None:
    port = free_port()

    steps = smoke(f"http://{LOOPBACK}:{port}", "--deadline", "1s")

    assert states(steps) == REST_SKIPPED
    assert "(Connection refused): check that vLLM runs" in steps["health"].text


def test_a_token_file_that_cannot_be_read_is_bad_input_at_once(vllm: Vllm, tmp_path: Path) -> None:
    words = ("--deadline", "1m", "--engine-bearer-token-file", str(tmp_path / "missing"))
    with pytest.raises(BadInput, match=r"missing cannot be read \(No such file or directory\)"):
        smoke(vllm.url, *words)


class Asked(EngineServer):
    """Never answers as wanted, and remembers how long each question was given."""

    def __init__(self) -> None:
        super().__init__(load_as(SmokeSettings, ["--engine-url", "http://127.0.0.1:1"], {}))
        self.seconds: list[float] = []

    async def text(self, path: str, seconds: float) -> str | Failure:
        if path == "v1/models":
            return MODELS
        self.seconds.append(seconds)
        return Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="busy")

    async def post(self, path: str, _body: Mapping[str, object], seconds: float) -> Reply:
        self.seconds.append(seconds)
        await asyncio.sleep(0.01)  # some of the time is gone
        return Reply(status=404, text=path)


def test_the_last_question_is_given_as_long_as_the_first() -> None:
    asker = Asked()

    asyncio.run(wait_until_healthy(asker, 0.3, lambda _line: None))

    assert len(asker.seconds) > 1
    assert set(asker.seconds) == {0.3}


def test_a_chat_is_given_as_long_as_a_completion() -> None:
    asker = Asked()

    asyncio.run(request_completion(asker, 9.0))

    assert asker.seconds == [9.0, 9.0]
