"""A daemon behind a door of TLS, client certificates and a password, and who knocks there."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import httpx

from tests.fakes.engine_server import LOOPBACK
from tests.process import Daemon, daemon

PASSWORD = "pa55word"  # noqa: S105 - of nobody
CONFIG = """\
tls_server_config:
  cert_file: server.crt
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: client.crt
  client_allowed_sans: [{san}]
http_server_config:
  headers:
    Strict-Transport-Security: max-age=31536000
basic_auth_users:
  prometheus: {hashed}
"""


def write(folder: Path, san: str = LOOPBACK, cost: int = 4) -> None:
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(cost)).decode()
    (folder / "web.config.yml").write_text(CONFIG.format(hashed=hashed, san=san))


@contextmanager
def guarded(folder: Path) -> Iterator[Daemon]:
    with daemon(WEB_CONFIG_FILE=str(folder / "web.config.yml")) as running:
        yield running


def port(running: Daemon) -> int:
    return int(running.url.rpartition(":")[2])


def client(folder: Path, running: Daemon, *, certified: bool = True) -> httpx.Client:
    context = ssl.create_default_context(cafile=folder / "server.crt")
    if certified:
        context.load_cert_chain(folder / "client.crt", folder / "client.key")
    return httpx.Client(base_url=f"https://{LOOPBACK}:{port(running)}", verify=context, timeout=30)


@contextmanager
def secured(folder: Path, running: Daemon) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "client.crt", folder / "client.key")
    with (
        socket.create_connection((LOOPBACK, port(running)), timeout=30) as plain,
        context.wrap_socket(plain) as wrapped,
    ):
        yield wrapped
