"""The command `smoke`: whether a vLLM that was just started serves."""

import asyncio
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, ClassVar, Final, NamedTuple, TypeVar

import httpx
from pydantic import Field

from vllm_headroom import catalog
from vllm_headroom.config import Settings, from_text, setting
from vllm_headroom.daemon import logs
from vllm_headroom.daemon.parts import build_page_reader
from vllm_headroom.daemon.sources import close_all
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.model import EnginePage, Failure, Sample, Snapshot, name_device
from vllm_headroom.parse.engines import explain_empty_page, parse_engines
from vllm_headroom.scrape.http.failures import hide_secrets
from vllm_headroom.scrape.http.reader import PageReader, Reply
from vllm_headroom.units import format_duration, parse_duration
from vllm_headroom.vocabulary import Reason
from vllm_headroom_tools.cli import Command, write_note
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.look import read_machine
from vllm_headroom_tools.openai import find_error, parse_first_model, parse_object
from vllm_headroom_tools.options import SHARE
from vllm_headroom_tools.trace import BadInput

T = TypeVar("T")


class EngineServer:
    """Requests to the server that has the engine's page; none raises."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._page = httpx.URL(settings.engine_url)

    def address(self, path: str) -> str:
        """Return where something is, without what may be secret."""
        return str(hide_secrets(self._page.join(path)))

    async def text(self, path: str, seconds: float) -> str | Failure:
        """Return what is served at `path`, which is relative to the engine's page."""
        return await self._read(path, seconds, PageReader.fetch)

    async def page(self) -> EnginePage | Failure:
        """Return the engine's page of metrics, understood."""
        text = await self.text("", self._settings.engine_timeout_seconds)
        return text if isinstance(text, Failure) else parse_engines(text)

    async def post(self, path: str, body: Mapping[str, object], seconds: float) -> Reply | Failure:
        """Return what is answered to `body`."""
        return await self._read(path, seconds, lambda reader: reader.send("POST", "", body))

    async def _read(
        self, path: str, seconds: float, read: Callable[[PageReader], Awaitable[T | Failure]]
    ) -> T | Failure:
        """Return the answer; a failure to answer in time is without the daemon's advice, about another time limit."""
        reader = build_page_reader(
            self._settings, str(self._page.join(path)), timeout_seconds=seconds
        )
        try:
            answer = await read(reader)
        finally:
            await close_all(reader)
        if not isinstance(answer, Failure) or answer.reason is not Reason.TIMEOUT:
            return answer
        message = f"{self.address(path)} did not answer within {seconds:.3g} s: look for a hang in vLLM's log"
        return Failure(source=answer.source, reason=answer.reason, message=message)


class SmokeStep(NamedTuple):
    """The result of one step: what was seen, or why it failed or cannot be taken, and what to do."""

    verdict: Conclusion
    text: str


def _skip(text: str) -> SmokeStep:
    return SmokeStep(Conclusion.CANNOT_TELL, text)


MODELS: Final = "v1/models"
TOKENS: Final = 8
FORMS: Final[tuple[tuple[str, Mapping[str, object]], ...]] = (
    ("v1/completions", {"prompt": "Hello"}),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
)
"""The second for a model that has only chat."""

NOT_SERVED: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.NOT_IMPLEMENTED,
    }
)
"""What servers answer to a form of request that the model does not serve."""

SAID_CHARACTERS: Final = 200


async def request_completion(reach: EngineServer, deadline_seconds: float) -> SmokeStep:
    """Ask the first model that the server lists for a completion, and where it has none for a chat's answer."""
    now = asyncio.get_running_loop().time
    listed = await reach.text(MODELS, min(10.0, deadline_seconds))
    if isinstance(listed, Failure):
        return SmokeStep(Conclusion.NOT_GOOD, listed.message)
    model = parse_first_model(listed)
    if model is None:
        return SmokeStep(
            Conclusion.NOT_GOOD,
            f"{reach.address(MODELS)} lists no model: check that HEADROOM_ENGINE_URL names vLLM's own port",
        )
    problem = ""
    for path, prompt in FORMS:
        began = now()
        body = {"model": model.name, "max_tokens": TOKENS, "temperature": 0, **prompt}
        answer = await reach.post(path, body, deadline_seconds)
        tokens = _read_completion(answer, reach.address(path))
        if isinstance(tokens, int):
            return SmokeStep(
                Conclusion.GOOD, f"{model.name} gave {tokens} tokens in {now() - began:.2f} s"
            )
        problem = problem or tokens
        if isinstance(answer, Failure) or answer.status not in NOT_SERVED:
            return SmokeStep(Conclusion.NOT_GOOD, tokens)
    return SmokeStep(Conclusion.NOT_GOOD, problem)


