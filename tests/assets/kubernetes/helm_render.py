"""Run Helm's steps, on an API server that keeps every object: install, install beside it, upgrade, uninstall.

Run by the tests with a Python that has helm-sdkpy. Each line that it reads is a list of steps, as JSON, on an empty
server; it prints their answers and the objects.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
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
from urllib.parse import parse_qs, urlsplit

MOST_SECONDS: Final = 120
KINDS: Final = {
    "v1": {"configmaps": "ConfigMap", "secrets": "Secret", "serviceaccounts": "ServiceAccount"},
    "apps/v1": {"daemonsets": "DaemonSet", "deployments": "Deployment"},
    "monitoring.coreos.com/v1": {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "rbac.authorization.k8s.io/v1": {
        "clusterroles": "ClusterRole",
        "roles": "Role",
        "rolebindings": "RoleBinding",
    },
}
RELEASE: Final = re.compile(rb"H4sI[A-Za-z0-9+/=]+")
"""A release, as Helm keeps it in a Secret: compressed, in base 64, inside of a message that need not be understood."""


def discovered(path: str) -> dict[str, Any] | None:
    """Return what the server reports about itself and the kinds it knows, None where it knows nothing."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [(name.partition("/")[0], {"groupVersion": name, "version": "v1"}) for name in KINDS if "/" in name]
        groups = [
            {"name": group, "versions": [group_version], "preferredVersion": group_version}
            for group, group_version in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version in KINDS:
        resources = [
            {"name": name, "kind": kind, "namespaced": not kind.startswith("Cluster")}
            for name, kind in KINDS[version].items()
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    return None


def release(text: str) -> dict[str, Any]:
    """Return a release from the text in its Secret."""
    return dict(json.loads(gzip.decompress(base64.b64decode(text))))


def secret(text: str) -> dict[str, Any]:
    """Return the Secret that holds a release, with the labels by which Helm finds it."""
    stored_release = release(text)
    labels = {
        "owner": "helm",
        "name": stored_release["name"],
        "version": str(stored_release["version"]),
        "status": stored_release["info"]["status"],
    }
    name = f"sh.helm.release.v1.{stored_release['name']}.v{stored_release['version']}"
    return {
        "kind": "Secret",
        "apiVersion": "v1",
        "type": "helm.sh/release.v1",
        "metadata": {"name": name, "namespace": "vllm", "labels": labels},
        "data": {"release": base64.b64encode(text.encode()).decode()},
    }


class Kept(BaseHTTPRequestHandler):
    """Keeps each object under its path."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, dict[str, Any]]] = {}

    def do_GET(self) -> None:
        """Answer with an object, or with the Secrets that have the labels asked for."""
        url = urlsplit(self.path)
        if url.path.endswith("/secrets"):
            selector = parse_qs(url.query).get("labelSelector", [""])[0]
            labels = dict(word.split("=") for word in selector.split(",") if word)
            items = [
                stored_object
                for path, stored_object in self.objects.items()
                if "/secrets/" in path and labels.items() <= stored_object["metadata"]["labels"].items()
            ]
            self._answer({"kind": "SecretList", "apiVersion": "v1", "items": items})
            return
        self._answer(self.objects.get(url.path) or discovered(url.path))

    def do_POST(self) -> None:
        """Take a new object."""
        new_object = self._body()
        self._keep(f"{urlsplit(self.path).path}/{new_object['metadata']['name']}", new_object, 201)

    def do_PUT(self) -> None:
        """Take an object in place of another; PATCH is server-side apply, whose body is the whole object."""
        self._keep(urlsplit(self.path).path, self._body(), 200)

    do_PATCH = do_PUT  # noqa: N815 - the library's name

    def do_DELETE(self) -> None:
        """Forget an object."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(self.objects.pop(urlsplit(self.path).path, None))

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def _body(self) -> dict[str, Any]:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        release_match = RELEASE.search(body) if "/secrets" in self.path else None
        return secret(release_match[0].decode()) if release_match else dict(json.loads(body))

    def _keep(self, path: str, document: dict[str, Any], status: int) -> None:
        self.objects[path] = document
        self._answer(document, status)

    def _answer(self, content: dict[str, Any] | None, status: int = 200) -> None:
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(content or missing).encode()
        self.send_response(status if content else 404)
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
            "clusters": [{"name": "kept", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [{"name": "kept", "context": {"cluster": "kept", "user": "nobody"}}],
            "current-context": "kept",
        }
    )


def take(helm: Any, kubeconfig: Path, step: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest after one step, or the error it ended with."""
    action = getattr(helm, step["action"].capitalize())(
        helm.Configuration(namespace="vllm", kubeconfig=str(kubeconfig))
    )
    try:
        if step["action"] == "uninstall":
            asyncio.run(action.run(step["release"], wait=False))
            return {"manifest": ""}
        options = {"wait": False, "server_side_apply": True}
        asyncio.run(action.run(step["release"], step["chart"], values=step["values"], **options))
    except helm.HelmError as error:
        return {"error": str(error)}
    name = f"sh.helm.release.v1.{step['release']}.v"
    stored_secrets = [document for document in Kept.objects.values() if document["metadata"]["name"].startswith(name)]
    newest = max(stored_secrets, key=lambda stored_secret: int(stored_secret["metadata"]["labels"]["version"]))
    newest_release = release(base64.b64decode(newest["data"]["release"]).decode())
    return {
        "manifest": newest_release["manifest"],
        "hooks": [hook["manifest"] for hook in newest_release.get("hooks", ())],
    }


def main() -> None:
    """Take the steps of each line and print their answers, and the objects at the end."""
    helm = importlib.import_module("helm_sdkpy")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kept)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "config"
        kubeconfig.write_text(configuration(server.server_port), encoding="utf-8")
        for line in sys.stdin:
            faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
            Kept.objects.clear()
            answers = [take(helm, kubeconfig, step) for step in json.loads(line)]
            objects = [document for document in Kept.objects.values() if document["kind"] != "Secret"]
            sys.stdout.write(json.dumps({"answers": answers, "objects": objects}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
