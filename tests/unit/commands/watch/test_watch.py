"""The command over a sidecar's own endpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from threading import Thread

import pytest

from tests.command import read_data, run_command, run_process
from tests.fakes.engine_server import EngineServer, hang
from tests.process import eventually
from tests.unit.commands.screen import on_a_terminal, plain
from tests.unit.expose.views import day
from vllm_headroom.expose.snapshot import build_document
from vllm_headroom_tools import watch
from vllm_headroom_tools.bad_input import BadInput

LEAK = build_document(day(leaking=frozenset({0})))
WATCH = (sys.executable, "-m", "vllm_headroom", "watch")


@contextmanager
def sidecar(status: int = 200, body: bytes = json.dumps(LEAK).encode(), *later: bytes) -> Iterator[str]:
    bodies = chain((body,), later or repeat(body))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_snapshot = self.path == "/snapshot.json"
            next_body = next(bodies)
            self.send_response(status if is_snapshot else 404)
            self.send_header("Content-Length", str(len(next_body)))
            self.end_headers()
            self.wfile.write(next_body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def run_watch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("watch", *arguments)


def test_json_asks_once() -> None:
    with sidecar() as url:
        done = run_process("watch", url, "--json")

    assert done.returncode == 0, done.stderr
    assert read_data(done.stdout) == json.loads(json.dumps(LEAK))


DUE = {
    **LEAK,
    "engine_state": "serving",
    "gpus": [{**LEAK["gpus"][0], "leak_state": "leaking", "time_to_oom_seconds_lower": 1799.0}],
}
HOST_DUE = {"host_leak_state": {"worker": "leaking"}, "host_time_to_oom_seconds_lower": 1799.0}


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, 1),
        ({"gpus": [{**DUE["gpus"][0], "time_to_oom_seconds_lower": 1800.0}]}, 0),
        ({"gpus": [{**DUE["gpus"][0], "time_to_oom_seconds_lower": None}]}, 0),
        ({"gpus": [{**DUE["gpus"][0], "leak_state": "growing"}]}, 0),
        ({"gpus": [], **HOST_DUE}, 1),
        ({"engine_state": "starting"}, 0),
        ({"age_seconds": 901.0}, 2),
        ({"age_seconds": None}, 2),
        ({"gpus": None}, 2),
    ],
)
def test_the_exit_code_says_whether_a_leak_is_about_to_end_the_engine(changed: dict[str, object], status: int) -> None:
    with sidecar(body=json.dumps({**DUE, **changed}).encode()) as url:
        done = run_watch(url, "--exit-code", "30m")

    assert done.returncode == status, done.stderr
    assert done.stderr.count("\n") == (status == 2)
    assert ("ALARM" in done.stdout) == (status != 2)


def test_the_exit_code_and_json_go_together() -> None:
    with sidecar(body=json.dumps(DUE).encode()) as url:
        done = run_watch(url, "--exit-code", "30m", "--json")

    assert done.returncode == 1
    assert read_data(done.stdout)["engine_state"] == "serving"


def test_the_address_may_be_an_option_but_not_both() -> None:
    with sidecar() as url:
        command = run_command("watch", "--headroom-url", url, "--json")
        both = run_command("watch", url, "--headroom-url", url, "--json")

    assert command.returncode == 0
    assert read_data(command.stdout)["verdicts"]
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)
    assert "URL and --headroom-url cannot both be given" in both.stderr


def test_without_an_answer_json_ends_with_one_line() -> None:
    done = run_watch("http://127.0.0.1:9", "--json")

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert (
        "no connection to http://127.0.0.1:9/snapshot.json (Connection refused): check that vllm-headroom"
        in done.stderr
    )


def test_what_is_no_sidecar_is_named() -> None:
    with sidecar(body=b"{}") as url:
        assert "is not vllm-headroom" in run_watch(url, "--json").stderr
    with sidecar(body=b"<html>") as url:
        assert "is not vllm-headroom" in run_watch(url, "--json").stderr
    with sidecar(body=b"[" * 100_000) as url:
        assert "is not vllm-headroom" in run_watch(url, "--json").stderr
    with sidecar(body=json.dumps({**LEAK, "age_seconds": float("nan")}).encode()) as url:
        done = run_watch(url, "--json")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "is not vllm-headroom" in done.stderr
    with sidecar(status=503) as url:
        assert "answers 503" in run_watch(url, "--json").stderr


@pytest.mark.parametrize("wrong", [{"verdicts": [{}]}, {"verdicts": 1}, {"verdicts": [{"level": []}]}])
def test_a_document_of_another_shape_is_no_sidecars_either(wrong: dict[str, object]) -> None:
    with sidecar(body=json.dumps({**LEAK, **wrong}).encode()) as url:
        done = run_watch(url)

    assert done.returncode == 2
    assert done.stderr.startswith("vllm-headroom watch: what answers is not vllm-headroom: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("wrong", [{"age_seconds": "x"}, {"gpus": [{}]}, {"history": {"gpus": 1}}])
def test_a_terminal_is_left_as_it_was_by_a_document_of_another_shape(wrong: dict[str, object]) -> None:
    with sidecar(body=json.dumps({**LEAK, **wrong}).encode()) as url:
        shown, status = on_a_terminal([*WATCH, url])

    assert status == 2
    assert "what answers is not vllm-headroom" in plain(shown)


def test_what_a_sidecar_says_cannot_act_on_the_terminal() -> None:
    (gpu, *_) = LEAK["gpus"]
    spoiled = {**LEAK, "gpus": [{**gpu, "gpu": "\x1b]0;title"}]}
    with sidecar(body=json.dumps(spoiled).encode()) as url:
        shown, _ = on_a_terminal([*WATCH, url], signal_after=("]0;title", signal.SIGINT))

    assert "\\x1b]0;title" in shown
    assert "\x1b]0;title" not in shown


def test_away_from_a_terminal_it_writes_lines_and_ends_well() -> None:
    with sidecar() as url, subprocess.Popen([*WATCH, url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0

    assert line == "ALARM      GPU 0 leaks: out of memory in 2 h 0 min at the earliest, likely in about 4 h 0 min.\n"


def test_a_line_tells_when_the_engine_falls_asleep_though_all_is_well() -> None:
    def told(state: str, sentence: str) -> bytes:
        verdict = {"subject": "engine", "level": "good", "sentence": sentence, "alert": None}
        return json.dumps({**LEAK, "engine_state": state, "verdicts": [verdict]}).encode()

    serves = told("serving", "The engine serves: 1 running.")
    looks = (told("serving", "The engine serves: 2 running."), told("asleep", "The engine is asleep."))
    with sidecar(200, serves, *looks) as url, subprocess.Popen([*WATCH, url], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.kill()

    assert lines == [b"OK         The engine serves: 1 running.\n", b"OK         The engine is asleep.\n"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_it_draws_until_it_is_stopped_and_leaves_it_as_it_was(number: signal.Signals) -> None:
    with sidecar() as url:
        shown, status = on_a_terminal([*WATCH, url], signal_after=("on a scale from 0", number))

    assert status == 0
    assert shown.startswith("\x1b[?1049h")
    assert shown.endswith("\x1b[?25h\x1b[?1049l")
    assert "\x1b[1;31mALARM\x1b[0m" in shown
    assert shown.index("ALARM") < shown.index("█")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_it_fills_a_terminal_of_any_width_and_no_more(columns: int) -> None:
    with sidecar() as url:
        shown, status = on_a_terminal([*WATCH, url], columns=columns, signal_after=("running requests", signal.SIGINT))
    _, _, *frames = shown.split("\x1b[H")

    assert status == 0
    assert {len(line) for frame in frames for line in plain(frame).split("\r\n")} == {columns}


def test_why_there_is_no_answer_is_drawn_and_asked_again() -> None:
    shown, status = on_a_terminal([*WATCH, "http://127.0.0.1:9"], signal_after=("Connection refused", signal.SIGINT))

    assert status == 0
    assert shown.endswith("\x1b[?25h\x1b[?1049l")


def test_it_ends_without_waiting_for_a_sidecar_that_does_not_answer() -> None:
    with EngineServer(hang) as silent, subprocess.Popen([*WATCH, silent.url], stdout=subprocess.PIPE) as process:
        eventually(lambda: silent.requests, "it asks")
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=30)

    assert (process.returncode, shown) == (0, b"")  # after the answer's time it would say that there was none


def test_a_terminal_that_knows_only_lines_gets_lines() -> None:
    with sidecar() as url:
        shown, status = on_a_terminal([*WATCH, url], signal_after=("\n", signal.SIGINT), environment={"TERM": "dumb"})

    assert (status, shown.splitlines()[0]) == (
        0,
        "ALARM      GPU 0 leaks: out of memory in 2 h 0 min at the earliest, likely in about 4 h 0 min.",
    )


@pytest.mark.parametrize(
    "verdicts", [None, 3, [None], [{"text": "a newer format"}], [{"level": [], "subject": "engine", "sentence": "x"}]]
)
def test_json_of_another_shape_is_bad_input(verdicts: object) -> None:
    with pytest.raises(BadInput, match="not vllm-headroom"):
        watch.build_report({"headroom_snapshot": 1, "verdicts": verdicts, "gpus": [], "history": {}})
