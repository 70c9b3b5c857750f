"""The chart, alone and embedded as its README says, and what Helm makes of it."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.assets.kubernetes.rendering import HERE, REPOSITORY

FOLDER: Final = REPOSITORY / "deploy" / "helm"
CHART: Final = FOLDER / "vllm-headroom"
CLUSTER: Final = FOLDER / "vllm-headroom-cluster"
PYTHON: Final = os.environ.get("HELM_PYTHON", str(REPOSITORY / ".helm" / "bin" / "python"))

PARENT: Final = {
    "apiVersion": "v2",
    "name": "engine",
    "version": "1.2.3",
    "dependencies": [{"name": "vllm-headroom", "version": "0.1.0"}],
}
DEPLOYMENT: Final = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: '{{ .Release.Name }}'}
spec:
  selector: {matchLabels: {vllm-headroom: enabled}}
  template:
%s
      containers:
%s
        image: "vllm/vllm-openai:v0.32.0"
"""
VLLM: Final = "      - name: vllm"


def embedding() -> str:
    """Return the README's lines for the template of a pod, without what the list they are in indents them by."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```yaml\n( +metadata:\n.*?\n) +```", text, re.DOTALL)
    return re.sub(r"^ {3}", "", lines, flags=re.MULTILINE).rstrip("\n")


def probing() -> str:
    """Return the README's lines for vLLM's container, in the same way."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```yaml\n( +- name: vllm\n.*?\n) +```", text, re.DOTALL)
    return re.sub(r"^ {3}", "", lines, flags=re.MULTILINE).rstrip("\n")


def digest() -> str:
    """Return what changes when the engine chart does, or how it is embedded."""
    files = [path for path in sorted(CHART.rglob("*")) if path.is_file()]
    texts = [f"{path.relative_to(CHART)}\0{path.read_text(encoding='utf-8')}" for path in files]
    return hashlib.sha256("\0".join([*texts, embedding(), probing()]).encode()).hexdigest()


def parent(folder: Path, *, probe: bool = False, chart: Path = CHART) -> Path:
    """Write the chart of somebody's vLLM that depends on ours, and return its folder; with what the probe needs."""
    shutil.copytree(chart, folder / "charts" / CHART.name)
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text(yaml.safe_dump(PARENT))
    (folder / "templates" / "deployment.yaml").write_text(DEPLOYMENT % (embedding(), probing() if probe else VLLM))
    return folder


@cache
def has_helm() -> bool:
    """Return whether Helm's SDK is here, as `make helm` installs it."""
    return Path(PYTHON).exists() and not subprocess.run([PYTHON, "-c", "import helm_sdkpy"], check=False).returncode


def step(action: str, release: str, chart: Path = CHART, **values: Any) -> dict[str, Any]:
    """Return one step of Helm's."""
    return {"action": action, "release": release, "chart": str(chart), "values": values}


@cache
def _start() -> subprocess.Popen[str]:
    """Start the process that runs Helm for all tests: that takes half a second each time."""
    process = subprocess.Popen(
        [PYTHON, str(HERE / "helm_render.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.wait)
    atexit.register(process.kill)
    return process


def run(*steps: dict[str, Any]) -> dict[str, Any]:
    """Return what Helm answered to each of these steps, and the objects that there are after them."""
    if not has_helm():
        pytest.skip("helm-sdkpy is not here (make helm; it needs Python 3.12): the charts are not installed")
    process = _start()
    assert process.stdin
    assert process.stdout
    process.stdin.write(f"{json.dumps(steps)}\n")
    process.stdin.flush()
    answers: dict[str, Any] = json.loads(process.stdout.readline())
    return answers


def render(chart: Path, values: dict[str, Any]) -> str:
    """Return the manifest of the release `headroom` of a chart with these values."""
    (answer,) = run(step("install", "headroom", chart, **values))["answers"]
    assert "error" not in answer, answer["error"]
    return str(answer["manifest"])


def render_hooks(chart: Path, values: dict[str, Any]) -> str:
    """Return what Helm would create for the hooks of the same release, such as `helm test`."""
    (answer,) = run(step("install", "headroom", chart, **values))["answers"]
    return "---\n".join(answer["hooks"])


def refusal(chart: Path, values: dict[str, Any]) -> str:
    """Return why Helm does not install a chart with these values."""
    (answer,) = run(step("install", "headroom", chart, **values))["answers"]
    return str(answer["error"])
