"""The headline and the version: what is reported about a vLLM that serves with something wrong."""

import pytest

from tests.fakes.engine_server import page
from tests.unit.commands.smoke.serving import Vllm
from tests.unit.commands.smoke.smoking import smoke
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.smoke.command import SmokeStep, build_report

PASSED = SmokeStep(Conclusion.GOOD, "good")
FAILED = SmokeStep(Conclusion.NOT_GOOD, "not good")


@pytest.mark.parametrize(
    ("failed", "headline", "serves"),
    [
        ({"discrepancy"}, "vLLM serves, and holds more than its budget.", True),
        ({"version"}, "vLLM serves, and is not the expected version.", True),
        ({"completion", "discrepancy"}, "vLLM does not serve: completion, discrepancy.", False),
        (set(), "vLLM serves.", True),
    ],
)
def test_a_vllm_that_completes_serves_whatever_else_is_wrong(failed: set[str], headline: str, *, serves: bool) -> None:
    names = ("health", "version", "completion", "metrics", "discrepancy")
    report = build_report("http://vllm", {name: FAILED if name in failed else PASSED for name in names})

    assert (report.headline, report.data["serves"]) == (headline, serves)
    assert report.verdict is (Conclusion.NOT_GOOD if failed else Conclusion.GOOD)


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("answer", "verdict", "text"),
    [
        ('{"version": "0.33.0"}', Conclusion.GOOD, "it is 0.33.0"),
        ('{"version": "0.32.1"}', Conclusion.NOT_GOOD, "it is 0.32.1, and 0.33.0 is expected: check the image's tag"),
        ("[]", Conclusion.NOT_GOOD, "/version names no version: check HEADROOM_ENGINE_URL"),
    ],
)
def test_the_version_is_compared_where_one_is_expected(vllm: Vllm, answer: str, verdict: Conclusion, text: str) -> None:
    vllm.answers["/version"] = page(answer)

    step = smoke(vllm.url, "--expect-version", "0.33.0")["version"]

    assert step.verdict is verdict
    assert step.text.endswith(text)
