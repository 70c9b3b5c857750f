from __future__ import annotations

import os
import socket

import pytest

from tests.fakes.engine_server import Answer, EngineServer, hang, page
from tests.unit.commands.doctor.looking import examined, lines
from vllm_headroom.commands.doctor.finding import Finding, Name, State

SERVED = 'headroom_build_info{version="0.1.0",revision="",python_version="3.13.0"} 1.0\n'


def listen_port(port: int, host: str = "127.0.0.1") -> Finding:
    return examined(LISTEN_PORT=str(port), LISTEN_HOST=host)[Name.LISTEN_PORT]


def test_a_free_port_is_told_as_free_and_stays_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    found = listen_port(port)

    assert (found.state, found.text) == (State.OK, f"port {port} is free: no daemon is running here")
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("host", ["", "127.0.0.1", "0.0.0.0"])
def test_a_running_daemon_is_told_with_its_version(host: str) -> None:
    with EngineServer(page(SERVED)) as server:
        found = listen_port(server.port, host)

    assert found.state is State.OK
    assert found.text == f"a daemon is running here and serves port {server.port}: vllm-headroom 0.1.0"


@pytest.mark.parametrize("answer", [page("node_load1 0.5\n"), page("x", status="404 Not Found"), hang])
def test_a_port_that_another_program_has_is_missing(answer: Answer) -> None:
    with EngineServer(answer) as server:
        found = listen_port(server.port)

    assert found.state is State.MISSING
    assert found.text == f"port {server.port} is taken by something that does not answer as vllm-headroom"
    assert lines(found) == ["HEADROOM_LISTEN_PORT=9839"]


def test_an_address_of_another_machine_is_missing() -> None:
    found = listen_port(9839, "192.0.2.1")

    assert found.state is State.MISSING
    assert "Cannot assign requested address" in found.text
    assert lines(found) == ["HEADROOM_LISTEN_HOST=  # nothing: all interfaces"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may listen everywhere")
def test_a_port_for_root_alone_is_missing_another() -> None:
    assert lines(listen_port(81)) == ["HEADROOM_LISTEN_PORT=9839"]


def test_any_port_does_not_apply() -> None:
    assert listen_port(0).state is State.NOT_APPLICABLE
