import pytest

from tests.fakes.engine_server import page
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.unit.commands.smoke.serving import RECORDED, Vllm
from tests.unit.commands.smoke.smoking import smoke
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.smoke.command import SmokeStep

BUDGET = 0.92 * 80 * GIB
DRIVER_MISSING = 9


def discrepancy(vllm: Vllm, *words: str) -> SmokeStep:
    return smoke(vllm.url, *words)["discrepancy"]


def hold(nvml: FakeNvml, ratio: float) -> None:
    nvml.gpus[0].used_bytes = round(BUDGET * ratio)
    nvml.write()


def test_what_is_held_is_compared_with_the_budget(vllm: Vllm, nvml: FakeNvml) -> None:
    hold(nvml, 1.02)

    step = discrepancy(vllm)

    assert (step.verdict, step.text) == (Conclusion.GOOD, "GPU 0 +2.0%, 3.0% is allowed")


def test_less_than_the_budget_is_no_discrepancy_to_fail_on(vllm: Vllm, nvml: FakeNvml) -> None:
    hold(nvml, 0.9)

    assert discrepancy(vllm).verdict is Conclusion.GOOD


def test_more_than_is_allowed_fails(vllm: Vllm, nvml: FakeNvml) -> None:
    hold(nvml, 1.06)

    step = discrepancy(vllm)

    assert step.verdict is Conclusion.NOT_GOOD
    assert step.text.startswith("more is held than was asked for, GPU 0 +6.0%, where 3.0% is allowed: ")
    assert discrepancy(vllm, "--max-discrepancy", "7%").verdict is Conclusion.GOOD


def test_gpus_that_are_named_are_compared_one_by_one(vllm: Vllm, nvml: FakeNvml) -> None:
    nvml.gpus.append(FakeGpu(uuid="GPU-b", used_bytes=79 * GIB))
    hold(nvml, 1.0)

    assert discrepancy(vllm, "--gpus", "0").verdict is Conclusion.GOOD
    assert discrepancy(vllm, "--gpus", "all").verdict is Conclusion.NOT_GOOD


def test_which_gpu_it_is_has_to_be_known(vllm: Vllm, nvml: FakeNvml) -> None:
    nvml.gpus.append(FakeGpu(uuid="GPU-b"))
    nvml.write()

    step = discrepancy(vllm)

    assert step.verdict is Conclusion.CANNOT_TELL
    assert step.text.endswith("name them in HEADROOM_GPUS")


def test_a_gpu_that_is_nearly_empty_is_not_the_engines(vllm: Vllm, nvml: FakeNvml) -> None:
    hold(nvml, 0.1)

    step = discrepancy(vllm)

    assert step.verdict is Conclusion.CANNOT_TELL
    assert step.text == "GPU 0 -90.0%: GPU 0 is not the engine's; HEADROOM_GPUS names those that are"


def test_without_a_budget_there_is_nothing_to_compare_unless_it_is_set(vllm: Vllm, nvml: FakeNvml) -> None:
    hold(nvml, 1.0)
    vllm.answers["/metrics"] = page(RECORDED.replace('kv_cache_memory_bytes="None"', 'kv_cache_memory_bytes="1"'))
    vllm.answers["/v1/completions"] = page("", status="500 Internal Server Error")

    assert discrepancy(vllm).verdict is Conclusion.CANNOT_TELL
    assert discrepancy(vllm, "--reported-bytes", "70GiB").verdict is Conclusion.NOT_GOOD
    assert discrepancy(vllm, "--reported-bytes", "73GiB").verdict is Conclusion.GOOD


def test_gpus_that_cannot_be_read_are_skipped_and_said(vllm: Vllm, nvml: FakeNvml) -> None:
    nvml.errors = {"nvmlInitWithFlags": DRIVER_MISSING}
    nvml.write()

    step = discrepancy(vllm)

    assert step.verdict is Conclusion.CANNOT_TELL
    assert step.text.startswith("the GPUs cannot be read: the NVIDIA driver is not loaded")


@pytest.mark.usefixtures("nvml")
def test_a_page_that_cannot_be_read_is_skipped_and_said(vllm: Vllm) -> None:
    vllm.answers["/metrics"] = page("", status="500 Internal Server Error")
    vllm.answers["/v1/completions"] = page("", status="500 Internal Server Error")

    step = discrepancy(vllm)

    assert step.verdict is Conclusion.CANNOT_TELL
    assert step.text.startswith("the engine's page, which has its budget, cannot be read: ")
