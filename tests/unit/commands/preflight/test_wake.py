"""Could an engine that sleeps wake now: what it gave back against what is free."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from tests.fakes.cgroups import V2Tree
from tests.fakes.nvml.library import GIB
from tests.samples import engine, failure, page
from tests.unit.commands.preflight.looking import Preflight
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.vocabulary import Source
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import Kind, MemoryRequest
from vllm_headroom_tools.preflight.command import IGNORABLE
from vllm_headroom_tools.preflight.report import Clearance, judge_wake

ASLEEP: Final = engine(awake=False, gpu_memory_utilization_ratio=0.9)
UNTOLD: Final = MemoryRequest(utilization_ratio=None)
CORE, STRANGER = 71, 99


@pytest.fixture
def sleeping(preflight: Preflight) -> Preflight:
    """Let an engine that sleeps hold 3 GiB of an H100, with 76.41 GiB free."""
    preflight.tree.add(70, 1, "python3", "/venv/bin/vllm", "serve", "m", "--port", "8000")
    preflight.tree.add(CORE, 70, "VLLM::EngineCore")
    preflight.tree.add(STRANGER, 1, "python", "train.py")
    _held(preflight, {CORE: 3 * GIB})
    return preflight


def _held(preflight: Preflight, processes: dict[int, int | None]) -> None:
    gpu = preflight.nvml.gpus[0]
    gpu.used_bytes, gpu.processes = sum(n_bytes or 0 for n_bytes in processes.values()), processes
    preflight.nvml.write()


def judged(
    preflight: Preflight, engine_page: EnginePage | Failure | None = None, ask: MemoryRequest = UNTOLD
) -> Clearance:
    return judge_wake(preflight.conditions(port=8000), page(ASLEEP) if engine_page is None else engine_page, ask)


def test_what_it_gave_back_is_free(sleeping: Preflight) -> None:
    report = judged(sleeping)

    assert report.verdict is Conclusion.GOOD
    assert [finding.text for finding in report.findings] == [
        "the engine sleeps and holds 3.00 GiB; to wake takes about 68.47 GiB, and 76.41 GiB are free"
    ]


def test_what_another_took_meanwhile_is_missing_and_may_be_waited_for(sleeping: Preflight) -> None:
    _held(sleeping, {CORE: 3 * GIB, STRANGER: 20 * GIB})

    report = judged(sleeping)

    assert report.verdict is Conclusion.NOT_GOOD
    assert report.may_pass
    (finding,) = report.findings
    assert finding.text == (
        "the engine sleeps and holds 3.00 GiB; to wake takes about 68.47 GiB, and only 56.41 GiB are free: 12.06 GiB"
        " are missing; held: 3.00 GiB by VLLM::EngineCore (pid 71), 20.00 GiB by python train.py (pid 99)"
    )


def test_what_the_operator_says_of_its_share_is_believed(sleeping: Preflight) -> None:
    text = judged(sleeping, ask=MemoryRequest(utilization_ratio=None, bytes_per_gpu=13 * GIB)).findings[0].text

    assert "to wake takes about 10.00 GiB" in text


def test_an_engine_that_is_awake_has_nothing_to_wake_and_is_shown_what_its_weights_would_need(
    sleeping: Preflight,
) -> None:
    tree = V2Tree(sleeping.folder / "cgroup", sleeping.tree.path)
    (sleeping.tree.path / "meminfo").write_text(f"MemTotal: {512 << 20} kB\nMemAvailable: {400 << 20} kB\n")
    tree.add("pod", pids=(9999,), limit=64 * GIB, used=14 * GIB)

    (finding,) = judged(sleeping, page(replace(ASLEEP, awake=True))).findings

    assert finding.verdict is Conclusion.GOOD
    assert finding.text.endswith("its weights into host memory, of which 50.00 GiB of 64.00 GiB are left")


@pytest.mark.parametrize(
    ("engine_page", "text"),
    [
        (failure(Source.ENGINE), "it failed"),
        (page(replace(ASLEEP, awake=None)), "does not report whether it sleeps"),
        (page(replace(ASLEEP, gpu_memory_utilization_ratio=None)), "while it is awake is not known"),
        (page(replace(ASLEEP, kv_cache_memory_bytes=GIB)), "while it is awake is not known"),
    ],
)
def test_what_is_not_known_is_no_go_and_no_go_ahead(
    sleeping: Preflight, engine_page: EnginePage | Failure, text: str
) -> None:
    report = judged(sleeping, engine_page)

    assert report.verdict is Conclusion.CANNOT_TELL
    assert text in report.findings[0].text


def test_an_engine_that_is_not_seen_on_a_gpu_is_unknown(sleeping: Preflight) -> None:
    _held(sleeping, {STRANGER: GIB})
    assert judged(sleeping).findings[0].text == "none of its processes is seen on a visible GPU"

    _held(sleeping, {CORE: None})
    assert judged(sleeping).verdict is Conclusion.CANNOT_TELL


def test_host_can_be_ignored_as_its_findings_say() -> None:
    assert Kind.HOST in IGNORABLE
