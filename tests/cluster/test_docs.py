"""Every command line of docs/kubernetes.md that needs a cluster, on one, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
import pytest
import yaml

from tests.assets.console import ROOT, Block, blocks
from tests.assets.kubernetes.rendering import documents
from tests.cluster.cluster import FOLDER, IS_OWN_CLUSTER, SIDECAR_IMAGE, START_SECONDS, Workload, kubectl
from tests.process import NO_TLS, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not IS_OWN_CLUSTER, reason="the page's names are fixed, and may be taken on another cluster"),
]

PAGE: Final = ROOT / "docs" / "kubernetes.md"
ADDRESS: Final = re.compile(r"https://github\.com/vllm-headroom/vllm-headroom//(\S+)\?ref=\S+")
COMMAND_SECONDS: Final = START_SECONDS
NVML_MOUNT: Final = "volumeMounts: [{name: nvml, mountPath: /run/nvml, readOnly: true}]"
"""The fake GPU of the stand-in's pod."""

IMAGE_NAME: Final = SIDECAR_IMAGE.rpartition(":")[0]
IMAGE_TAG: Final = SIDECAR_IMAGE.rpartition(":")[2]


BLOCKS: Final = [block for block in blocks() if block.page == PAGE]


def list_blocks() -> list[Block]:
    """Return the blocks of commands for a cluster."""
    return [block for block in BLOCKS if block.needs == "a cluster"]


def run(command: str, folder: Path) -> str:
    """Run a command line of the page, with the images of the tests; return what it prints."""
    line = command.replace("vllm-headroom:local", SIDECAR_IMAGE).removesuffix(" 9839")
    environment = os.environ | {"PATH": f"{FOLDER}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_SECONDS,
    )
    # `kubectl diff` reports a difference by status 1.
    is_right = done.returncode == 0 or (command.startswith("kubectl diff") and done.returncode == 1)
    assert is_right, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def write_kustomization(folder: Path) -> None:
    """Write the page's kustomization, with the checkout in place of the addresses, for the stand-in on port 8000."""
    (block,) = (block for block in BLOCKS if block.language == "yaml" and "labelled.yaml" in block.body)
    text = ADDRESS.sub(lambda match: os.path.relpath(ROOT / match[1], folder), block.body)
    text = text.replace("registry.your.org/vllm-headroom", f"{IMAGE_NAME}\n  newTag: {IMAGE_TAG}")
    setting = "            env: [{name: HEADROOM_ENGINE_URL"
    assert setting in text
    (folder / "kustomization.yaml").write_text(
        text.replace("8001", "8000").replace(setting, f"            {NVML_MOUNT}\n{setting}")
    )


def await_page(forward: subprocess.Popen[bytes]) -> bool:
    """Return whether the sidecar's page is served while a command forwards its port."""
    ends = time.monotonic() + COMMAND_SECONDS
    while forward.poll() is None and time.monotonic() < ends:
        try:
            return "headroom" in httpx.get("http://localhost:9839/", timeout=10, verify=NO_TLS).text
        except httpx.TransportError:
            time.sleep(0.2)
    return False


def test_the_commands_of_the_page_for_a_machine_of_ones_own_show_the_page(tmp_path: Path) -> None:
    create, wait, forward = (step.command for step in list_blocks()[0].steps)
    with ExitStack() as stack:
        stack.callback(kubectl, "delete", "deployment", "headroom", "--ignore-not-found")
        run(create, tmp_path)
        run(wait, tmp_path)
        log = stack.enter_context((tmp_path / "log").open("wb"))

        def has_page() -> bool:
            # The rollout completes before the daemon listens, and kubectl ends at the first refused connection.
            process = subprocess.Popen([FOLDER / "kubectl", *forward.split()[1:]], stdout=log, stderr=log)
            try:
                return await_page(process)
            finally:
                process.terminate()
                process.wait(60)

        eventually(has_page, "the page is there", START_SECONDS, 1.0)


def test_the_commands_of_the_page_for_ones_own_namespace_add_the_sidecar(tmp_path: Path) -> None:
    workload = Workload("vllm", has_sidecar=False)
    kubectl("wait", "--for=delete", "namespace/vllm", "--timeout=280s")  # of a run before
    overlay = workload.write_overlay(tmp_path, 1)
    mine = tmp_path / "mine"
    mine.mkdir()
    manifests = documents(kubectl("kustomize", str(overlay)))
    (engine,) = (document for document in manifests if document["kind"] == "Deployment")
    del engine["metadata"]["labels"]["vllm-headroom"]
    (mine / "vllm.yaml").write_text(yaml.safe_dump(engine))
    with ExitStack() as stack:
        stack.callback(workload.delete)
        kubectl("apply", "--filename=-", input_text=yaml.safe_dump_all(manifests))
        mark, apply, look = list_blocks()[1:]
        (label,) = mark.steps
        run(label.command, mine)
        write_kustomization(mine)
        for step in apply.steps:
            output = run(step.command, mine)
        assert "podmonitor.monitoring.coreos.com/vllm-headroom created" in output
        eventually(lambda: workload.is_ready(1), "vLLM has its sidecar and serves", START_SECONDS, 1.0)
        doctor, list_monitor, list_pods = (step.command for step in look.steps)

        assert "vllm" in run(doctor, mine)
        assert "vllm-headroom" in run(list_monitor, mine)
        assert "2/2" in run(list_pods, mine)
