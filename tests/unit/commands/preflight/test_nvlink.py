"""GPUs that a model is split among, and whether NVLink connects them."""

import pytest

from tests.fakes.nvml.library import FakeGpu, FakeNvml
from tests.unit.commands.preflight.looking import Preflight
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import GpuChoice, Kind, MemoryRequest

PARALLEL = MemoryRequest(utilization_ratio=0.92, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("linked", "text"),
    [
        ((True, True), None),
        ((True, False), "no NVLink connects GPUs 0 and 1: with tensor parallelism each step then waits"),
        ((False, False), "no NVLink connects GPUs 0 and 1: with tensor parallelism each step then waits"),
    ],
)
def test_gpus_without_nvlink_are_a_remark_in_parallel_only(
    preflight: Preflight, nvml: FakeNvml, linked: tuple[bool, bool], text: str | None
) -> None:
    nvml.gpus[0].linked = linked[0]
    nvml.gpus.append(FakeGpu(uuid="GPU-b", linked=linked[1]))
    nvml.write()

    remarks = [
        finding for finding in preflight.report(PARALLEL, GpuChoice(count=2)).findings if finding.kind is Kind.NVLINK
    ]
    alone = preflight.report()

    assert [finding.verdict for finding in remarks] == ([] if text is None else [Conclusion.GOOD])
    assert all(text is not None and text in finding.text for finding in remarks)
    assert not any(finding.kind is Kind.NVLINK for finding in alone.findings)


def test_only_the_gpus_that_vllm_will_use_need_nvlink(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].linked = True
    nvml.gpus += [FakeGpu(uuid="GPU-b", linked=True), FakeGpu(uuid="GPU-c", linked=False)]
    nvml.write()

    report = preflight.report(PARALLEL, GpuChoice(count=2))

    assert not any(finding.kind is Kind.NVLINK for finding in report.findings)


def test_where_the_driver_does_not_report_nvlink_nothing_is_said(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].errors = {"nvmlDeviceGetP2PStatus": 3}
    nvml.gpus.append(FakeGpu(uuid="GPU-b", linked=False, errors={"nvmlDeviceGetP2PStatus": 3}))
    nvml.write()

    report = preflight.report(PARALLEL, GpuChoice(count=2))

    assert not any(finding.kind is Kind.NVLINK for finding in report.findings)
