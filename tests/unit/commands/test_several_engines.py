"""Commands about one of several engines that a daemon watches."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.command import read_data, run_command
from tests.fakes.api_server.cluster import NAMESPACE, Cluster
from tests.fakes.api_server.server import ApiServer
from tests.fakes.cgroups import V2Tree
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.node_tree import NodeTree
from tests.unit.commands.check.engine_traces import engine, write_trace
from tests.unit.expose.views import day
from vllm_headroom.expose.snapshot import build_document
from vllm_headroom.model import EngineName
from vllm_headroom.scrape.proc.node import LocatedEngine
from vllm_headroom.trace.flight import FLIGHT
from vllm_headroom.vocabulary import EngineKind
from vllm_headroom_tools.doctor import node as doctor_node
from vllm_headroom_tools.doctor.node import check_cgroups, check_evictions, check_probes, examine_node
from vllm_headroom_tools.settings import ModelSettings

LEAKING = build_document(day(leaking=frozenset({0})))
QUIET = build_document(day())
PAGE = """\
headroom_build_info{{python_version="3.11",revision="",version="0.1.0"}} 1.0
headroom_sample_age_seconds 1.0
headroom_engine_info{{engine="0",model_name="{model}",profile="vllm"}} 1.0
"""
UNION = """\
headroom_build_info{python_version="3.11",revision="",version="0.1.0"} 1.0
headroom_engines{kind="watched"} 2.0
headroom_engine_state{container="vllm",namespace="a",pod="llama-0",state="serving"} 1.0
headroom_engine_state{container="vllm",namespace="b",pod="llama-0",state="serving"} 1.0
"""
LISTED = "choose one with --engine: a/llama-0/vllm, b/llama-0/vllm"


def describe(namespace: str, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": f"{namespace}/llama-0",
        "namespace": namespace,
        "pod": "llama-0",
        "container": "vllm",
        "snapshot": document,
    }


@contextmanager
def serve_node(*namespaces: str) -> Iterator[str]:
    """Serve a daemon's pages, on which each namespace has an engine; that of "a" leaks."""
    node = {
        "headroom_node": 1,
        "engines": [describe(name, LEAKING if name == "a" else QUIET) for name in namespaces],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            wanted = parse_qs(url.query).get("engine", [""])[0]
            text = json.dumps(node)
            if url.path == "/metrics":
                text = PAGE.format(model=f"model-of-{wanted[0]}") if wanted else UNION
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_watch_shows_the_engine_that_is_named() -> None:
    with serve_node("a", "b") as url:
        leaking = run_command("watch", url, "--json", "--engine", "a/llama-0")
        quiet = run_command("watch", url, "--json", "--engine", "b/llama-0/vllm")

    assert (read_data(leaking.stdout)["level"], read_data(quiet.stdout)["level"]) == ("alarm", QUIET["level"])


def test_watch_needs_no_name_for_the_only_engine() -> None:
    with serve_node("a") as url:
        assert read_data(run_command("watch", url, "--json").stdout)["level"] == "alarm"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), f"several engines are watched: {LISTED}"),
        (("--engine", "c/other"), "no engine 'c/other' is watched; there are: a/llama-0/vllm, b/llama-0/vllm"),
    ],
)
@pytest.mark.parametrize("command", ["watch", "advise"])
def test_a_command_asks_for_the_engine_by_name(command: str, arguments: tuple[str, ...], problem: str) -> None:
    with serve_node("a", "b") as url:
        done = run_command(command, "--headroom-url", url, *arguments, "--json")

    assert done.returncode == 2
    assert problem in json.loads(done.stdout)["headline"]


def test_advise_reads_the_page_of_the_engine_that_is_named() -> None:
    with serve_node("a", "b") as url:
        done = run_command("advise", "--headroom-url", url, "--engine", "b/llama-0", "--json")

    assert "model-of-b" in done.stdout
    assert "model-of-a" not in done.stdout


class TestPostmortem:
    @staticmethod
    def make(state_dir: Path, *names: str) -> None:
        for seconds, name in enumerate(names, start=1):
            folder = state_dir / name
            folder.mkdir(parents=True)
            os.utime(folder, (seconds, seconds))

    @pytest.mark.parametrize(
        ("wanted", "folder"),
        [
            ("a/llama-0", "engine-a_llama-0_uid-2_8000"),
            ("a/llama-0/vllm", "engine-a_llama-0_uid-2_8000"),
            ("vllm.service", "engine-vllm.service_8000"),
            ("http://127.0.0.1:8001/metrics", "engine-127.0.0.1-8001-metrics_8001"),
        ],
    )
    def test_the_folder_of_an_engine_is_found_by_its_name(self, tmp_path: Path, wanted: str, folder: str) -> None:
        self.make(
            tmp_path,
            "engine-a_llama-0_uid-1_8000",
            "engine-a_llama-0_uid-2_8000",
            "engine-vllm.service_8000",
            "engine-127.0.0.1-8001-metrics_8001",
        )
        done = run_command("postmortem", str(tmp_path), "--engine", wanted)

        assert done.returncode == 2
        assert f"{tmp_path / folder}: has no incident" in done.stderr

    def test_without_a_name_several_are_listed(self, tmp_path: Path) -> None:
        self.make(tmp_path, "engine-a_llama-0_uid-1_8000", "engine-b_llama-0_uid-2_8000")

        done = run_command("postmortem", HEADROOM_STATE_DIR=str(tmp_path))

        assert done.returncode == 2
        assert "choose one with --engine: a/llama-0, b/llama-0" in done.stderr

    def test_a_name_for_a_folder_of_one_engine_is_refused(self, tmp_path: Path) -> None:
        done = run_command("postmortem", str(tmp_path), "--engine", "a/b")

        assert done.returncode == 2
        assert "leave --engine out" in done.stderr


