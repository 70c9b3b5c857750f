"""Nothing that is secret is in anything that is said, whatever goes wrong."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import Answer, EngineServer, cut, page, with_head
from tests.process import daemon, eventually

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
USER, PASSWORD, QUERY, HEADER, TOKEN, COOKIE = "us3r", "pa55word", "qu3ry", "h3ader", "t0ken", "c00kie"
SECRETS = (USER, PASSWORD, QUERY, HEADER, TOKEN, COOKIE)
TROUBLE: dict[str, Answer] = {
    "well": page(RECORDED, headers=(f"Set-Cookie: id={COOKIE}",)),
    "404": page("gone", status="404 Not Found"),
    "401": page("who?", status="401 Unauthorized"),
    "500": page("oops", status="500 Internal Server Error"),
    "redirect": page("", status="302 Found", headers=(f"Location: http://{USER}:{PASSWORD}@elsewhere/?t={QUERY}",)),
    "login": page("<html>log in</html>"),
    "half": cut(with_head(RECORDED.encode()[:2000], length=50_000)),
    "not-http": cut(b"220 smtp\r\n"),
}


def settings(engine: EngineServer, folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.write_text(TOKEN)
    url = engine.url.replace("://", f"://{USER}:{PASSWORD}@") + f"?token={QUERY}"
    return {
        "ENGINE_URL": url,
        "ENGINE_HEADERS": f'{{"X-Key": "{HEADER}"}}',
        "ENGINE_BEARER_TOKEN_FILE": str(token),
        "LOG_LEVEL": "debug",
    }


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    with EngineServer(TROUBLE["well"]) as server:
        yield server


def asked_since(engine: EngineServer, count_before: int) -> bool:
    return len(engine.requests) > count_before + 1


def leaked(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def run_against(engine: EngineServer, folder: Path, *words: str, **variables: str) -> str:
    """Return all that a command says."""
    environment = {f"HEADROOM_{name}": value for name, value in (settings(engine, folder) | variables).items()}
    result = subprocess.run(
        [sys.executable, "-m", "vllm_headroom", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return result.stdout + result.stderr


def test_the_daemon_says_nothing_secret_whatever_the_engine_answers(engine: EngineServer, tmp_path: Path) -> None:
    trace, state = tmp_path / "trace", tmp_path / "state"
    variables = {"TRACE_FILE": str(trace), "STATE_DIR": str(state), "SAMPLE_INTERVAL_SECONDS": "0.5"}
    with daemon(**settings(engine, tmp_path), **variables) as running:
        for answer in TROUBLE.values():
            engine.answer = answer
            eventually(partial(asked_since, engine, len(engine.requests)), "it was asked twice")
            assert leaked(running.get("/metrics").text + running.get("/").text + running.get("/healthz").text) == []
        engine.close()
        running.sees(lambda page: page.value("source_failures_total", reason="unreachable") >= 1, "it is gone")
        running.stop()
        log = running.log()

    assert "source failed" in log
    assert leaked(log) == []
    assert leaked(trace.read_text()) == []
    assert [path.name for path in state.iterdir() if leaked(path.read_text())] == []


@pytest.mark.parametrize("trouble", ["well", "404", "not-http"])
@pytest.mark.parametrize(
    "command", [("--print-config",), ("doctor",), ("doctor", "--json"), ("smoke", "--json", "--deadline", "1s")]
)
def test_no_command_says_anything_secret(
    command: tuple[str, ...], trouble: str, engine: EngineServer, tmp_path: Path
) -> None:
    engine.answer = TROUBLE[trouble]

    text = run_against(engine, tmp_path, *command)

    assert text
    assert leaked(text) == []


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://{USER}:{PASSWORD}@host/?token={QUERY}",
        f"http://{USER}:{PASSWORD}@ho st/?token={QUERY}",
        f"http://host name/metrics?token={USER}@{QUERY}",
        f"http://{USER}:{PASSWORD}?x@ho st/",
    ],
)
def test_an_address_that_is_refused_is_shown_without_its_secrets(
    url: str, engine: EngineServer, tmp_path: Path
) -> None:
    text = run_against(engine, tmp_path, ENGINE_URL=url)

    assert "HEADROOM_ENGINE_URL" in text
    assert leaked(text) == []


def in_memory(pid: int, pattern: bytes) -> set[bytes]:
    """Return what is like the pattern anywhere in a process's own memory."""
    matches = set[bytes]()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            addresses, access = line.split()[:2]
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if access.startswith("rw") and "/" not in line:
                memory.seek(begin)
                matches |= set(re.findall(pattern, memory.read(end - begin)))
    return matches


def test_cookies_of_the_engine_are_not_kept(engine: EngineServer) -> None:
    """A new one at every reading: kept, they would be a leak of the daemon's own."""

    def answer(connection: socket.socket, closing: threading.Event) -> None:
        name = f"{COOKIE}{len(engine.requests):04d}"
        page(RECORDED, headers=(f"Set-Cookie: {name}=x",))(connection, closing)

    engine.answer = answer
    with daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="0.1") as running:
        eventually(lambda: len(engine.requests) > 50, "it was asked again and again")
        cookies = in_memory(running.process.pid, COOKIE.encode() + rb"\d{4}")

    assert len(cookies) < len(engine.requests) / 2


def test_a_cookie_of_the_engine_is_not_sent_back(engine: EngineServer, tmp_path: Path) -> None:
    with daemon(**settings(engine, tmp_path), SAMPLE_INTERVAL_SECONDS="0.5"):
        eventually(lambda: len(engine.requests) > 3, "it was asked again and again")

    assert not any("cookie" in head.lower() for head in engine.requests)
    assert all(f"?token={QUERY} " in head for head in engine.requests), "the query is sent as it was set"
    for header in (f"x-key: {HEADER}", f"authorization: bearer {TOKEN}", "accept-encoding: identity"):
        assert all(header in head.lower().splitlines() for head in engine.requests), "and so are headers"
