"""The real daemon evicts its pod through an API server, and keeps sampling whatever that does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.fakes.api_server.cluster import LABELS, ROLE, Cluster
from tests.fakes.api_server.server import ApiServer
from tests.process import Daemon, daemon, eventually

DEMO: Final = ("demo", "--speed", "1000", "--sample-interval-seconds", "60", "--scenario", "leak")
"""The leak is sure after some seconds."""


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(replicas=2, grace_seconds=1e6)


@pytest.fixture
def api(cluster: Cluster, tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(cluster, tmp_path) as server:
        yield server


@contextmanager
def leaking(api: ApiServer, folder: Path, mode: str = "on", place: int = 0) -> Iterator[Daemon]:
    settings = {"EVICT": mode, "EVICT_SECONDS": "86400", "GATE_READY_SECONDS": "86400"}
    pod = list(api.cluster.pods)[place]
    with daemon(*DEMO, module="tests.e2e.evicting", ACCOUNT=str(folder), **api.environment(pod), **settings) as sidecar:
        yield sidecar


def requests(sidecar: Daemon, result: str) -> float:
    page = sidecar.sees(lambda page: page.has("eviction_requests_total"), "a first sample")
    return page.value("eviction_requests_total", result=result)


def test_a_leak_evicts_the_pod_once_and_closes_the_gate(api: ApiServer, cluster: Cluster, tmp_path: Path) -> None:
    with leaking(api, tmp_path) as sidecar:
        assert sidecar.get("/gate/ready").text == "open\n"
        sidecar.sees(lambda page: page.value("eviction_requests_total", result="accepted") == 1, "it evicts its pod")
        sidecar.sees(lambda page: page.value("gate_open", gate="ready") == 0, "the gate closes")
        renewed = cluster.asked.count("update leases")
        eventually(lambda: cluster.asked.count("update leases") > renewed, "it renews the Lease")
        assert re.search(r"may be out of memory in", sidecar.get("/gate/ready").text)
        log = sidecar.log()

    assert set(cluster.asked) == ROLE
    assert cluster.asked.count("create pods/eviction") == 1
    assert cluster.voluntary == 1
    assert re.search(r'"?asked for the eviction of this pod"? .*why="GPU 0 .*leaks and', log)


def test_of_two_daemons_one_evicts_its_pod_and_the_other_waits(tmp_path: Path) -> None:
    both = {"selector": {"matchLabels": LABELS}, "maxUnavailable": 2}
    cluster = Cluster(replicas=2, grace_seconds=1e6, budgets=(both,))
    with (
        ApiServer(cluster, tmp_path) as api,
        leaking(api, tmp_path) as first_sidecar,
        leaking(api, tmp_path, place=1) as second_sidecar,
    ):
        sidecars = (first_sidecar, second_sidecar)
        eventually(lambda: sum(requests(sidecar, "accepted") for sidecar in sidecars) == 1, "one evicts its pod")
        eventually(lambda: any("holds Lease" in sidecar.log() for sidecar in sidecars), "the other waits")
        open_gates = sum(sidecar.page().value("gate_open", gate="ready") for sidecar in sidecars)

    assert cluster.voluntary == 1
    assert open_gates == 1


def test_an_api_server_that_hangs_holds_nothing_up(api: ApiServer, cluster: Cluster, tmp_path: Path) -> None:
    api.fault = lambda _: "hang"
    with leaking(api, tmp_path) as sidecar:
        leaks = sidecar.sees(lambda page: page.value("leak_state", state="leaking") == 1, "it leaks")
        success_seconds = leaks.value("source_last_success_timestamp_seconds", source="engine")
        sidecar.sees(
            lambda page: page.value("source_last_success_timestamp_seconds", source="engine") > success_seconds + 600,
            "it samples on",
        )
        assert sidecar.get("/healthz").status_code == 200
        assert cluster.asked == []
        status, seconds = sidecar.stop()

    assert status == 0
    assert seconds < 10, "a hung request does not hold up the end"


def test_a_cut_eviction_is_counted_as_failed(api: ApiServer, cluster: Cluster, tmp_path: Path) -> None:
    api.fault = lambda path: "cut" if path.endswith("/eviction") else ""
    with leaking(api, tmp_path) as sidecar:
        sidecar.sees(lambda page: page.value("eviction_requests_total", result="failed") >= 1, "no answer")
        eventually(lambda: "the API server does not answer" in sidecar.log(), "it says so")

    assert cluster.voluntary == 1, "it was carried out, all the same"


def test_a_token_that_is_not_taken_is_read_again(api: ApiServer, tmp_path: Path) -> None:
    api.token = "rotated"  # noqa: S105 - no secret
    with leaking(api, tmp_path) as sidecar:
        eventually(lambda: "answers 401: Unauthorized" in sidecar.log(), "it is refused")
        (tmp_path / "token").write_text("rotated")
        sidecar.sees(lambda page: page.value("eviction_requests_total", result="accepted") == 1, "it evicts its pod")