def _read_completion(answer: Reply | Failure, address: str) -> int | str:
    """Return how many tokens were completed, or what is wrong, with advice."""
    if isinstance(answer, Failure):
        hung_up = f"{address} hung up in the middle of the completion: look for a crash in the engine's log"
        return hung_up if answer.reason is Reason.INCOMPLETE else answer.message
    document = parse_object(answer.text)
    if answer.status != HTTPStatus.OK:
        said = (find_error(document) or answer.text).strip()[:SAID_CHARACTERS]
        advice = "look for the cause in the engine's log"
        if "out of memory" in said.lower():
            advice = "lower --gpu-memory-utilization: the memory that ran out lies outside that budget, and needs more"
            advice += " room"
        elif answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            advice = "set HEADROOM_ENGINE_BEARER_TOKEN_FILE to a token that may use the API"
        return f"{address} answers {answer.status}{f' ({said})' if said else ''}: {advice}"
    usage, choices = document.get("usage"), document.get("choices")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(tokens, int) and tokens and isinstance(choices, list) and choices:
        return tokens
    said = answer.text[:SAID_CHARACTERS]
    return f"{address} answers 200 without a completion ({said}): check that HEADROOM_ENGINE_URL names vLLM"


COUNTED_SECONDS: Final = 15.0
"""vLLM counts a request as it finishes; its web server may be busy, and gauges of several of them lag."""

NO_COUNTERS: Final = (
    "the page answers and has no counters of vLLM's, although it completes: take --disable-log-stats out of vLLM's"
    " options; if it is not there, HEADROOM_ENGINE_URL is not vLLM's own port"
)


async def check_counters(
    reach: EngineServer, before: EnginePage | Failure, patience_seconds: float = COUNTED_SECONDS
) -> tuple[SmokeStep, EnginePage | Failure]:
    """Return whether one more request has finished than in `before`, and the page that says so."""

    def count_finished(page: EnginePage | Failure) -> float:
        engines = () if isinstance(page, Failure) else page.engines
        return sum(
            engine.finished_total or 0.0 for engine in engines
        )  # a counter that is not there yet is at 0

    finished_before = count_finished(before)
    now = asyncio.get_running_loop().time
    ends = now() + patience_seconds
    while True:
        page = await reach.page()
        more = count_finished(page) - finished_before
        if more >= 1 or now() >= ends:
            break
        await asyncio.sleep(0.5)
    found = _check_inputs(page, NO_COUNTERS)
    if found.verdict is Conclusion.GOOD and more >= 1:
        found = SmokeStep(Conclusion.GOOD, f"{found.text}; finished requests rose by {more:.0f}")
    elif found.verdict is Conclusion.GOOD:
        stay = f"finished requests stay at {finished_before:.0f} after a completion"
        fix = "check that HEADROOM_ENGINE_URL is the page of the server that answers beside it"
        found = SmokeStep(Conclusion.NOT_GOOD, f"{stay}: {fix}")
    return found, page


def _check_inputs(page: EnginePage | Failure, nothing: str) -> SmokeStep:
    if isinstance(page, Failure):
        return SmokeStep(Conclusion.NOT_GOOD, page.message)
    if not page.engines:
        return SmokeStep(Conclusion.NOT_GOOD, nothing)
    needed = ("requests_running", "requests_waiting", "requests_finished")
    if missing := [name for name, is_there in page.inputs if name in needed and not is_there]:
        text = f"the page does not offer {', '.join(missing)}: `vllm-headroom doctor` says more"
        return SmokeStep(Conclusion.NOT_GOOD, text)
    there = sum(is_there for _, is_there in page.inputs)
    return SmokeStep(Conclusion.GOOD, f"{there} of {len(page.inputs)} inputs are on the page")


SET_REPORTED_BYTES: Final = "set HEADROOM_REPORTED_BYTES to what it should hold"
NOT_ITS_OWN: Final = -0.5
"""A vLLM that has answered holds its budget: less than half of it means that it is not on this GPU."""


