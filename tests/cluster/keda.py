"""KEDA beside a cluster of our own: its operator and its metrics adapter as processes, behind the API server."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.cluster.cluster import FOLDER, NODE, START_SECONDS, kubectl, read
from tests.e2e.paging import free_addresses
from tests.process import eventually

OPERATOR: Final = FOLDER / "keda-operator"
ADAPTER: Final = FOLDER / "keda-adapter"
CONFIG: Final = FOLDER / "keda-config"
"""KEDA's own manifests, of its module."""

METRICS_API: Final = "v1beta1.external.metrics.k8s.io"
ADAPTER_SERVICE: Final = "keda-metrics-apiserver"
ADAPTER_PORT: Final = 6443
GRPC_PORT: Final = 9666


def write_certificate(folder: Path) -> str:
    """Write the certificate by which both know each other and the API server knows the adapter; return it."""
    names = f"subjectAltName=DNS:localhost,DNS:{ADAPTER_SERVICE}.keda.svc"
    key = ("-newkey", "rsa:2048", "-nodes", "-keyout", str(folder / "tls.key"))
    command = ("openssl", "req", "-x509", *key, "-subj", "/CN=keda", "-addext", names, "-out", str(folder / "tls.crt"))
    subprocess.run(command, check=True, capture_output=True)
    shutil.copy(folder / "tls.crt", folder / "ca.crt")
    return (folder / "tls.crt").read_text()


def build_service(node_address: str, certificate: str) -> list[dict[str, Any]]:
    """Return the adapter's Service, which leads to the node, and its API."""
    metadata = {"name": ADAPTER_SERVICE, "namespace": "keda"}
    ports = [{"name": "https", "port": 443, "targetPort": ADAPTER_PORT, "protocol": "TCP"}]
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata | {"labels": {"kubernetes.io/service-name": ADAPTER_SERVICE}},
            "addressType": "IPv4",
            "ports": [{"name": "https", "port": ADAPTER_PORT, "protocol": "TCP"}],
            "endpoints": [{"addresses": [node_address], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": METRICS_API},
            "spec": {
                "service": {"name": ADAPTER_SERVICE, "namespace": "keda"},
                "group": "external.metrics.k8s.io",
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "caBundle": base64.b64encode(certificate.encode()).decode(),
            },
        },
    ]


def is_available() -> bool:
    """Return whether the API server reaches the adapter."""
    conditions = read("apiservice", METRICS_API).get("status", {}).get("conditions", [])
    return any(condition["type"] == "Available" and condition["status"] == "True" for condition in conditions)


@contextmanager
def run_keda(folder: Path) -> Iterator[None]:
    """Run KEDA until the end, from when the API server reaches its adapter; an empty folder is for its files."""
    config = str(NODE / "admin.conf")
    environment = os.environ | {"KUBECONFIG": config, "POD_NAMESPACE": "keda", "WATCH_NAMESPACE": ""}
    environment["KEDA_CLUSTER_OBJECT_NAMESPACE"] = "keda"
    certificate = write_certificate(folder)
    operator = (
        str(OPERATOR),
        f"--cert-dir={folder}",
        f"--metrics-service-bind-address=:{GRPC_PORT}",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
    )
    own_metrics_address, _ = free_addresses()
    adapter = (
        str(ADAPTER),
        f"--port={own_metrics_address.rpartition(':')[2]}",
        f"--secure-port={ADAPTER_PORT}",
        f"--metrics-service-address=localhost:{GRPC_PORT}",
        f"--cert-dir={folder}",
        f"--tls-cert-file={folder / 'tls.crt'}",
        f"--tls-private-key-file={folder / 'tls.key'}",
        *(f"--{name}-kubeconfig={config}" for name in ("authentication", "authorization", "lister")),
    )
    for path in ("general/namespace.yaml", "metrics-server/role.yaml", "metrics-server/role_binding.yaml"):
        kubectl("apply", f"--filename={CONFIG / path}")
    (node,) = read("nodes")["items"]
    (node_address,) = (item["address"] for item in node["status"]["addresses"] if item["type"] == "InternalIP")
    for document in build_service(node_address, certificate):
        kubectl("apply", "--filename=-", input_text=json.dumps(document))
    with ExitStack() as stack:
        stack.callback(kubectl, "delete", "namespace", "keda", "--wait=false")
        stack.callback(kubectl, "delete", "apiservice", METRICS_API)
        for command in (operator, adapter):
            log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("wb"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        eventually(is_available, "the API server reaches KEDA's adapter", START_SECONDS, 1.0)
        yield
