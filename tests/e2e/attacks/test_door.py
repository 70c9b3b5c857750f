"""Who knocks in ways that no client does, and a file of the door that cannot be used."""

from __future__ import annotations

import base64
import contextlib
import socket
from pathlib import Path

import pytest

from tests.e2e.door import PASSWORD, client, guarded, port, secured, write
from tests.fakes.certificates import write_self_signed
from tests.fakes.engine_server import LOOPBACK
from tests.process import eventually


def test_half_a_handshake_holds_up_nobody(folder: Path) -> None:
    with guarded(folder) as running:
        silent = [socket.create_connection((LOOPBACK, port(running)), timeout=30) for _ in range(300)]
        with client(folder, running) as trusted_client:
            assert trusted_client.get("/healthz", auth=("prometheus", PASSWORD)).status_code == 200
        for connection in silent:
            connection.close()
        assert running.stop()[0] == 0


@pytest.mark.parametrize("login", [b"Basic \xff", b"Basic ="])
def test_a_login_that_is_none_is_refused(folder: Path, login: bytes) -> None:
    with guarded(folder) as running, secured(folder, running) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: " + login + b"\r\n\r\n")

        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        assert "Traceback" not in running.log()


def test_a_check_that_gives_way_to_a_crowd_costs_its_connection_and_no_other(folder: Path) -> None:
    write(folder, cost=13)  # half a second, in which the crowd comes
    guess = base64.b64encode(b"prometheus:guess")
    with guarded(folder) as running, contextlib.ExitStack() as crowd, secured(folder, running) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Basic " + guess + b"\r\n\r\n")
        for _ in range(300):
            crowd.enter_context(socket.create_connection((LOOPBACK, port(running)), timeout=30))

        assert connection.recv(4096)[:12] in (b"", b"HTTP/1.1 401")
        with client(folder, running) as trusted_client:
            # On a busy machine a check of this cost may take longer than a client waits for one.
            eventually(
                lambda: trusted_client.get("/healthz", auth=("prometheus", PASSWORD)).status_code == 200,
                "the login holds",
            )


def test_a_file_that_cannot_be_used_later_leaves_the_door_as_it_was(folder: Path) -> None:
    with guarded(folder) as running:
        (folder / "web.config.yml").write_text('tls_server_config: {cert_file: "a\\0", key_file: server.key}')
        eventually(lambda: "not read again" in running.log(), "the mistake is found")

        with client(folder, running) as trusted_client:
            assert trusted_client.get("/healthz", auth=("prometheus", PASSWORD)).status_code == 200


@pytest.mark.parametrize("content", ["", "null", "{}", "basic_auth_users:\n"], ids=["blank", "null", "braces", "users"])
def test_a_file_that_is_emptied_leaves_tls_and_login_on(folder: Path, content: str) -> None:
    file = folder / "web.config.yml"
    with guarded(folder) as running, client(folder, running) as trusted_client:
        old_text = file.read_text()
        file.write_text(content)
        eventually(lambda: "takes a restart" in running.log(), "it is refused")

        page = trusted_client.get("/metrics", auth=("prometheus", PASSWORD))
        assert "headroom_web_config_reload_success 0.0" in page.text
        assert trusted_client.get("/metrics").status_code == 401
        file.write_text(old_text)
        eventually(lambda: "web configuration read again" in running.log(), "the restored file is taken")
        with client(folder, running) as again:
            page = again.get("/metrics", auth=("prometheus", PASSWORD))
            assert "headroom_web_config_reload_success 1.0" in page.text


def test_an_open_connection_ends_when_its_authority_is_replaced(folder: Path) -> None:
    request = base64.b64encode(f"prometheus:{PASSWORD}".encode())
    with guarded(folder) as running, secured(folder, running) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Basic " + request + b"\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        write_self_signed(folder, "client")
        connection.settimeout(30)

        assert not connection.recv(4096)
