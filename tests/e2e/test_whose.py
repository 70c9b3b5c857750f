"""Whose processes and memory the real daemon takes for its engine's, beside others that look like vLLM's."""

from __future__ import annotations

import socket
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from tests.e2e.life import Start, becomes, last_look, settings, state
from tests.fakes.engine_server import EngineServer, Hangup, page
from tests.fakes.nvml.library import GIB, FakeNvml
from tests.process import NO_TLS, Daemon, Page, daemon

REASONS = ("replaced", "gone", "out_of_memory", "oom_killed")
ELSEWHERE = ("unshare", "--user", "--map-root-user", "--net")
"""Runs a program in a separate network namespace, as a pod is."""


def read_held_bytes(page: Page) -> tuple[float, float]:
    """Return what is reported to be the engine's and another's, in GiB."""
    engine, other_gib = (page.value("gpu_memory_held_bytes", holder=holder) / GIB for holder in ("engine", "other"))
    return engine, other_gib


def ends(page: Page) -> float:
    return sum(page.value("engine_exits_total", reason=reason) for reason in REASONS)


def looked_again(running: Daemon) -> Page:
    """Return a page of which every source was read after now, twice."""
    looked_before = last_look(running.sees(lambda page: page.has("engine_state"), "a first look"))
    return running.sees(lambda page: last_look(page) > looked_before + 10, "two more looks")


def is_down(running: Daemon) -> None:
    """Check that nothing of what is seen is attributed to the engine."""
    alone = looked_again(running)
    assert state(alone) == "down"
    assert not alone.has("host_memory_bytes")
    assert not alone.has("gpu_memory_held_bytes", holder="engine")


def serves_its_first_life(running: Daemon, engine: float, other_gib: float) -> None:
    becomes(running, "serving")
    seen_page = running.sees(
        lambda page: read_held_bytes(page) == (engine, other_gib), "the engine's memory is told from the other's"
    )
    assert (ends(seen_page), seen_page.value("engine_restarts_total")) == (0, 0)
    assert "engine exited" not in running.log()


def test_another_engine_is_not_taken_for_one_that_is_not_up_yet(
    start: Start, nvml: FakeNvml, port: int, another_port: int
) -> None:
    start("another", port=another_port, held_gib=30)
    with daemon(**settings(port, nvml)) as running:
        is_down(running)

        start("ours", held_gib=20)
        serves_its_first_life(running, 20, 30)


@pytest.mark.alone
def test_one_that_tells_no_port_may_be_it_and_is_nothing_once_that_comes(
    start: Start, nvml: FakeNvml, port: int, another_port: int
) -> None:
    another = start("another", port=another_port, tells_port=False, ready=False, held_gib=30)
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "unknown")

        start("ours", held_gib=20)
        serves_its_first_life(running, 20, 30)
        another.end()
        assert ends(looked_again(running)) == 0


@pytest.mark.alone
def test_the_end_of_one_that_only_might_have_been_it_is_none(
    start: Start, nvml: FakeNvml, port: int, another_port: int
) -> None:
    another = start("another", port=another_port, tells_port=False, ready=False, held_gib=30)
    with daemon(**settings(port, nvml)) as running:
        unknown = becomes(running, "unknown")
        assert not unknown.has("gpu_memory_held_bytes", holder="engine")
        assert not unknown.has("host_memory_bytes")
        assert "engine's processes not chosen" in running.log()

        another.end()
        assert ends(becomes(running, "down")) == 0


def test_one_with_the_same_port_on_another_network_is_not_taken_either(start: Start, nvml: FakeNvml, port: int) -> None:
    if subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives out no namespaces")
    start("another", ready=False, held_gib=30, launcher=ELSEWHERE)
    with daemon(**settings(port, nvml)) as running:
        is_down(running)

        start("ours", held_gib=20)
        serves_its_first_life(running, 20, 30)


def mapped(port: int) -> EngineServer:
    """Return what listens in place of an engine, and hangs up while that does not."""

    def answer(connection: socket.socket, closing: threading.Event) -> None:
        try:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, verify=NO_TLS).text
        except httpx.TransportError:
            raise Hangup from None
        page(text)(connection, closing)

    return EngineServer(answer)


def test_behind_a_mapping_the_start_on_the_page_tells_which_it_is(
    start: Start, nvml: FakeNvml, port: int, another_port: int
) -> None:
    ours = start("ours", port=another_port, ready=False, held_gib=20)
    with mapped(another_port) as mapping, daemon(**settings(port, nvml, ENGINE_URL=mapping.url)) as running:
        becomes(running, "unknown")

        start("another", ready=False, held_gib=30)
        ours.become_ready()
        serves_its_first_life(running, 20, 30)

        for pid in (ours.server, ours.core, *ours.workers):
            ours.kill(pid)
        down = becomes(running, "down")
        assert (ends(down), down.value("engine_restarts_total")) == (1, 0)


def test_a_neighbour_is_not_the_next_run_of_a_dead_engine_nor_for_the_next_daemon(
    start: Start, nvml: FakeNvml, port: int, another_port: int, tmp_path: Path
) -> None:
    daemon_settings = settings(port, nvml, STATE_DIR=str(tmp_path / "state"))
    ours = start("ours")
    start("another", port=another_port, held_gib=5)
    with daemon(**daemon_settings) as running:
        becomes(running, "serving")
        for pid in (ours.server, ours.core, ours.worker):
            ours.kill(pid)
        becomes(running, "down")
        running.stop()

    with daemon(**daemon_settings) as running:
        down = looked_again(running)
        assert (state(down), ends(down), down.value("engine_restarts_total")) == ("down", 1, 0)


def test_each_of_two_daemons_tells_its_own_of_two_engines(
    start: Start, nvml: FakeNvml, port: int, another_port: int
) -> None:
    start("one", held_gib=20)
    two = start("two", port=another_port, held_gib=30)
    with daemon(**settings(port, nvml)) as first_daemon, daemon(**settings(another_port, nvml)) as second:
        serves_its_first_life(first_daemon, 20, 30)
        serves_its_first_life(second, 30, 20)

        for pid in (two.server, two.core):
            two.kill(pid)
        becomes(second, "down")
        left_page = looked_again(second)
        assert read_held_bytes(left_page) == (30, 20), "what it left is its own"
        assert (state(first_daemon.page()), read_held_bytes(first_daemon.page())) == ("serving", (20, 30))
