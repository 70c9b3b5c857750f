"""Print what Helm renders of a chart: the SDK installs it, on an API server that only takes notes.

Run by the tests with a Python that has helm-sdkpy: helm_render.py CHART VALUES_AS_JSON.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import importlib
import json
import re
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Final

KINDS: Final = {
    "v1": {"configmaps": "ConfigMap", "secrets": "Secret", "serviceaccounts": "ServiceAccount"},
    "apps/v1": {"deployments": "Deployment"},
    "monitoring.coreos.com/v1": {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
}
RELEASE: Final = re.compile(rb"H4sI[A-Za-z0-9+/=]+")
"""A release, as Helm keeps it in a Secret: compressed, in base 64, inside of a message that need not be understood."""


def discovered(path: str) -> dict[str, Any] | None:
    """Return what the server says of itself and of the kinds it knows, None where it knows nothing."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [(name.partition("/")[0], {"groupVersion": name, "version": "v1"}) for name in KINDS if "/" in name]
        groups = [{"name": group, "versions": [each], "preferredVersion": each} for group, each in versions]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version in KINDS:
        resources = [{"name": name, "kind": kind, "namespaced": True} for name, kind in KINDS[version].items()]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    return {"kind": "SecretList", "apiVersion": "v1", "items": []} if path.endswith("/secrets") else None


class Notes(BaseHTTPRequestHandler):
    """Has no object, takes every object, and remembers the releases."""

    protocol_version = "HTTP/1.1"
    releases: ClassVar[list[bytes]] = []

    def do_GET(self) -> None:
        """Answer what there is."""
        found = discovered(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self._answer(200 if found else 404, found or missing)

    def do_POST(self) -> None:
        """Take an object; Secrets come in another encoding."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/secrets" not in self.path:
            self._answer(201, json.loads(body))
            return
        self.releases.extend(RELEASE.findall(body))
        self._answer(201, {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "release"}})

    do_PUT = do_POST  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def configuration(port: int) -> str:
    """Return how to reach the server, in the words of kubectl."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "notes", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [{"name": "notes", "context": {"cluster": "notes", "user": "nobody"}}],
            "current-context": "notes",
        }
    )


def main(chart: str, values: str) -> None:
    """Install the chart and print its manifest."""
    helm = importlib.import_module("helm_sdkpy")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Notes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "config"
        kubeconfig.write_text(configuration(server.server_port), encoding="utf-8")
        install = helm.Install(helm.Configuration(namespace="vllm", kubeconfig=str(kubeconfig)))
        options = {"wait": False, "server_side_apply": False, "disable_openapi_validation": True}
        asyncio.run(install.run("headroom", chart, values=json.loads(values), **options))
    release = json.loads(gzip.decompress(base64.b64decode(Notes.releases[-1])))
    sys.stdout.write(release["manifest"])


if __name__ == "__main__":
    main(*sys.argv[1:])