async def check_discrepancy(
    settings: Settings, page: EnginePage | Failure, limit_ratio: float
) -> SmokeStep:
    """Compare each of the engine's GPUs with the limit; skipped where there is nothing to compare, or no GPU."""
    if isinstance(page, Failure):
        return _skip(f"the engine's page, which has its budget, cannot be read: {page.message}")
    here = await read_machine(settings, asyncio.sleep(0, page))
    if isinstance(here.readings, Failure):
        return _skip(f"the GPUs cannot be read: {here.readings.message}")
    if not any(gpu.attribution for gpu in here.gpus):
        return _skip(
            "none of the visible GPUs is known to be the engine's: name them in HEADROOM_GPUS"
        )
    snapshot = Snapshot(
        time_seconds=time.time(),
        monotonic_seconds=time.monotonic(),
        engines=page,
        gpus=here.gpus,
        processes=(),
    )
    samples = derive_discrepancy(snapshot, configured_bytes=settings.reported_bytes)
    if samples or page.engines:
        return judge_discrepancies(samples, limit_ratio)
    return _skip(f"the page has no series of an engine, and so no budget: {SET_REPORTED_BYTES}")


def judge_discrepancies(samples: tuple[Sample, ...], limit_ratio: float) -> SmokeStep:
    """Return how the discrepancies, of which the first label is the GPU, compare with the limit."""
    ratios = {
        name_device(*sample.labels[:2]): sample.value
        for sample in samples
        if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO
    }
    if samples and not ratios:
        return _skip(
            "what the engine holds of its GPUs cannot be seen from here: `vllm-headroom doctor` says why"
        )
    if not ratios:
        return _skip(
            f"vLLM does not report its budget (--kv-cache-memory-bytes replaces it): {SET_REPORTED_BYTES}"
        )
    shown = ", ".join(f"{gpu} {ratio:+.1%}" for gpu, ratio in ratios.items())
    if max(ratios.values()) > limit_ratio:
        text = f"more is held than was asked for, {shown}, where {limit_ratio:.1%} is allowed: who holds it is in"
        text = f"{text} headroom_gpu_memory_held_bytes; or lower --gpu-memory-utilization, or allow --max-discrepancy"
        return SmokeStep(Conclusion.NOT_GOOD, text)
    if strangers := [gpu for gpu, ratio in ratios.items() if ratio < NOT_ITS_OWN]:
        return _skip(
            f"{shown}: {', '.join(strangers)} is not the engine's; HEADROOM_GPUS names those that are"
        )
    return SmokeStep(Conclusion.GOOD, f"{shown}, {limit_ratio:.1%} is allowed")


Seconds = Annotated[float, from_text(parse_duration), Field(gt=0, le=86400)]
ACCEPTS_DURATION: Final = "a duration above 0, at most a day, such as 90s or 15m"


class SmokeSettings(Settings):
    """The daemon's settings that reach the engine and its GPUs, and the smoke test's."""

    no_options: ClassVar = frozenset(
        name
        for name in Settings.model_fields
        if not name.startswith("engine_") and name not in ("gpus", "reported_bytes")
    )

    deadline: Seconds = setting(
        900,
        "How long vLLM may take until it is healthy; a large model loads for minutes.",
        metavar="DURATION",
        accepts=ACCEPTS_DURATION,
        shown_default="15m",
    )
    completion_deadline: Seconds = setting(
        120,
        "How long the one completion may take; the first compiles kernels.",
        metavar="DURATION",
        accepts=ACCEPTS_DURATION,
        shown_default="2m",
    )
    max_discrepancy: Annotated[float, from_text(SHARE.read)] = setting(
        0.05,
        "How much more GPU memory vLLM may hold than configured.",
        metavar="SHARE",
        accepts=SHARE.accepts,
        shown_default="5%",
    )


PATH: Final = "health"


