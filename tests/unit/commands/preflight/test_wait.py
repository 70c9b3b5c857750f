from tests.fakes.nvml.library import GIB, FakeNvml
from tests.unit.commands.preflight.looking import Preflight
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import Kind


def test_memory_that_is_given_back_while_it_waits_is_a_go_at_once(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].used_bytes = 60 * GIB
    nvml.write()

    def give_back() -> None:
        nvml.gpus[0].used_bytes = 0
        nvml.write()

    report = preflight.wait(600, meanwhile=give_back)

    assert report.verdict is Conclusion.GOOD
    assert 0 < report.waited_seconds < 60
    (message,) = preflight.said
    assert message.startswith("waiting, ")
    assert message.endswith(" 53.95 GiB are missing; held: 60.00 GiB by no process listed here")


def test_memory_that_is_never_given_back_is_no_go_when_the_time_is_over(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].used_bytes = 60 * GIB
    nvml.write()

    report = preflight.wait(2)

    assert report.verdict is Conclusion.NOT_GOOD
    assert report.waited_seconds > 0
    assert len(preflight.said) == 1


def test_it_does_not_wait_for_what_does_not_pass(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.gpus[0].used_bytes, nvml.gpus[0].rows = 60 * GIB, (True, False)
    nvml.write()

    report = preflight.wait(600)

    assert [finding.kind for finding in report.findings] == [Kind.MEMORY, Kind.ECC]
    assert report.waited_seconds < 60
    assert preflight.said == []


def test_a_driver_that_answers_late_is_waited_for(preflight: Preflight, nvml: FakeNvml) -> None:
    nvml.hangs = {"nvmlInitWithFlags": 600}
    nvml.write()

    def answer() -> None:
        nvml.hangs = {}
        nvml.write()

    report = preflight.wait(600, patience_seconds=1, meanwhile=answer)

    assert report.verdict is Conclusion.GOOD
    assert "NVML does not answer" in preflight.said[0]
