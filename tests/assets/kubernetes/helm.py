"""The chart, alone and embedded as its README says, and what Helm makes of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from tests.assets.kubernetes.rendering import HERE, REPOSITORY

FOLDER: Final = REPOSITORY / "deploy" / "helm"
CHART: Final = FOLDER / "vllm-headroom"
PYTHON: Final = os.environ.get("HELM_PYTHON", sys.executable)

PARENT: Final = {
    "apiVersion": "v2",
    "name": "engine",
    "version": "1.2.3",
    "dependencies": [{"name": "vllm-headroom", "version": "0.1.0"}],
}
DEPLOYMENT: Final = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: engine}
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
    """Return the README's lines for the template of a pod, without what the list they stand in indents them by."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```yaml\n( +metadata:\n.*?\n) +```", text, re.DOTALL)
    return re.sub(r"^ {3}", "", lines, flags=re.MULTILINE).rstrip("\n")


def probing() -> str:
    """Return the README's lines for vLLM's container, in the same way."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```yaml\n( +- name: vllm\n.*?\n) +```", text, re.DOTALL)
    return re.sub(r"^ {3}", "", lines, flags=re.MULTILINE).rstrip("\n")


def digest() -> str:
    """Return what changes when the chart does, or how it is embedded; what it links to is not part of it."""
    files = [path for path in sorted(CHART.rglob("*")) if path.is_file() and not path.is_symlink()]
    texts = [f"{path.relative_to(CHART)}\0{path.read_text(encoding='utf-8')}" for path in files]
    return hashlib.sha256("\0".join([*texts, embedding(), probing()]).encode()).hexdigest()


def parent(folder: Path, *, probe: bool = False) -> Path:
    """Write the chart of somebody's vLLM that depends on ours, and return its folder; with what the probe needs."""
    shutil.copytree(CHART, folder / "charts" / CHART.name)
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text(yaml.safe_dump(PARENT))
    (folder / "templates" / "deployment.yaml").write_text(DEPLOYMENT % (embedding(), probing() if probe else VLLM))
    return folder


def command() -> list[str] | None:
    """Return what renders a chart here, None where there is neither Helm nor its SDK."""
    if shutil.which("helm"):
        return ["helm", "template", "headroom"]
    found = subprocess.run([PYTHON, "-c", "import helm_sdkpy"], capture_output=True, check=False)
    return [PYTHON, str(HERE / "helm_render.py")] if found.returncode == 0 else None


def render(renderer: list[str], chart: Path, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Return what Helm says of the chart with these values."""
    text = json.dumps(values)
    arguments, given = (["--namespace", "vllm", "--values", "-"], text) if renderer[0] == "helm" else ([text], None)
    return subprocess.run(
        [*renderer, str(chart), *arguments], input=given, capture_output=True, text=True, check=False, timeout=120
    )
