import pytest

from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.unit.commands.preflight.looking import Preflight, only
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import GpuChoice, Kind, MemoryRequest

PARALLEL = MemoryRequest(utilization_ratio=0.92, tensor_parallel_size=2)
A100 = "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def nvml(nvml: FakeNvml) -> FakeNvml:
    nvml.gpus = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", used_bytes=70 * GIB), FakeGpu(uuid="GPU-c")]
    nvml.write()
    return nvml


def chosen(preflight: Preflight, wanted: GpuChoice, ask: MemoryRequest = PARALLEL) -> list[str]:
    return [gpu.reading.uuid for gpu in preflight.report(ask, wanted).gpus]


def test_without_a_word_all_that_are_visible_are_looked_at(preflight: Preflight) -> None:
    assert chosen(preflight, GpuChoice()) == ["GPU-a", "GPU-b", "GPU-c"]


def test_of_the_visible_ones_vllm_takes_the_first(preflight: Preflight) -> None:
    assert chosen(preflight, GpuChoice(count=2)) == ["GPU-a", "GPU-b"]
    assert chosen(preflight, GpuChoice(count=2, visible=("2", "0", "1"))) == ["GPU-c", "GPU-a"]


def test_those_that_are_named_are_all_looked_at(preflight: Preflight) -> None:
    assert chosen(preflight, GpuChoice(count=1, named=("2", "gpu-A"))) == ["GPU-c", "GPU-a"]
    assert preflight.report(PARALLEL, GpuChoice(named=("0", "2"), count=2)).verdict is Conclusion.GOOD


def test_cuda_takes_the_beginning_of_a_uuid(preflight: Preflight) -> None:
    assert chosen(preflight, GpuChoice(visible=("GPU-b",))) == ["GPU-b"]


@pytest.mark.parametrize("wanted", [GpuChoice(named=("0", "7")), GpuChoice(visible=("0", "GPU-x"))])
def test_a_gpu_that_is_not_there_is_no_go(preflight: Preflight, wanted: GpuChoice) -> None:
    finding = only(preflight.report(wanted=wanted))

    assert finding.kind is Kind.GPUS
    assert finding.text.endswith((" names GPUs that are not visible: 7", " names GPUs that are not visible: GPU-x"))


@pytest.mark.parametrize("wanted", [GpuChoice(count=4), GpuChoice(named=("0",), count=2), GpuChoice(visible=())])
def test_too_few_gpus_are_no_go(preflight: Preflight, nvml: FakeNvml, wanted: GpuChoice) -> None:
    nvml.gpus[1].used_bytes = 0
    nvml.write()

    finding = only(preflight.report(wanted=wanted))

    assert finding.kind is Kind.GPUS
    assert finding.text.startswith(f"vLLM needs {wanted.count or 1} GPUs, and ")


@pytest.mark.parametrize("other_gpu", [FakeGpu(uuid="GPU-b", name=A100), FakeGpu(uuid="GPU-b", total_bytes=75 * GIB)])
def test_mixed_gpus_are_no_go_in_parallel(preflight: Preflight, nvml: FakeNvml, other_gpu: FakeGpu) -> None:
    nvml.gpus = [FakeGpu(uuid="GPU-a"), other_gpu]
    nvml.write()

    finding = only(preflight.report(PARALLEL, GpuChoice(count=2)))

    assert finding.kind is Kind.IDENTICAL
    assert finding.text.startswith("tensor parallelism needs GPUs of one kind, and these are 2: NVIDIA ")
    assert preflight.report(PARALLEL, GpuChoice(count=2), {Kind.IDENTICAL}).verdict is Conclusion.GOOD
    assert preflight.report(MemoryRequest(utilization_ratio=0.92)).verdict is Conclusion.GOOD


def test_which_of_mixed_gpus_vllm_takes_is_unknown_unless_cuda_counts_as_nvml(
    preflight: Preflight, nvml: FakeNvml
) -> None:
    nvml.gpus = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", name=A100)]
    nvml.write()
    ask = MemoryRequest(utilization_ratio=0.92)

    for wanted in (GpuChoice(count=1), GpuChoice(visible=("1",))):
        assert preflight.report(ask, wanted).verdict is Conclusion.CANNOT_TELL
    for wanted in (
        GpuChoice(count=1, has_slot_order=True),
        GpuChoice(visible=("GPU-b",)),
        GpuChoice(named=("1",)),
        GpuChoice(visible=("0", "1")),
    ):
        assert preflight.report(ask, wanted).verdict is Conclusion.GOOD
