import pytest

from tests.fakes.nvml.library import GIB, MIB, FakeGpu, FakeNvml
from tests.unit.commands.preflight.looking import Preflight, only
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import Kind, MemoryRequest
from vllm_headroom_tools.preflight.look import GpuOccupant
from vllm_headroom_tools.preflight.report import build_report

RESERVED = 600 * MIB
USABLE = 80 * GIB - RESERVED


def test_a_free_gpu_is_a_go(preflight: Preflight) -> None:
    report = preflight.report()

    assert (report.verdict, report.findings) == (Conclusion.GOOD, ())
    assert report.gpus[0].requested_bytes == -(-USABLE * 92 // 100)
    assert report.highest_utilization_ratio == 0.99
    assert build_report(report).data["driver_version"] == "580.95.05"


def test_a_taken_gpu_is_no_go_and_says_who_has_it_and_what_would_work(preflight: Preflight, nvml: FakeNvml) -> None:
    preflight.tree.add(4242, 1, "/usr/bin/python3", "/srv/train.py", "--token", "hunter2")
    nvml.gpus[0].used_bytes, nvml.gpus[0].processes = 20 * GIB, {4242: 17 * GIB}
    nvml.write()

    finding = only(report := preflight.report())

    assert finding.kind is Kind.MEMORY
    assert finding.text == (
        "59.41 GiB are free, and vLLM requests 73.06 GiB besides the 0.30 GiB or more that it takes before its check:"
        " 13.95 GiB are missing; held: 17.00 GiB by python3 train.py (pid 4242), 3.00 GiB by no process listed here"
    )
    assert finding.fix is not None
    assert finding.fix.endswith("or start with --gpu-memory-utilization 0.74")
    assert report.highest_utilization_ratio == 0.74
    assert report.gpus[0].holders == (GpuOccupant(pid=4242, name="python3 train.py", used_bytes=17 * GIB),)
    assert report.gpus[0].unlisted_bytes == 3 * GIB


def test_the_highest_utilization_is_a_go_and_leaves_room_for_vllms_own_context(
    preflight: Preflight, nvml: FakeNvml
) -> None:
    for used in (0, 7 * GIB, 20 * GIB, 41 * GIB, 60 * GIB, 78 * GIB):
        nvml.gpus[0].used_bytes = used
        nvml.write()

        highest = preflight.report().highest_utilization_ratio

        assert highest is not None
        free = USABLE - used
        assert highest * USABLE <= free - 0.6 * GIB < (highest + 0.01) * USABLE
        assert preflight.report(MemoryRequest(utilization_ratio=highest)).findings == ()


def test_a_full_gpu_leaves_no_utilization(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].used_bytes = USABLE - GIB
    nvml.write()

    finding = only(report := preflight.report())

    assert report.highest_utilization_ratio is None
    assert finding.fix is not None
    assert "--gpu-memory-utilization" not in finding.fix


def test_a_budget_that_fits_only_just_is_a_go_with_a_remark(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].used_bytes = USABLE - 40 * GIB
    nvml.write()

    tight = preflight.report(MemoryRequest(utilization_ratio=None, bytes_per_gpu=40 * GIB - 400 * MIB))
    short = preflight.report(MemoryRequest(utilization_ratio=None, bytes_per_gpu=40 * GIB - 200 * MIB))
    parallel = preflight.report(
        MemoryRequest(utilization_ratio=None, bytes_per_gpu=40 * GIB - 700 * MIB, tensor_parallel_size=2)
    )

    assert tight.verdict is Conclusion.GOOD
    assert tight.findings[0].text == (
        "it is close: 0.39 GiB are left beside vLLM's request, and it takes 0.30 GiB to 0.60 GiB before its check"
    )
    assert short.verdict is Conclusion.NOT_GOOD
    assert "0.30 GiB to 1.65 GiB" in parallel.findings[0].text


def test_bytes_are_asked_beside_a_utilization(preflight: Preflight) -> None:
    ask = MemoryRequest(utilization_ratio=0.5, bytes_per_gpu=60 * GIB)
    memory_request = MemoryRequest(utilization_ratio=0.5, bytes_per_gpu=10 * GIB)

    assert preflight.report(ask).gpus[0].requested_bytes == 60 * GIB
    assert preflight.report(memory_request).gpus[0].requested_bytes == USABLE // 2


def test_more_than_the_gpu_has_does_not_pass_by_waiting(preflight: Preflight) -> None:
    finding = only(preflight.report(MemoryRequest(utilization_ratio=None, bytes_per_gpu=100 * GIB)))

    assert finding.text.endswith("and this GPU has 79.41 GiB in all")
    assert not finding.may_pass


def test_each_gpu_is_reported_and_the_fullest_says_what_would_work(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus += [FakeGpu(uuid="GPU-b", used_bytes=30 * GIB), FakeGpu(uuid="GPU-c", used_bytes=2 * GIB)]
    nvml.write()

    finding = only(report := preflight.report())

    assert finding.gpu == 1
    assert [gpu.highest_utilization_ratio for gpu in report.gpus] == [0.99, 0.61, 0.96]
    assert report.highest_utilization_ratio == 0.61


def test_a_container_with_an_old_driver_names_no_process(preflight: Preflight, nvml: FakeNvml) -> None:
    preflight.in_a_container()
    preflight.tree.add(4242, 1, "sleep", "1")
    nvml.driver = "535.104.05"
    nvml.gpus[0].used_bytes, nvml.gpus[0].processes = 70 * GIB, {4242: 70 * GIB}
    nvml.write()

    finding = only(report := preflight.report())

    assert report.gpus[0].holders == (GpuOccupant(pid=4242, name=None, used_bytes=None),)
    assert report.gpus[0].unlisted_bytes is None
    assert finding.text.endswith("are missing; held: an unknown share by pid 4242")


def test_a_process_that_nvml_lists_and_the_machine_does_not_has_ended(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].used_bytes = 20 * GIB
    nvml.gpus[0].processes = {4242: 20 * GIB}
    nvml.write()

    finding = only(preflight.report())

    assert "held: 20.00 GiB by a process that has ended (pid 4242)" in finding.text
    assert str(finding.fix).startswith("wait until the driver frees an exited process's memory (--wait 120s)")
    preflight.in_a_container()
    assert "has ended (pid" not in only(preflight.report()).text


def test_memory_that_nobody_tells_cannot_be_judged(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].total_bytes = None
    nvml.write()

    report = preflight.report()

    assert report.verdict is Conclusion.CANNOT_TELL
    assert report.highest_utilization_ratio is None


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("VLLM::EngineCore",), "VLLM::EngineCore"),
        (("/usr/bin/python3.11", "/srv/train.py", "--key", "s3cret"), "python3.11 train.py"),
        (
            ("python", "-m", "vllm.entrypoints.openai.api_server", "--api-key", "s3cret"),
            "python vllm.entrypoints.openai.api_server",
        ),
        (("python3", "-c", "key = 's3cret'"), "python3"),
        (("python3", "-u", "x.py"), "python3"),
        (("python3",), "python3"),
        (("/opt/app --secret",), "app --secret"),
        (("java", "-Dkey=s3cret"), "java"),
    ],
)
def test_a_process_is_called_by_its_program_and_never_by_its_arguments(
    preflight: Preflight, nvml: FakeNvml, command: tuple[str, ...], name: str
) -> None:
    preflight.tree.add(77, 70, *command, name="x")
    nvml.gpus[0].used_bytes, nvml.gpus[0].processes = GIB, {77: GIB}
    nvml.write()

    (holder,) = preflight.report().gpus[0].holders or ()

    assert holder.name == name


def test_what_helps_two_gpus_is_said_once(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[:] = [FakeGpu(uuid=f"GPU-{index}", used_bytes=USABLE - GIB) for index in range(2)]
    nvml.write()

    lines = list(build_report(preflight.report()).lines)

    assert len([line for line in lines if " are missing" in line]) == 2
    assert len([line for line in lines if line.startswith("    wait until")]) == 1
