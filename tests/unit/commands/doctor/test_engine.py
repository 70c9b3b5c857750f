from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import Answer, EngineServer, hang, page
from tests.fakes.ports import free_port
from tests.fakes.proc_tree import ProcTree
from tests.unit.commands.doctor.looking import RECORDED, Vllm, examined, lines
from vllm_headroom.model import Failure, GpuReadings, ProcessReadings
from vllm_headroom.vocabulary import REASONS, Reason, Source
from vllm_headroom_tools.doctor.engine import check_engine
from vllm_headroom_tools.doctor.fixes import Status, Survey, find_engine_fixes, fix_setting


def test_a_vllm_is_reported_with_its_version_and_model() -> None:
    with Vllm(version="0.32.0") as server:
        check = examined(ENGINE_URL=server.url)["engine"]

    assert (check.state, check.fixes, check.absent) == (Status.OK, (), ())
    assert check.text == f"{server.url} answers: vllm, version 0.32.0, model tiny"


def test_every_engine_of_a_page_is_counted() -> None:
    with Vllm((FOLDER / "vllm-0.32.0-data-parallel-2" / "load-waiting.prom").read_text()) as server:
        assert examined(ENGINE_URL=server.url)["engine"].text.endswith("model tiny, 2 engines")


@pytest.mark.parametrize(
    "version", [page(RECORDED), page("[]"), page('{"version": 1}'), page("x", status="404 No"), hang]
)
def test_a_version_that_is_not_reported_is_not_made_up(version: Answer) -> None:
    with Vllm() as server:
        server.version = version
        check = examined(ENGINE_URL=server.url)["engine"]

    assert check.state is Status.OK
    assert check.text == f"{server.url} answers: vllm, version not reported, model tiny"


def test_the_engine_is_asked_with_the_settings_that_the_daemon_has(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    with Vllm() as server:
        examined(ENGINE_URL=server.url, ENGINE_BEARER_TOKEN_FILE=str(token), ENGINE_HEADERS='{"X-Tenant": "a"}')

    assert sorted(head.split()[1] for head in server.requests) == ["/metrics", "/version"]
    assert all("Authorization: Bearer sesame" in head and "X-Tenant: a" in head for head in server.requests)


def test_a_dead_port_is_missing_with_the_failures_words_and_the_setting() -> None:
    check = examined(ENGINE_URL=f"http://127.0.0.1:{free_port()}")["engine"]

    assert check.state is Status.MISSING
    assert "Connection refused" in check.text
    assert "HEADROOM_ENGINE_URL=http://HOST:PORT/metrics" in lines(check)
    assert "headroom_engine_requests_*" in check.absent


@pytest.mark.parametrize(
    ("answer", "words", "line"),
    [
        (hang, "no complete page within 0.3 s", "HEADROOM_ENGINE_TIMEOUT_SECONDS=10"),
        (page("gone", status="404 Not Found"), "answers 404", "HEADROOM_ENGINE_URL=http://HOST:PORT/metrics"),
        (page("<html>log in</html>"), "is not metrics", "HEADROOM_ENGINE_URL=http://HOST:PORT/metrics"),
        (page("", status="401 Unauthorized"), "answers 401", "HEADROOM_ENGINE_BEARER_TOKEN_FILE=/path/to/token"),
        (page("node_load1 0.5\n"), "no series of an engine", "HEADROOM_ENGINE_URL=http://HOST:PORT/metrics"),
    ],
    ids=["hangs", "404", "HTML", "401", "another-program"],
)
def test_a_page_that_is_not_the_engines_is_missing(answer: Answer, words: str, line: str) -> None:
    with EngineServer(answer) as server:
        findings = examined(ENGINE_URL=server.url, ENGINE_TIMEOUT_SECONDS="0.3" if answer is hang else "30")

    finding = findings["engine"]
    assert finding.state is Status.MISSING
    assert words in finding.text
    assert line in lines(finding)
    assert {findings[name].state for name in ("engine_inputs", "reported_memory")} == {Status.UNKNOWN}


def test_a_vllm_without_its_statistics_is_shown_the_option() -> None:
    with Vllm((FOLDER / "vllm-0.32.0-disable-log-stats" / "idle.prom").read_text()) as server:
        check = examined(ENGINE_URL=server.url)["engine"]

    assert check.state is Status.MISSING
    assert lines(check)[0] == "--disable-log-stats"


def test_a_vllm_that_runs_here_with_another_port_is_named(tmp_path: Path) -> None:
    ProcTree(tmp_path).add(10, 1, "python3", "/venv/bin/vllm", "serve", "m", "--port", "8123")

    check = examined(tmp_path, ENGINE_URL=f"http://127.0.0.1:{free_port()}")["engine"]

    assert check.details == ("an engine that runs here serves port 8123",)
    assert lines(check) == ["HEADROOM_ENGINE_URL=http://127.0.0.1:8123/metrics"]


def test_a_vllm_that_runs_here_and_does_not_listen_may_be_loading(tmp_path: Path) -> None:
    port = free_port()
    ProcTree(tmp_path).add(10, 1, "python3", "/venv/bin/vllm", "serve", "m", "--port", str(port))

    check = examined(tmp_path, ENGINE_URL=f"http://127.0.0.1:{port}")["engine"]

    assert check.state is Status.MISSING
    assert "while an engine loads its model" in check.details[0]
    assert lines(check)[0] == "Application startup complete."


def test_a_password_is_not_shown() -> None:
    with Vllm() as server:
        answers = examined(ENGINE_URL=server.url.replace("//", "//me:hunter2@"))
    fails = examined(ENGINE_URL=f"http://me:hunter2@127.0.0.1:{free_port()}")

    assert "hunter2" not in f"{answers}{fails}"


def test_giving_up_before_the_daemon_would_is_not_called_missing() -> None:
    failure = Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="no page within 6 s")
    sight = Survey(
        url=httpx.URL("http://127.0.0.1:8000/metrics"),
        page=failure,
        version=None,
        readings=GpuReadings(driver_version=None, devices=()),
        gpus=(),
        processes=ProcessReadings(engine=(), visible_pids=frozenset(), sees_host_pids=True),
        daemon_waits_seconds=30.0,
    )

    check = check_engine(sight)

    assert check.state is Status.UNKNOWN
    assert check.details == ("the daemon waits 30 s, this command 6 s",)


@pytest.mark.parametrize("reason", REASONS[Source.ENGINE])
def test_every_reason_has_a_fix(reason: Reason) -> None:
    assert find_engine_fixes(reason, fix_setting("HEADROOM_ENGINE_URL=http://h"))