def test_check_reads_the_flight_record_of_the_engine_that_is_named(tmp_path: Path) -> None:
    for namespace, restart_seconds in {"a": 0.0, "b": 600.0}.items():
        folder = tmp_path / f"engine-{namespace}_llama-0_uid_8000"
        folder.mkdir()
        write_trace(folder / FLIGHT, engine(0.5, restarts_at=restart_seconds))
    limit = ("--max-restarts", "0")

    named = {
        name: run_command("check", "--trace", str(tmp_path), "--engine", f"{name}/llama-0", *limit) for name in "ab"
    }
    unnamed = run_command("check", "--trace", str(tmp_path), *limit)
    misplaced = run_command("check", "--trace", "-", "--engine", "a/llama-0", *limit)

    assert {name: command.returncode for name, command in named.items()} == {"a": 0, "b": 1}
    assert (unnamed.returncode, misplaced.returncode) == (2, 2)
    assert "choose one with --engine: a/llama-0, b/llama-0" in unnamed.stderr
    assert "--engine: needs a state folder" in misplaced.stderr


def test_smoke_takes_the_engine_that_is_named() -> None:
    with EngineServer(page("", status="404 Not Found")) as first_server, EngineServer(page("")) as second_server:
        urls = f"{first_server.url},{second_server.url}"
        done = run_command("smoke", "--deadline", "1s", "--json", HEADROOM_ENGINES=urls)
        chosen = run_command(
            "smoke", "--deadline", "1s", "--engine", second_server.url, "--json", HEADROOM_ENGINES=urls
        )

    assert "choose one with --engine" in json.loads(done.stdout)["headline"]
    assert str(second_server.url).removesuffix("/metrics") in read_data(chosen.stdout)["engine_url"]


def test_doctor_lists_the_engines_and_what_each_lacks(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    server = ("python3", "/usr/bin/vllm", "serve", "m")
    tree.add_pod(1, 100, *server, name="llama-0", listening=[("127.0.0.1", 8000)])
    tree.add_pod(2, 200, *server, name="llama-1", listening=[("0.0.0.0", 8000), ("0.0.0.0", 9839)])
    with EngineServer(page("")) as engine:
        port = int(str(engine.url).rpartition(":")[2].partition("/")[0])
        tree.add_pod(3, 300, *server, "--port", str(port), address="127.0.0.1", listening=[("127.0.0.1", port)])
        (tree.path / "9999" / "net").symlink_to(tree.path / "300" / "net")
        settings = ModelSettings(engines="node", engine_timeout_seconds=1.0, listen_port=0)
        checks = asyncio.run(examine_node(settings, tree.path, tmp_path))

    assert checks["engines"].text == "1 watched, 1 left to their own sidecar, 1 unreadable"
    assert "start it with --host 0.0.0.0" in checks["engines"].details[0]
    (page_check,) = (check for name, check in checks.items() if name.startswith("engine "))
    assert page_check.state == "missing"
    assert checks["memory_limits"].state == "not_applicable"
    assert "1 of 1 engines" in checks["memory_limits"].text
    assert checks["memory_limits"].fixes


def locate_pod(namespace: str, uid: str) -> LocatedEngine:
    return LocatedEngine(
        kind=EngineKind.WATCHED,
        key=f"pod:{uid}:8000",
        owner_key=f"pod:{uid}",
        name=EngineName(namespace=namespace, pod=f"llama-{uid}", container="vllm"),
    )


def test_doctor_names_the_engines_without_a_folder_of_their_probe(tmp_path: Path) -> None:
    (tmp_path / "uid-1").mkdir()

    checks = [check_probes([locate_pod("llm", f"uid-{number}")], tmp_path) for number in (1, 2)]

    assert [(check.state, check.details) for check in checks] == [("ok", ()), ("not_applicable", ("llm/llama-uid-2",))]
    assert "node-probe" in checks[1].fixes[0].lines[0]


def test_doctor_names_the_namespaces_in_which_no_pod_may_be_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [locate_pod(NAMESPACE, "1"), locate_pod("other", "2")]
    monkeypatch.setattr(doctor_node, "ACCOUNT", tmp_path)
    assert asyncio.run(check_evictions(engines, "off")).state == "not_applicable"
    unmounted = asyncio.run(check_evictions(engines, "on"))
    assert "node-evict" in unmounted.fixes[0].lines[0]
    with ApiServer(Cluster(replicas=1), tmp_path) as api:
        for name, value in api.environment("vllm-0").items():
            monkeypatch.setenv(name, value)
        check = asyncio.run(check_evictions(engines, "dry-run"))
        allowed = asyncio.run(check_evictions(engines[:1], "dry-run"))

    assert (check.state, [detail.partition(":")[0] for detail in check.details]) == ("missing", ["other"])
    assert "--namespace=other" in check.fixes[0].lines[0]
    assert (allowed.state, allowed.text) == ("ok", f"dry-run: may evict pods in {NAMESPACE}")


def test_doctor_sees_whether_the_cgroups_of_the_engines_are_mounted(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.add(100, 1, "python3", "/usr/bin/vllm", "serve", "m")
    engine = LocatedEngine(
        kind=EngineKind.WATCHED,
        key="/system.slice/vllm.service:8000",
        owner_key="/system.slice/vllm.service",
        name=EngineName(unit="vllm.service"),
    )

    V2Tree(tmp_path / "cgroup", tree.path).add("system.slice/vllm.service", pids=(100,))
    check = check_cgroups([engine], tree.path)

    assert (check.state, check.fixes) == ("ok", ())
