import pytest

from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.unit.commands.preflight.looking import Preflight, only
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import GpuChoice, Kind, MemoryRequest, check_driver
from vllm_headroom_tools.preflight.report import build_report

LIBRARY_MISSING, DRIVER_MISSING, MISMATCH, UNKNOWN, LOST = 12, 9, 18, 999, 15


@pytest.mark.parametrize(
    ("code", "verdict", "words"),
    [
        (LIBRARY_MISSING, Conclusion.CANNOT_TELL, "libnvidia-ml.so.1 cannot be loaded"),
        (DRIVER_MISSING, Conclusion.NOT_GOOD, "driver is not loaded"),
        (MISMATCH, Conclusion.NOT_GOOD, "not of the loaded driver's version"),
        (UNKNOWN, Conclusion.CANNOT_TELL, "NVML fails on every GPU"),
    ],
)
def test_a_driver_that_fails_is_reported_with_what_to_do(
    preflight: Preflight, nvml: FakeNvml, code: int, verdict: Conclusion, words: str
) -> None:
    nvml.errors = {"nvmlInitWithFlags": code}
    nvml.write()

    report = preflight.report()

    assert report.verdict is verdict
    assert [finding.kind for finding in report.findings] == [Kind.DRIVER]
    assert words in report.findings[0].text


def test_a_driver_that_hangs_is_unknown(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.hangs = {"nvmlInitWithFlags": 600}
    nvml.write()

    report = preflight.report(patience_seconds=0.5)

    assert report.verdict is Conclusion.CANNOT_TELL
    assert "NVML does not answer" in report.findings[0].text


def test_what_is_unknown_is_said_once(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].hangs = {"nvmlDeviceGetMemoryInfo_v2": 600}
    nvml.gpus.append(FakeGpu(uuid="GPU-b", used_bytes=70 * GIB))
    nvml.write()

    first_lines, both = (
        [line for line in build_report(preflight.report(wanted=wanted)).lines if "the GPU does not answer" in line]
        for wanted in (GpuChoice(named=("0",)), GpuChoice())
    )

    assert [line.partition(" answer: ")[0] for line in first_lines] == ["  GPU 0: the GPU does not"]
    assert [line.partition(" answer: ")[0] for line in both] == ["  cannot tell: GPU 0: the GPU does not"]


def test_a_gpu_that_hangs_is_unknown_and_the_other_is_still_judged(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].hangs = {"nvmlDeviceGetMemoryInfo_v2": 600}
    nvml.gpus.append(FakeGpu(uuid="GPU-b", used_bytes=70 * GIB))
    nvml.write()

    both = preflight.report()
    first_report = preflight.report(wanted=GpuChoice(named=("0",)))

    assert both.verdict is Conclusion.NOT_GOOD
    assert [(finding.gpu, finding.verdict) for finding in both.findings] == [
        (0, Conclusion.CANNOT_TELL),
        (1, Conclusion.NOT_GOOD),
    ]
    assert first_report.verdict is Conclusion.CANNOT_TELL
    assert first_report.findings[0].text.startswith("the GPU does not answer: ")


def test_a_lost_gpu_is_no_go(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].errors = {"all": LOST}
    nvml.write()

    finding = only(preflight.report())

    assert finding.kind is Kind.DRIVER
    assert finding.text.startswith("the GPU is lost: ")


def test_a_machine_without_gpus_is_no_go(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus = []
    nvml.write()

    assert only(preflight.report(MemoryRequest(utilization_ratio=0.92))).text.startswith("NVML shows no GPU here: ")


@pytest.mark.parametrize(
    ("driver", "cuda_major", "is_too_old"),
    [
        ("535.183.01", 13, True),
        ("580.65.06", 13, False),
        ("580.50", 13, True),
        ("535.183.01", 12, False),
        ("515.48", 12, True),
        ("535.183.01", None, False),
        (None, 13, False),
        ("535.183.01", 99, False),
    ],
)
def test_a_driver_older_than_the_cuda_of_vllm_is_reported(
    driver: str | None, cuda_major: int | None, *, is_too_old: bool
) -> None:
    findings = list(check_driver(driver, cuda_major))

    assert [finding.verdict for finding in findings] == ([Conclusion.CANNOT_TELL] if is_too_old else [])
    assert all(f"the driver is {driver}, and the CUDA {cuda_major} " in finding.text for finding in findings)


@pytest.mark.parametrize(("celsius", "is_hot"), [(86, False), (87, True), (95, True)])
def test_a_gpu_that_is_hot_before_it_works_is_remarked(
    preflight: Preflight, nvml: FakeNvml, celsius: int, *, is_hot: bool
) -> None:
    nvml.gpus[0].temperature_celsius = celsius
    nvml.write()

    report = preflight.report()

    assert report.verdict is Conclusion.GOOD
    assert [finding.kind for finding in report.findings] == ([Kind.HEAT] if is_hot else [])
