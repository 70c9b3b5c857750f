"""Host memory before a start: the container's, and the machine's where a GPU works on it."""

from __future__ import annotations

import pytest

from tests.fakes.cgroups import V2Tree
from tests.fakes.nvml.library import GIB, FakeGpu
from tests.unit.commands.preflight.looking import DEFAULT, Preflight, only
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import Kind, MemoryRequest
from vllm_headroom_tools.preflight.report import build_report

OWN_PID = 9999


def meminfo(preflight: Preflight, *, total_gib: int, available_gib: int) -> None:
    total, available = total_gib << 20, available_gib << 20
    (preflight.tree.path / "meminfo").write_text(f"MemTotal: {total} kB\nMemAvailable: {available} kB\n")


def contained(preflight: Preflight, *, used_gib: int, file_gib: int, limit_gib: int | None) -> None:
    meminfo(preflight, total_gib=512, available_gib=400)
    limit = None if limit_gib is None else limit_gib * GIB
    tree = V2Tree(preflight.folder / "cgroup", preflight.tree.path)
    tree.add("pod/vllm", pids=(OWN_PID,), limit=limit, used=used_gib * GIB, file=file_gib * GIB)


def test_a_container_that_is_full_of_page_cache_has_room(preflight: Preflight) -> None:
    contained(preflight, used_gib=32, file_gib=31, limit_gib=32)

    report = preflight.report()

    assert report.verdict is Conclusion.GOOD
    assert build_report(report).data["host"] == {"used_bytes": GIB, "limit_bytes": 32 * GIB}


def test_a_container_without_room_for_vllms_processes_is_no_go(preflight: Preflight) -> None:
    contained(preflight, used_gib=31, file_gib=0, limit_gib=32)

    finding = only(preflight.report())

    assert finding.kind is Kind.HOST
    assert finding.text == (
        "1.00 GiB of 32.00 GiB of host memory are left, and vLLM's server, core and workers hold 1.80 GiB or more: the"
        " kernel would kill it while it starts"
    )
    assert preflight.report(ignored=(Kind.HOST,)).verdict is Conclusion.GOOD


def test_more_workers_need_more(preflight: Preflight) -> None:
    contained(preflight, used_gib=30, file_gib=0, limit_gib=32)

    assert preflight.report().verdict is Conclusion.GOOD
    parallel = MemoryRequest(utilization_ratio=0.9, tensor_parallel_size=4)
    assert [finding.kind for finding in preflight.report(parallel).findings if finding.kind is Kind.HOST] == [Kind.HOST]


def test_nothing_is_said_where_nothing_is_known(preflight: Preflight) -> None:
    assert build_report(preflight.report()).data["host"] is None


@pytest.fixture
def unified(preflight: Preflight) -> Preflight:
    preflight.nvml.gpus[0] = FakeGpu(uuid="GPU-0", name="NVIDIA GB10", total_bytes=None)
    preflight.nvml.write()
    return preflight


def test_what_vllm_would_leave_to_a_machine_of_one_memory_is_reported(unified: Preflight) -> None:
    meminfo(unified, total_gib=120, available_gib=116)

    finding = only(unified.report(DEFAULT))

    assert finding.kind is Kind.HOST
    assert finding.text == (
        "this GPU works on the machine's memory, and vLLM would leave 5.00 GiB of it to the system and to its own"
        " processes: 8.00 GiB are the least, or it swaps and hangs"
    )
    assert finding.fix == "start with --gpu-memory-utilization 0.89; or --ignore host"
    assert unified.report(MemoryRequest(utilization_ratio=0.89)).verdict is Conclusion.GOOD


def test_swap_of_a_machine_of_one_memory_is_reported_and_counts_as_no_room(unified: Preflight) -> None:
    meminfo(unified, total_gib=120, available_gib=118)
    without = unified.report(MemoryRequest(utilization_ratio=0.89))
    with (unified.tree.path / "meminfo").open("a") as stream:
        stream.write(f"SwapTotal: {16 << 20} kB\nSwapFree: {16 << 20} kB\n")

    report = unified.report(MemoryRequest(utilization_ratio=0.89))

    assert without.findings == ()
    assert [finding.text for finding in report.findings] == [
        "the machine's 16.00 GiB of swap and zram count as no room: it would hang before they are full"
    ]
    assert report.highest_utilization_ratio == without.highest_utilization_ratio


def test_a_machine_of_one_memory_with_too_little_available_is_no_go_like_a_card(unified: Preflight) -> None:
    meminfo(unified, total_gib=120, available_gib=60)

    finding = only(unified.report(DEFAULT))

    assert finding.kind is Kind.MEMORY
    assert finding.may_pass


def buddies(preflight: Preflight, *, blocks_gib: float) -> None:
    (preflight.tree.path / "buddyinfo").write_text(
        f"Node 0, zone   Normal  900 900 900 900 900 900 900 900 900 {int(blocks_gib * 512)} 0\n"
    )


@pytest.mark.parametrize(
    ("blocks_gib", "verdict"), [(100.0, None), (20.0, Conclusion.GOOD), (0.5, Conclusion.NOT_GOOD)]
)
def test_memory_in_the_page_cache_is_available_and_cannot_be_allocated(
    unified: Preflight, blocks_gib: float, verdict: Conclusion | None
) -> None:
    """As vllm#54200 reports: 22.5 GiB were available, and an allocation failed."""
    meminfo(unified, total_gib=120, available_gib=22)
    buddies(unified, blocks_gib=blocks_gib)

    memory_findings = [
        finding for finding in unified.report(MemoryRequest(utilization_ratio=0.1)).findings if "2 MiB" in finding.text
    ]

    if blocks_gib * GIB > 0.1 * 120 * GIB:
        assert not memory_findings
        return
    assert [finding.verdict for finding in memory_findings] == [verdict]
    assert "the rest is in the page cache" in memory_findings[0].text
    assert "drop_caches" in (memory_findings[0].fix or "")
