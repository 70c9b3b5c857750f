"""The API server of a cluster over TLS, as a pod finds it: address, token, authority and namespace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from tests.fakes.api_server.cluster import NAMESPACE, Cluster, failure
from tests.fakes.certificates import server_context, write_self_signed
from tests.fakes.local_server import LocalServer

TOKEN: Final = "t0ken"  # noqa: S105 - no secret


class ApiServer(LocalServer):
    """Serves `cluster` on loopback, in the time of this machine; `fault` names what happens to a request of a path.

    "hang" sends no answer before the server is closed, "gone" ends the connection, "cut" once the request is done.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.fault: Callable[[str], str] = lambda _: ""
        self.token = TOKEN
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.began = time.monotonic()
        super().__init__(self._handler())
        certificate, key = write_self_signed(folder, "ca")
        self._server.socket = server_context(certificate, key).wrap_socket(self._server.socket, server_side=True)
        for name, text in (("token", TOKEN), ("namespace", NAMESPACE)):
            (folder / name).write_text(f"{text}\n")

    def environment(self, pod: str) -> dict[str, str]:
        """Return the variables of a pod's containers."""
        host, port = self._server.server_address[:2]
        return {"KUBERNETES_SERVICE_HOST": str(host), "KUBERNETES_SERVICE_PORT": str(port), "POD_NAME": pod}

    def close(self) -> None:
        self.closing.set()
        super().close()

    def answer(self, method: str, path: str, body: dict[str, Any] | None, token: str | None) -> tuple[int, object]:
        if token != f"Bearer {self.token}":
            return failure(401, "Unauthorized")
        with self.lock:
            self.cluster.advance(time.monotonic() - self.began)
            return self.cluster.request(method, path, body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                fault = server.fault(self.path)
                if fault == "gone":
                    self.close_connection = True
                    return
                if fault == "hang":
                    server.closing.wait()
                status, answer = server.answer(self.command, self.path, body, self.headers.get("Authorization"))
                if fault in {"hang", "cut"}:
                    self.close_connection = True
                    return
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = _answer  # noqa: N815 - the library's names

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
