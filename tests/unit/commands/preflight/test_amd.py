"""Would vLLM start on AMD's cards?"""

from __future__ import annotations

import pynvml
import pytest

from tests.fakes.amd_tree import GIB, MI300X_BYTES, AmdTree
from tests.unit.commands.preflight.looking import DEFAULT, Preflight, only
from tests.unit.commands.preflight.test_host import meminfo
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import Kind
from vllm_headroom_tools.preflight.report import build_report

CARD = "0000:c1:00.0"


@pytest.fixture
def sys(preflight: Preflight) -> AmdTree:
    """A machine without a driver of NVIDIA's."""
    preflight.nvml.errors = {"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    preflight.nvml.write()
    return AmdTree(preflight.sys)


def test_a_free_card_is_a_go_though_it_tells_no_faults(preflight: Preflight, sys: AmdTree) -> None:
    sys.add(CARD, card=1)
    sys.add_node(CARD, 7)

    report = preflight.report()

    assert (report.verdict, report.findings) == (Conclusion.GOOD, ())
    (gpu,) = build_report(report).data["gpus"]
    assert (gpu["uuid"], gpu["total_bytes"]) == ("GPU-fc1d2a3b4c5d6e7f", MI300X_BYTES)


def test_who_holds_a_card_is_named(preflight: Preflight, sys: AmdTree) -> None:
    sys.add(CARD, card=1, used_bytes=150 * GIB)
    sys.add_node(CARD, 7)
    sys.hold(4242, {7: 149 * GIB})
    preflight.tree.add(4242, 1, "python3", "train.py")

    finding = only(preflight.report())

    assert finding.kind is Kind.MEMORY
    assert "held: 149.00 GiB by python3 train.py (pid 4242)" in finding.text


def test_an_apu_is_asked_what_it_leaves_to_its_machine(preflight: Preflight, sys: AmdTree) -> None:
    """It is granted 62 of 125 GiB: what is left to the machine is not what is left of the 62."""
    sys.add(CARD, card=1, total_bytes=GIB // 2).tell(mem_info_gtt_used=0)
    sys.add_node(CARD, 7, 62 * GIB)
    meminfo(preflight, total_gib=125, available_gib=90)

    assert preflight.report(DEFAULT).verdict is Conclusion.GOOD

    meminfo(preflight, total_gib=125, available_gib=63)

    assert only(preflight.report(DEFAULT)).kind is Kind.HOST
