"""What vLLM's command line contradicts, and what is known of its version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.proc_tree import ProcTree
from tests.unit.commands.doctor.looking import CONTAINER, RECORDED, STRANGER, Vllm, examined
from vllm_headroom_tools.doctor.fixes import Check, Status
from vllm_headroom_tools.versions import FAULTS, describe_fault, list_faults

LLAMA = FOLDER.parents[1] / "unit" / "sizing" / "testdata" / "llama-3.1-8b.json"


def find(folder: Path, *arguments: str, version: str = "0.32.0", page: str = RECORDED) -> dict[str, Check]:
    """Return the findings where a vLLM with this command line runs."""
    (folder / "proc").mkdir()
    tree = ProcTree(folder / "proc", namespace=CONTAINER)
    tree.add(*STRANGER)
    (folder / "proc" / "4380").mkdir()
    (folder / "proc" / "4380" / "root").symlink_to(folder)
    with Vllm(page, version) as server:
        tree.add(4380, 1, "vllm", "serve", "/model", "--port", str(server.port), *arguments)
        return examined(folder / "proc", ENGINE_URL=server.url)


def test_the_command_line_is_shown_without_its_secrets(tmp_path: Path) -> None:
    finding = find(tmp_path, "--api-key", "SECRET", "--config", "/etc/vllm.yaml")["vllm_options"]

    assert (finding.state, finding.text) == (Status.OK, "vLLM's command line sets port, api_key, config")
    assert finding.details[0].startswith("vllm serve /model --port ")
    assert finding.details[0].endswith(" --api-key *** --config /etc/vllm.yaml")
    assert finding.details[1] == "/etc/vllm.yaml may set more, and is not read"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--disable-prefix-cache",),
            "no version of vLLM has --disable-prefix-cache: --no-enable-prefix-caching does that",
        ),
        (
            ("--kv-cache-memory-bytes", "20G", "--gpu_memory_utilization=0.9"),
            "--kv-cache-memory-bytes is given, so --gpu-memory-utilization does not size the KV cache",
        ),
        (
            ("--enable-prefix-caching", "--no-enable-prefix-caching"),
            "--enable-prefix-caching and its --no- form are both given: the last one counts",
        ),
        (
            ("--gpu-memory-utilization", "0.5"),
            "the page says gpu_memory_utilization=0.92, the command line another value",
        ),
    ],
)
def test_what_contradicts_is_said(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    finding = find(tmp_path, *arguments)["vllm_options"]

    assert (finding.state, finding.details[0]) == (Status.MISSING, line)


def test_without_a_command_line_nothing_is_said_of_it() -> None:
    findings = examined()

    assert {findings[name].state for name in ("vllm_options", "vllm_faults")} == {Status.NOT_APPLICABLE}


def test_the_known_faults_are_those_of_the_version_and_its_options(tmp_path: Path) -> None:
    finding = find(tmp_path, "--enforce-eager", version="0.25.0")["vllm_faults"]

    assert (finding.state, finding.text) == (Status.OK, "known faults of vLLM 0.25.0 with these options: 4")
    assert finding.details[0] == (
        "host memory: the engine core never empties a list of block ids: 0.6 GiB in 12 h"
        " (vllm-project/vllm#44490; 2026-06, fixed in 0.26.0)"
    )
    assert finding.details[1].endswith("(vllm-project/vllm#50150; open)")


def test_a_version_that_mends_a_fault_has_it_no_longer() -> None:
    assert not [fault for fault in list_faults((0, 26, 0), ()) if fault.fixed_version == (0, 26, 0)]
    assert not [fault for fault in list_faults((0, 28, 0), ("enforce_eager",)) if "50150" in fault.issues]
    assert all("#" in describe_fault(fault) for fault in FAULTS)


def test_the_served_model_gives_the_bytes_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(LLAMA, tmp_path / "model" / "config.json")

    finding = find(tmp_path)["kv_bytes"]

    assert (finding.state, finding.text) == (
        Status.OK,
        "the configuration of the model that vLLM loads gives the bytes per token",
    )


def test_a_budget_that_the_page_lacks_is_the_command_lines(tmp_path: Path) -> None:
    page = RECORDED.replace("gpu_memory_utilization=", "other=")

    finding = find(tmp_path, "--gpu-memory-utilization", "0.8", page=page)["reported_memory"]

    assert finding.text == "the engine's budget is 80% of each GPU (gpu_memory_utilization)"
