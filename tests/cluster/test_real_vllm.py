"""A real vLLM on the CPU in a pod, with the component `probe`: each of its processes reports to the sidecar.

CLUSTER_ENGINE is the folder that tests/engine/setup.sh filled, on this machine; without it the test is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.cluster.cluster import IS_OWN_CLUSTER, ROOT, SIDECAR_IMAGE, START_SECONDS, Workload, kubectl
from tests.process import NO_TLS, eventually

ENGINE: Final = Path(os.environ.get("CLUSTER_ENGINE", "")).resolve()
PYTHON: Final = ENGINE / "venv" / "bin" / "python"
HAS_ENGINE: Final = "CLUSTER_ENGINE" in os.environ and PYTHON.exists()

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not IS_OWN_CLUSTER or not HAS_ENGINE, reason="CLUSTER_ENGINE has no vLLM for this node"),
]

LOOK_SECONDS: Final = 2.0
LIBRARIES: Final = ("libnuma.so.1", "libgomp.so.1")
"""What vLLM's CPU build needs that the sidecar's image does not have."""

ROLES: Final = {"api_server", "engine_core", "worker"}
SAMPLES: Final = ('headroom_source_up{source="probe"} 1', 'headroom_engine_state{state="serving"} 1')
FIND_FOLDERS: Final = "import json, sys; print(json.dumps([sys.base_prefix, *sys.path]))"

OVERLAY: Final = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: {namespace}
resources:
- ../{base}
components:
- {probe}
images:
- {{name: ghcr.io/vllm-headroom/vllm-headroom, newName: {sidecar[0]}, newTag: "{sidecar[1]}"}}
patches:
- target: {{kind: Namespace}}
  patch: |-
    - {{op: replace, path: /metadata/labels/pod-security.kubernetes.io~1enforce, value: privileged}}
- target: {{kind: Deployment, name: vllm}}
  patch: '{patch}'
"""
"""The namespace has to allow volumes of the node."""


def find_folders() -> list[str]:
    """Return the folders of the interpreter and of all that it imports, none inside another."""
    done = subprocess.run([PYTHON, "-P", "-c", FIND_FOLDERS], capture_output=True, text=True, check=True)
    folders: list[str] = []
    for folder in sorted({str(ENGINE), *json.loads(done.stdout)}):
        is_inside = any(folder == other_folder or folder.startswith(f"{other_folder}/") for other_folder in folders)
        if Path(folder).is_dir() and not is_inside:
            folders.append(folder)
    return folders


def copy_libraries(folder: Path) -> None:
    """Copy the libraries of this machine that vLLM needs."""
    report = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for library in LIBRARIES:
        match = re.search(rf"^\s*{re.escape(library)} .*x86-64.* => (\S+)$", report, re.MULTILINE)
        assert match, f"this machine has no {library}"
        shutil.copy(match[1], folder / library)


def build_patch(libraries: Path) -> dict[str, Any]:
    """Return the patch by which the example's container runs the real vLLM of this machine."""
    folders = [*find_folders(), str(libraries)]
    settings = {
        "LD_LIBRARY_PATH": str(libraries),
        "HOME": "/tmp",  # noqa: S108 - of the container
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--load-format=dummy", "--max-model-len=2048", "--max-num-seqs=16", "--enforce-eager"]
    container = {
        "name": "vllm",
        "command": [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(ENGINE / "tiny")],
        "args": ["--served-model-name=tiny", "--host=0.0.0.0", "--port=8000", *options],
        "env": [{"name": name, "value": value} for name, value in settings.items()],
        "startupProbe": {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 200},
        "resources": {"limits": {"memory": "10Gi"}},
        # The interpreter may lie in a home folder, which root alone may enter.
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [
            {"name": f"node-{number}", "mountPath": folder, "readOnly": True} for number, folder in enumerate(folders)
        ],
    }
    volumes = [{"name": f"node-{number}", "hostPath": {"path": folder}} for number, folder in enumerate(folders)]
    spec = {"template": {"spec": {"containers": [container], "volumes": volumes}}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}, "spec": spec}


def apply_engine(folder: Path) -> Workload:
    workload = Workload(f"headroom-{uuid.uuid4().hex[:4]}-real")
    workload.write_overlay(folder, 1)
    libraries = folder / "libraries"
    libraries.mkdir()
    copy_libraries(libraries)
    place = folder / "real"
    place.mkdir()
    text = OVERLAY.format(
        namespace=workload.namespace,
        base=workload.namespace,
        probe=os.path.relpath(ROOT / "deploy" / "kubernetes" / "components" / "probe", place),
        sidecar=SIDECAR_IMAGE.rsplit(":", 1),
        patch=json.dumps(build_patch(libraries)),
    )
    (place / "kustomization.yaml").write_text(text)
    kubectl("apply", "--server-side", "--kustomize", str(place))
    return workload


def read_roles(workload: Workload) -> dict[str, str]:
    """Return the role of each process of vLLM that reports, by its name, from the files that the sidecar reads."""
    script = (
        "import glob, json\n"
        "for path in glob.glob('/run/headroom-probe/*-*[0-9].json'):\n"
        "    report = json.load(open(path))\n"
        "    print(json.dumps([report['process_name'], report['role']]))\n"
    )
    text = workload.exec("headroom", "/opt/vllm-headroom/bin/python3", "-c", script)
    return dict(json.loads(line) for line in text.splitlines() if line.startswith("["))


def test_each_process_of_a_real_vllm_reports_to_the_sidecar(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    workload = apply_engine(tmp_path)
    request.addfinalizer(workload.delete)
    eventually(lambda: workload.is_ready(1), "vLLM serves", START_SECONDS, LOOK_SECONDS)
    eventually(lambda: set(read_roles(workload).values()) >= ROLES, "all processes report", START_SECONDS, LOOK_SECONDS)
    (pod,) = workload.pods()
    page_url = f"http://{pod['status']['podIP']}:9839/metrics"

    def read_page() -> str:
        text = httpx.get(page_url, timeout=30, verify=NO_TLS).text
        return text if all(sample in text for sample in SAMPLES) else ""

    eventually(read_page, "the sidecar reads the engine that serves, and the probe", START_SECONDS, LOOK_SECONDS)
    print(read_roles(workload))  # noqa: T201 - the result
