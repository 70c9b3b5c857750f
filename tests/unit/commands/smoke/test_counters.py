import asyncio
import re

import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import Answer, page
from tests.settings import load_as
from tests.unit.commands.smoke.serving import RECORDED, Vllm, error
from tests.unit.commands.smoke.smoking import smoke
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.smoke.command import (
    EngineServer,
    SmokeSettings,
    SmokeStep,
    check_counters,
    check_discrepancy,
)

pytestmark = pytest.mark.usefixtures("nvml")


def soon(vllm: Vllm) -> SmokeStep:
    """Look for a completion that was not made, without patience."""
    reach = EngineServer(load_as(SmokeSettings, ["--engine-url", vllm.url], {}))

    async def steps() -> SmokeStep:
        step, _ = await check_counters(reach, await reach.page(), 0.0)
        return step

    return asyncio.run(steps())


def test_the_completion_is_counted(vllm: Vllm) -> None:
    vllm.finished = 41

    step = smoke(vllm.url)["metrics"]

    assert step.verdict is Conclusion.GOOD
    assert re.fullmatch(r"\d+ of \d+ inputs are on the page; finished requests rose by 1", step.text)


def test_a_counter_that_is_not_there_before_the_first_request_begins_at_0(vllm: Vllm) -> None:
    first_page = "\n".join(line for line in RECORDED.splitlines() if "request_success" not in line) + "\n"
    vllm.answers["/metrics"] = page(first_page)
    reach = EngineServer(load_as(SmokeSettings, ["--engine-url", vllm.url], {}))

    async def steps() -> SmokeStep:
        old_page = await reach.page()
        del vllm.answers["/metrics"]
        vllm.finished = 1
        step, _ = await check_counters(reach, old_page, 0.0)
        return step

    assert asyncio.run(steps()).verdict is Conclusion.GOOD


def test_a_counter_that_stays_is_of_another_server(vllm: Vllm) -> None:
    vllm.finished = 7

    step = soon(vllm)

    assert step.verdict is Conclusion.NOT_GOOD
    assert step.text.startswith("finished requests stay at 7 after a completion: check that HEADROOM_ENGINE_URL is the")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            page((FOLDER / "vllm-0.32.0-disable-log-stats" / "idle.prom").read_text()),
            "take --disable-log-stats out of vLLM's options",
        ),
        (page("<html>"), "page is not metrics, it starts with"),
        (page("", status="500 Internal Server Error"), "answers 500 Internal Server Error"),
        (page('vllm:num_requests_running{model_name="m"} 0\n'), "does not offer requests_waiting, requests_finished"),
    ],
    ids=["no-stats", "html", "500", "few"],
)
def test_a_page_that_offers_too_little_fails(vllm: Vllm, answer: Answer, words: str) -> None:
    vllm.answers["/metrics"] = answer

    step = soon(vllm)

    assert step.verdict is Conclusion.NOT_GOOD
    assert words in step.text


def test_without_a_completion_there_is_nothing_to_look_for(vllm: Vllm) -> None:
    vllm.answers["/v1/completions"] = error("500 Internal Server Error", "oops")

    step = smoke(vllm.url)["metrics"]

    assert step.verdict is Conclusion.CANNOT_TELL
    assert step.text.endswith(" inputs are on the page; there is no completion to look for in them")


def test_a_page_without_counters_has_no_budget_either(vllm: Vllm) -> None:
    vllm.answers["/metrics"] = page("python_info 1\n")
    settings = load_as(SmokeSettings, ["--engine-url", vllm.url], {})

    async def step() -> SmokeStep:
        return await check_discrepancy(settings, await EngineServer(settings).page(), 0.05)

    assert asyncio.run(step()).text.startswith("the page has no series of an engine, and so no budget")
