import pytest

from tests.fakes.nvml.library import GIB, FakeInstance, FakeNvml
from tests.fakes.nvml.reader import run
from tests.unit.commands.preflight.looking import Preflight, only
from vllm_headroom.model import GpuReadings
from vllm_headroom.scrape.nvml.device import GpuFaults
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import Kind


@pytest.mark.parametrize(
    ("fact", "value", "text"),
    [
        ("ecc", (True, False), "ECC is on and will be off after the next reset, which changes how much memory it has"),
        ("ecc", (False, True), "ECC is off and will be on after the next reset, which changes how much memory it has"),
        ("rows", (True, False), "a faulty row of its memory waits to be remapped"),
        ("pages_pending", True, "a faulty page of its memory waits to be retired"),
    ],
)
def test_what_waits_for_a_reset_is_no_go(
    preflight: Preflight, nvml: FakeNvml, fact: str, value: object, text: str
) -> None:
    setattr(nvml.gpus[0], fact, value)
    nvml.write()

    finding = only(preflight.report())

    assert (finding.kind, finding.text, finding.gpu) == (Kind.ECC, text, 0)
    assert finding.fix == (
        "reset it while nothing runs on it (nvidia-smi --gpu-reset -i 0, on the node), or reboot the node;"
        " or --ignore ecc"
    )


def test_a_failed_remapping_asks_for_another_gpu(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].rows = (False, True)
    nvml.write()

    finding = only(preflight.report())

    assert finding.text == "a faulty row of its memory could not be remapped"
    assert finding.fix == "have it replaced: NVIDIA takes it back for this; or --ignore ecc"


def test_what_is_ignored_is_still_reported(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].rows = (True, False)
    nvml.write()

    report = preflight.report(ignored={Kind.ECC})

    assert report.verdict is Conclusion.GOOD
    assert report.findings[0].text == "a faulty row of its memory waits to be remapped (ignored)"
    assert preflight.report(ignored={Kind.SHM, Kind.IDENTICAL}).verdict is Conclusion.NOT_GOOD


def test_a_gpu_without_ecc_has_nothing_pending(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].ecc = nvml.gpus[0].rows = nvml.gpus[0].pages_pending = None
    nvml.write()

    assert preflight.report().findings == ()


def test_the_instances_of_a_gpu_share_its_faults_which_are_reported_once(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].mig, nvml.gpus[0].ecc = True, (True, False)
    nvml.gpus[0].instances = [FakeInstance(uuid=f"MIG-{letter}", gpu_instance=ord(letter)) for letter in "xy"]
    nvml.write()

    report = preflight.report()

    assert [gpu.reading.uuid for gpu in report.gpus] == ["MIG-x", "MIG-y"]
    assert [finding.kind for finding in report.findings] == [Kind.ECC]
    assert report.gpus[0].requested_bytes == -(-10 * GIB * 92 // 100)


def test_a_gpu_that_hangs_when_it_is_asked_for_faults_is_unknown(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].hangs = {"nvmlDeviceGetRemappedRows": 600}
    nvml.write()

    report = preflight.report()

    assert report.verdict is Conclusion.CANNOT_TELL
    assert [(finding.kind, finding.may_pass) for finding in report.findings] == [(Kind.ECC, True)]


def test_the_daemons_readings_do_not_ask_for_faults(nvml: FakeNvml) -> None:
    async def steps(reader: Nvml) -> tuple[GpuFaults, ...]:
        assert isinstance(await reader.read(10), GpuReadings)
        await reader.sample_used(10)
        assert not {"nvmlDeviceGetEccMode GPU-a", "nvmlDeviceGetRemappedRows GPU-a"} & set(nvml.calls())
        return await reader.read_faults(10)

    (faults,) = run(steps)

    assert faults == GpuFaults(
        index=0,
        ecc=(True, True),
        row_remap_pending=False,
        row_remap_failed=False,
        page_retirement_pending=False,
        unlinked_indices=(),
    )