async def wait_until_healthy(
    reach: EngineServer, deadline_seconds: float, say: Callable[[str], None]
) -> SmokeStep:
    """Poll /health until it answers 200; report what it waits for when that changes, and every half minute."""
    now = asyncio.get_running_loop().time
    began = say_at = now()
    ends, said = began + deadline_seconds, ""
    while True:
        answer = await reach.text(
            PATH, min(5.0, deadline_seconds)
        )  # the last question's time as well
        if not isinstance(answer, Failure):
            return SmokeStep(Conclusion.GOOD, f"healthy after {format_duration(now() - began)}")
        if answer.reason is Reason.CREDENTIALS:
            raise BadInput(answer.message)
        if answer.reason in {
            Reason.TLS,
            Reason.UNAUTHORIZED,
            Reason.REDIRECT,
        }:  # no model that is loading gives these
            return SmokeStep(Conclusion.NOT_GOOD, answer.message)
        if now() >= ends:
            return SmokeStep(
                Conclusion.NOT_GOOD,
                f"not healthy within {format_duration(deadline_seconds)}: {answer.message}",
            )
        if answer.message != said or now() >= say_at:
            said, say_at = answer.message, now() + 30.0
            say(f"waiting, {format_duration(ends - now())} left: {said}")
        await asyncio.sleep(min(1.0, max(0.0, ends - now())))


STATES: Final = {
    Conclusion.GOOD: "ok",
    Conclusion.NOT_GOOD: "failed",
    Conclusion.CANNOT_TELL: "skipped",
}


async def _run(given: Namespace) -> Report:
    settings: SmokeSettings = given.settings
    logs.configure(settings.log_format, "error")  # the readers log what the steps report
    reach = EngineServer(settings)
    return build_report(reach.address(""), await take_steps(settings, reach, write_note))


def build_report(address: str, steps: Mapping[str, SmokeStep]) -> Report:
    """Return the report on the steps by name; what was skipped does not fail."""
    failed = [name for name, step in steps.items() if step.verdict is Conclusion.NOT_GOOD]
    headline = f"vLLM does not serve: {', '.join(failed)}." if failed else "vLLM serves."
    states = {name: STATES[step.verdict] for name, step in steps.items()}
    marks = {name: state.upper() if name in failed else state for name, state in states.items()}
    return Report(
        verdict=Conclusion.NOT_GOOD if failed else Conclusion.GOOD,
        headline=headline,
        findings=[Finding(name, *step) for name, step in steps.items()],
        data={
            "serves": not failed,
            "engine_url": address,
            "steps": [
                {"name": name, "state": states[name], "text": step.text}
                for name, step in steps.items()
            ],
        },
        lines=(
            *(f"{marks[name]:<8} {name:<12} {step.text}" for name, step in steps.items()),
            headline,
        ),
    )


async def take_steps(
    settings: SmokeSettings, reach: EngineServer, say: Callable[[str], None]
) -> dict[str, SmokeStep]:
    """Take the steps one after another; without health the others are skipped."""
    health = await wait_until_healthy(reach, settings.deadline, say)
    if health.verdict is Conclusion.NOT_GOOD:
        skipped = _skip("vLLM is not healthy")
        return {"health": health} | dict.fromkeys(("completion", "metrics", "discrepancy"), skipped)
    page = await reach.page()
    completion = await request_completion(reach, settings.completion_deadline)
    if completion.verdict is Conclusion.GOOD:
        metrics, page = await check_counters(reach, page)
    else:
        metrics = _check_inputs(page, "" if isinstance(page, Failure) else explain_empty_page(page))
        if metrics.verdict is Conclusion.GOOD:
            metrics = _skip(f"{metrics.text}; there is no completion to look for in them")
    discrepancy = await check_discrepancy(settings, page, settings.max_discrepancy)
    return {
        "health": health,
        "completion": completion,
        "metrics": metrics,
        "discrepancy": discrepancy,
    }


COMMAND: Final[Command] = Command(
    usage="%(prog)s [--json] [OPTION VALUE]...",
    description="""\
Says whether a vLLM that was just started serves: waits until it is healthy,
lets it complete one short prompt, looks for that request in its metrics, and
compares the GPU memory it holds with what it was configured to use. It takes
the daemon's settings for how to reach vLLM.
""",
    epilog="""\
It ends with status 0 when vLLM serves, 1 when something failed, and 2 when it
cannot use its settings or a file that they name. What cannot be looked at
from here is skipped, and it says why.

Example:
  vllm-headroom smoke --engine-url http://127.0.0.1:8000 --deadline 20m
""",
    options=lambda parser: parser.add_settings(SmokeSettings),
    run=_run,
)
