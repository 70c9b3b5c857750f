from __future__ import annotations

import os
import socket
from pathlib import Path

import bcrypt
import pytest

from tests.fakes.certificates import write_self_signed
from tests.fakes.engine_server import Answer, EngineServer, hang, page
from tests.fakes.ports import free_port
from tests.process import daemon
from tests.unit.commands.doctor.looking import examined, lines
from vllm_headroom_tools.doctor.fixes import Check, Status

SERVED = 'headroom_build_info{version="0.1.0",revision="",python_version="3.13.0"} 1.0\n'


def listen_port(port: int, host: str = "127.0.0.1", **settings: str) -> Check:
    return examined(LISTEN_PORT=str(port), LISTEN_HOST=host, **settings)["listen_port"]


def test_a_free_port_is_reported_as_free_and_stays_so() -> None:
    port = free_port()

    check = listen_port(port)

    assert (check.state, check.text) == (Status.OK, f"port {port} is free: no daemon is running here")
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("host", ["", "127.0.0.1", "0.0.0.0"])
def test_a_running_daemon_is_reported_with_its_version(host: str) -> None:
    with EngineServer(page(SERVED)) as server:
        check = listen_port(server.port, host)

    assert check.state is Status.OK
    assert check.text == f"a daemon is running here and serves port {server.port}: vllm-headroom 0.1.0"


@pytest.mark.parametrize("answer", [page("node_load1 0.5\n"), page("x", status="404 Not Found"), hang])
def test_a_port_that_another_program_has_is_missing(answer: Answer) -> None:
    with EngineServer(answer) as server:
        check = listen_port(server.port)

    assert check.state is Status.MISSING
    assert check.text == f"port {server.port} is taken by something that does not answer as vllm-headroom"
    assert lines(check) == ["HEADROOM_LISTEN_PORT=9839"]


@pytest.fixture
def web_config(tmp_path: Path) -> Path:
    """Ask for TLS, and for certificates of clients, of which the doctor has none."""
    for name in ("server", "client"):
        write_self_signed(tmp_path, name)
    client_auth = "client_auth_type: RequireAndVerifyClientCert, client_ca_file: client.crt"
    file = tmp_path / "web.config.yml"
    file.write_text(f"tls_server_config: {{cert_file: server.crt, key_file: server.key, {client_auth}}}\n")
    return file


def test_a_daemon_behind_tls_is_known_by_its_certificate(web_config: Path) -> None:
    with daemon(WEB_CONFIG_FILE=str(web_config)) as running:
        port = int(running.url.rpartition(":")[2])
        check = listen_port(port, WEB_CONFIG_FILE=str(web_config))
        unknown = listen_port(port)

    text = f"a daemon is running here: port {port} speaks TLS with the certificate of HEADROOM_WEB_CONFIG_FILE"
    assert (check.state, check.text) == (Status.OK, text)
    assert unknown.state is Status.UNKNOWN
    assert unknown.text.startswith(f"port {port} speaks TLS, as a daemon with HEADROOM_WEB_CONFIG_FILE does")


def test_another_certificate_is_another_server(web_config: Path) -> None:
    with daemon(WEB_CONFIG_FILE=str(web_config)) as running:
        port = int(running.url.rpartition(":")[2])
        (web_config.parent / "server.crt").write_bytes((web_config.parent / "client.crt").read_bytes())

        assert listen_port(port, WEB_CONFIG_FILE=str(web_config)).state is Status.UNKNOWN


def test_a_daemon_with_users_is_asked_to_ask_for_a_password(tmp_path: Path) -> None:
    file = tmp_path / "web.config.yml"
    file.write_text(f"basic_auth_users: {{prometheus: {bcrypt.hashpw(b'any', bcrypt.gensalt(4)).decode()}}}\n")
    with daemon(WEB_CONFIG_FILE=str(file)) as running:
        port = int(running.url.rpartition(":")[2])
        check = listen_port(port, WEB_CONFIG_FILE=str(file))

    assert check.state is Status.UNKNOWN
    assert check.text.startswith(f"port {port} asks for a user and a password, as a daemon")


def test_an_address_of_another_machine_is_missing() -> None:
    check = listen_port(9839, "192.0.2.1")

    assert check.state is Status.MISSING
    assert "Cannot assign requested address" in check.text
    assert lines(check) == ["HEADROOM_LISTEN_HOST=  # nothing: all interfaces"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may listen everywhere")
def test_a_port_for_root_alone_is_missing_another() -> None:
    assert lines(listen_port(81)) == ["HEADROOM_LISTEN_PORT=9839"]


def test_any_port_does_not_apply() -> None:
    assert listen_port(0).state is Status.NOT_APPLICABLE
