"""The command `smoke`, which tests whether a newly started vLLM serves requests."""

import asyncio
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, ClassVar, Final, NamedTuple, TypeVar, cast

import httpx
from pydantic import Field

from vllm_headroom import catalog
from vllm_headroom.config import Settings, from_text, setting
from vllm_headroom.daemon import logs
from vllm_headroom.daemon.parts import build_page_reader
from vllm_headroom.daemon.sources import close_all
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.expose.node import list_engine_names
from vllm_headroom.model import EnginePage, Failure, Sample, Snapshot, name_device
from vllm_headroom.parse.engines import explain_empty_page, parse_engines
from vllm_headroom.scrape.http.failures import hide_secrets
from vllm_headroom.scrape.http.reader import PageReader, Reply
from vllm_headroom.units import format_duration, parse_duration
from vllm_headroom.vocabulary import Reason
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import Command, write_note
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.engine_choice import ENGINE_METAVAR, choose_engine
from vllm_headroom_tools.look import locate_engines, survey_machine
from vllm_headroom_tools.openai import (
    find_error,
    parse_first_model,
    parse_object,
    parse_server_version,
)
from vllm_headroom_tools.options import SHARE

T = TypeVar("T")


class EngineServer:
    """Sends requests to the server that has the engine's page.

    Paths are relative to the page's URL. Errors are returned as a Failure, never raised.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._page = httpx.URL(settings.engine_url)

    def address(self, path: str) -> str:
        """Return the URL of a path, without any parts that may be secret."""
        return str(hide_secrets(self._page.join(path)))

    async def text(self, path: str, seconds: float) -> str | Failure:
        """Return the text at `path`, or a Failure, within `seconds`."""
        return await self._read(path, seconds, PageReader.fetch)

    async def page(self) -> EnginePage | Failure:
        """Return the engines on the metrics page.

        Returns a Failure if the page cannot be read.
        """
        text = await self.text("", self._settings.engine_timeout_seconds)
        return text if isinstance(text, Failure) else parse_engines(text)

    async def post(self, path: str, body: Mapping[str, object], seconds: float) -> Reply | Failure:
        """Return the response to a POST of JSON, with any status, or a Failure."""
        return await self._read(path, seconds, lambda reader: reader.send("POST", "", body))

    async def _read(
        self, path: str, seconds: float, read: Callable[[PageReader], Awaitable[T | Failure]]
    ) -> T | Failure:
        """Return the result of `read` for a path, or a Failure, within `seconds`.

        For a timeout, the daemon's message is replaced, because it advises on a different time
        limit.
        """
        reader = build_page_reader(
            self._settings, str(self._page.join(path)), timeout_seconds=seconds
        )
        try:
            answer = await read(reader)
        finally:
            await close_all(reader)
        # A smoke test is meant to find hangs. Therefore, the message for a timeout says where to
        # look for the cause.
        if not isinstance(answer, Failure) or answer.reason is not Reason.TIMEOUT:
            return answer
        message = (
            f"{self.address(path)} did not answer within {seconds:.3g} s: look for a hang in"
            " vLLM's log"
        )
        return Failure(source=answer.source, reason=answer.reason, message=message)


class SmokeStep(NamedTuple):
    """The result of one step: passed (good), failed (not good) or skipped (cannot tell)."""

    verdict: Conclusion

    text: str
    """What was observed. For a failed or skipped step, this is the reason and what to do."""


def _skip(text: str) -> SmokeStep:
    return SmokeStep(Conclusion.CANNOT_TELL, text)


def _fail(text: str) -> SmokeStep:
    return SmokeStep(Conclusion.NOT_GOOD, text)


def _pass(text: str) -> SmokeStep:
    return SmokeStep(Conclusion.GOOD, text)


VERSION: Final = "version"
VERSION_CHECK_SECONDS: Final = 10.0


async def check_version(server: EngineServer, expected: str) -> SmokeStep:
    """Compare the version that vLLM reports at /version with the expected one."""
    text = await server.text(VERSION, VERSION_CHECK_SECONDS)
    if isinstance(text, Failure):
        return _fail(text.message)
    version = parse_server_version(text)
    if version is None:
        return _fail(f"{server.address(VERSION)} names no version: check HEADROOM_ENGINE_URL")
    # The response of another server may be of any length.
    shown = version[:MAX_QUOTED_CHARACTERS]
    if version != expected:
        return _fail(f"it is {shown}, and {expected} is expected: check the image's tag")
    return _pass(f"it is {shown}")


MODELS: Final = "v1/models"
MODELS_SECONDS: Final = 10.0
MAX_TOKENS: Final = 8
PROMPTS: Final[tuple[tuple[str, Mapping[str, object]], ...]] = (
    ("v1/completions", {"prompt": "Hello"}),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
)
"""The path and body of each request. The second request is for models that serve only chats."""

NOT_SERVED: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.NOT_IMPLEMENTED,
    }
)
"""The statuses that servers return for a type of request that they do not serve."""

MAX_QUOTED_CHARACTERS: Final = 200
"""The maximum number of characters that a step's text quotes from a response."""


async def request_completion(server: EngineServer, limit_seconds: float) -> SmokeStep:
    """Request a completion from the first listed model, or else a chat completion.

    The step fails if no model is listed, or if neither request returns tokens. The limit applies to
    each request.
    """
    now = asyncio.get_running_loop().time
    models = await server.text(MODELS, min(MODELS_SECONDS, limit_seconds))
    if isinstance(models, Failure):
        return _fail(models.message)
    model = parse_first_model(models)
    if model is None:
        return _fail(
            f"{server.address(MODELS)} lists no model: check that HEADROOM_ENGINE_URL names"
            " vLLM's own port"
        )
    problems = []
    for path, prompt in PROMPTS:
        requested_at_seconds = now()
        body = {"model": model.name, "max_tokens": MAX_TOKENS, "temperature": 0, **prompt}
        answer = await server.post(path, body, limit_seconds)
        completion = _read_completion(answer, server.address(path))
        if isinstance(completion, int):
            elapsed_seconds = now() - requested_at_seconds
            return _pass(f"{model.name} gave {completion} tokens in {elapsed_seconds:.2f} s")
        problem = completion
        # The chat request is tried only if the model does not serve completions. Any other response
        # is final.
        if isinstance(answer, Failure) or answer.status not in NOT_SERVED:
            return _fail(problem)
        problems.append(problem)
    # The first problem is that of the completion, which is more informative than that of the chat.
    return _fail(problems[0])


def _read_completion(answer: Reply | Failure, address: str) -> int | str:
    """Return the number of completion tokens, or a message with the problem and advice."""
    if isinstance(answer, Failure):
        if answer.reason is Reason.INCOMPLETE:
            return (
                f"{address} hung up in the middle of the completion: look for a crash in the"
                " engine's log"
            )
        return answer.message
    if answer.status != HTTPStatus.OK:
        return _describe_refusal(answer, address)
    document = parse_object(answer.text)
    usage = document.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    # Another server or a proxy's error page may also return 200.
    has_tokens = isinstance(tokens, int) and tokens != 0
    choices = document.get("choices")
    has_choices = isinstance(choices, list) and len(choices) > 0
    if has_tokens and has_choices:
        return cast("int", tokens)
    quoted = answer.text[:MAX_QUOTED_CHARACTERS]
    return (
        f"{address} answers 200 without a completion ({quoted}): check that HEADROOM_ENGINE_URL"
        " names vLLM"
    )


def _describe_refusal(answer: Reply, address: str) -> str:
    """Describe a response whose status is not 200: its content, and advice."""
    error = find_error(parse_object(answer.text)) or answer.text
    quoted = error.strip()[:MAX_QUOTED_CHARACTERS]
    advice = "look for the cause in the engine's log"
    # vLLM passes torch's message on to the client.
    if "out of memory" in quoted.lower():
        advice = (
            "lower --gpu-memory-utilization: the memory that ran out lies outside that budget, and"
            " needs more room"
        )
    elif answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        advice = "set HEADROOM_ENGINE_BEARER_TOKEN_FILE to a token that may use the API"
    detail = f" ({quoted})" if quoted else ""
    return f"{address} answers {answer.status}{detail}: {advice}"


COUNTER_SECONDS: Final = 15.0
"""Our choice: the time that the counters may take to include a request.

vLLM counts a request when it finishes. However, the web server may be busy. With several web
servers, the gauges are updated later.
"""

COUNTER_POLL_SECONDS: Final = 0.5

NO_COUNTERS: Final = (
    "the page answers and has no counters of vLLM's, although it completes: take"
    " --disable-log-stats out of vLLM's options; if it is not there, HEADROOM_ENGINE_URL is not"
    " vLLM's own port"
)


async def check_counters(
    server: EngineServer, old_page: EnginePage | Failure, patience_seconds: float = COUNTER_SECONDS
) -> tuple[SmokeStep, EnginePage | Failure]:
    """Poll the page until a request has finished since `old_page`.

    Returns the step and the page. The step fails if the page cannot be read, if it lacks inputs, or
    if no request finishes in time.
    """
    # If the old page could not be read, its count is 0, and any finished request counts as ours.
    old_finished = _count_finished(old_page)
    now = asyncio.get_running_loop().time
    deadline_seconds = now() + patience_seconds
    while True:
        page = await server.page()
        # The difference is used, so that earlier requests from other clients do not count.
        new_finished = _count_finished(page) - old_finished
        if new_finished >= 1 or now() >= deadline_seconds:
            break
        await asyncio.sleep(COUNTER_POLL_SECONDS)
    step = _check_inputs(page, NO_COUNTERS)
    if step.verdict is not Conclusion.GOOD:
        return step, page
    if new_finished >= 1:
        return _pass(f"{step.text}; finished requests rose by {new_finished:.0f}"), page
    problem = f"finished requests stay at {old_finished:.0f} after a completion"
    fix = "check that HEADROOM_ENGINE_URL is the page of the server that answers beside it"
    return _fail(f"{problem}: {fix}"), page


def _count_finished(page: EnginePage | Failure) -> float:
    """Return the number of finished requests of all engines.

    A counter that is missing or cannot be read is 0.
    """
    engines = () if isinstance(page, Failure) else page.engines
    return sum(engine.finished_total or 0.0 for engine in engines)


NEEDED_INPUTS: Final = ("requests_running", "requests_waiting", "requests_finished")
"""The inputs without which the step `metrics` fails."""


def _check_inputs(page: EnginePage | Failure, empty_problem: str) -> SmokeStep:
    """Check that a page contains the inputs that `smoke` needs.

    `empty_problem` is the message for a page without engines.
    """
    if isinstance(page, Failure):
        return _fail(page.message)
    if not page.engines:
        return _fail(empty_problem)
    present = [name for name, is_present in page.inputs if is_present]
    absent = [name for name, is_present in page.inputs if not is_present]
    # Other inputs are useful, but the test passes without them.
    missing = [name for name in absent if name in NEEDED_INPUTS]
    if missing:
        return _fail(
            f"the page does not offer {', '.join(missing)}: `vllm-headroom doctor` says more"
        )
    return _pass(f"{len(present)} of {len(page.inputs)} inputs are on the page")


SET_REPORTED_BYTES: Final = "set HEADROOM_REPORTED_BYTES to what it should hold"

OTHER_GPU_RATIO: Final = -0.5
"""The discrepancy below which a GPU cannot be the engine's.

Once vLLM has responded to a request, it has reserved its budget on its GPUs. If vLLM holds less
than half of the budget, the GPU is not the engine's.
"""


async def check_discrepancy(
    settings: Settings, page: EnginePage | Failure, limit_ratio: float
) -> SmokeStep:
    """Compare the memory that the engine holds on each of its GPUs with the budget.

    The step fails if the discrepancy on any GPU exceeds the limit. The step is skipped if the
    budget or the GPUs are unknown.
    """
    if isinstance(page, Failure):
        return _skip(f"the engine's page, which has its budget, cannot be read: {page.message}")
    # `survey_machine` expects an awaitable for the page, which has already been read.
    machine = await survey_machine(settings, asyncio.sleep(0, page))
    if isinstance(machine.readings, Failure):
        return _skip(f"the GPUs cannot be read: {machine.readings.message}")
    if not any(gpu.attribution for gpu in machine.gpus):
        return _skip(
            "none of the visible GPUs is known to be the engine's: name them in HEADROOM_GPUS"
        )
    snapshot = Snapshot(
        time_seconds=time.time(),
        monotonic_seconds=time.monotonic(),
        engines=page,
        gpus=machine.gpus,
        processes=(),
    )
    samples = derive_discrepancy(snapshot, configured_bytes=settings.reported_bytes)
    # An engine without a budget produces no samples. compare_discrepancies() handles this case too.
    if samples or page.engines:
        return compare_discrepancies(samples, limit_ratio)
    return _skip(f"the page has no series of an engine, and so no budget: {SET_REPORTED_BYTES}")


def compare_discrepancies(samples: tuple[Sample, ...], limit_ratio: float) -> SmokeStep:
    """Compare the discrepancies with the limit.

    The step fails if any discrepancy exceeds the limit. The step is skipped if no ratio is known or
    a GPU is not the engine's. The first two labels of a sample identify the GPU.
    """
    ratios = {
        name_device(*sample.labels[:2]): sample.value
        for sample in samples
        if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO
    }
    if samples and not ratios:
        return _skip(
            "what the engine holds of its GPUs cannot be seen from here: `vllm-headroom doctor`"
            " says why"
        )
    if not ratios:
        return _skip(
            "vLLM does not report its budget (--kv-cache-memory-bytes replaces it):"
            f" {SET_REPORTED_BYTES}"
        )
    shown = ", ".join(f"{gpu} {ratio:+.1%}" for gpu, ratio in ratios.items())
    if max(ratios.values()) > limit_ratio:
        return _fail(
            f"more is held than was asked for, {shown}, where {limit_ratio:.1%} is allowed: who"
            " holds it is in headroom_gpu_memory_held_bytes; or lower --gpu-memory-utilization, or"
            " allow --max-discrepancy"
        )
    other_gpus = [gpu for gpu, ratio in ratios.items() if ratio < OTHER_GPU_RATIO]
    if other_gpus:
        return _skip(
            f"{shown}: {', '.join(other_gpus)} is not the engine's; HEADROOM_GPUS names those that"
            " are"
        )
    return _pass(f"{shown}, {limit_ratio:.1%} is allowed")


DurationSeconds = Annotated[float, from_text(parse_duration), Field(gt=0, le=86400)]
ACCEPTS_DURATION: Final = "a duration above 0, at most a day, such as 90s or 15m"


class SmokeSettings(Settings):
    """The settings of the smoke test.

    The settings include the daemon's settings for the engine and its GPUs.
    """

    no_options: ClassVar = frozenset(
        name
        for name in Settings.model_fields
        if not name.startswith("engine_") and name not in ("gpus", "reported_bytes")
    )

    deadline: DurationSeconds = setting(
        900,
        "How long vLLM may take until it is healthy; a large model loads for minutes.",
        metavar="DURATION",
        accepts=ACCEPTS_DURATION,
        shown_default="15m",
    )
    completion_deadline: DurationSeconds = setting(
        120,
        "How long the one completion may take; the first compiles kernels.",
        metavar="DURATION",
        accepts=ACCEPTS_DURATION,
        shown_default="2m",
    )
    engine: str | None = setting(
        None,
        "Of several engines (HEADROOM_ENGINES) the one to take: NAMESPACE/POD, its unit or its"
        " URL.",
        metavar=ENGINE_METAVAR,
        accepts="the name of an engine",
    )
    max_discrepancy: Annotated[float, from_text(SHARE.read)] = setting(
        0.03,
        "How much more GPU memory vLLM may hold than configured.",
        metavar="SHARE",
        accepts=SHARE.accepts,
        shown_default="3%",
    )
    expect_version: str = setting(
        "",
        "The version that vLLM must have, such as 0.33.0; empty for any.",
        metavar="VERSION",
        accepts="a version as vLLM shows it at /version",
    )


HEALTH: Final = "health"
HEALTH_TIMEOUT_SECONDS: Final = 5.0
"""The time limit for one response. It is independent of the deadline, so the last response may
arrive after the deadline.
"""

HEALTH_POLL_SECONDS: Final = 1.0
HEALTH_REPORT_SECONDS: Final = 30.0
"""The interval at which an unchanged message is repeated."""

PERMANENT_REASONS: Final = frozenset({Reason.TLS, Reason.UNAUTHORIZED, Reason.REDIRECT})
"""Failures that waiting does not fix. They do not occur while a server is loading its model."""


async def wait_until_healthy(
    server: EngineServer, limit_seconds: float, say: Callable[[str], None]
) -> SmokeStep:
    """Poll /health until it returns 200; fail after the limit or on a permanent failure.

    Meanwhile, the latest failure is reported every half minute and whenever it changes. Raises
    BadInput if the configured credentials cannot be used.
    """
    now = asyncio.get_running_loop().time
    started_at_seconds = now()
    ends_at_seconds = started_at_seconds + limit_seconds
    # The first message is written without waiting.
    repeat_at_seconds = started_at_seconds
    reported_message = ""
    while True:
        answer = await server.text(HEALTH, min(HEALTH_TIMEOUT_SECONDS, limit_seconds))
        if not isinstance(answer, Failure):
            return _pass(f"healthy after {format_duration(now() - started_at_seconds)}")
        if answer.reason is Reason.CREDENTIALS:
            # Waiting cannot fix an incorrect setting.
            raise BadInput(answer.message)
        if answer.reason in PERMANENT_REASONS:
            return _fail(answer.message)
        if now() >= ends_at_seconds:
            return _fail(f"not healthy within {format_duration(limit_seconds)}: {answer.message}")
        if answer.message != reported_message or now() >= repeat_at_seconds:
            reported_message = answer.message
            repeat_at_seconds = now() + HEALTH_REPORT_SECONDS
            remaining = format_duration(ends_at_seconds - now())
            say(f"waiting, {remaining} left: {reported_message}")
        await asyncio.sleep(min(HEALTH_POLL_SECONDS, max(0.0, ends_at_seconds - now())))


SERVING_STEPS: Final = frozenset({"health", "completion", "metrics"})
"""The steps that must all pass for vLLM to be considered serving."""

WRONG_WHILE_SERVING: Final = {
    "version": "is not the expected version",
    "discrepancy": "holds more than its budget",
}
"""The problem that the headline reports if one of the other steps fails."""

STEP_STATES: Final = {
    Conclusion.GOOD: "ok",
    Conclusion.NOT_GOOD: "failed",
    Conclusion.CANNOT_TELL: "skipped",
}


async def _run(arguments: Namespace) -> Report:
    """Run the steps against the engine, and return the report."""
    settings: SmokeSettings = arguments.settings
    logs.configure(settings.log_format, "error")  # The readers would log what the steps report.
    if settings.engines is not None:
        settings = settings.model_copy(update={"engine_url": await _find_url(settings)})
    server = EngineServer(settings)
    return build_report(server.address(""), await take_steps(settings, server, write_note))


async def _find_url(settings: SmokeSettings) -> str:
    """Return the URL of the selected engine's page.

    Raises BadInput if no engine can be selected.
    """
    urls = {}
    for engine in await locate_engines(settings):
        if engine.page_url:
            urls[list_engine_names(engine.name)[-1]] = engine.page_url
    return urls[choose_engine(urls, settings.engine)]


def build_report(address: str, steps: Mapping[str, SmokeStep]) -> Report:
    """Return the report on the steps by name; skipped steps do not count as failures."""
    failed = [name for name, step in steps.items() if step.verdict is Conclusion.NOT_GOOD]
    serves = not SERVING_STEPS.intersection(failed)
    headline = _summarize(failed, serves=serves)
    states = {name: STEP_STATES[step.verdict] for name, step in steps.items()}
    # In the text, failures must stand out from the other steps.
    marks = {name: state.upper() if name in failed else state for name, state in states.items()}
    return Report(
        verdict=Conclusion.NOT_GOOD if failed else Conclusion.GOOD,
        headline=headline,
        findings=[Finding(name, *step) for name, step in steps.items()],
        data={
            "serves": serves,
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


def _summarize(failed: list[str], *, serves: bool) -> str:
    """Return the headline for the failed steps."""
    if not failed:
        return "vLLM serves."
    if not serves:
        return f"vLLM does not serve: {', '.join(failed)}."
    return f"vLLM serves, and {' and '.join(WRONG_WHILE_SERVING[name] for name in failed)}."


async def take_steps(
    settings: SmokeSettings, server: EngineServer, say: Callable[[str], None]
) -> dict[str, SmokeStep]:
    """Run the steps one after another and return them by name.

    If vLLM does not become healthy, the remaining steps are skipped. Raises BadInput if a setting
    is wrong, for example if a token is rejected.
    """
    health = await wait_until_healthy(server, settings.deadline, say)
    if health.verdict is Conclusion.NOT_GOOD:
        skipped = _skip("vLLM is not healthy")
        return {"health": health} | dict.fromkeys(("completion", "metrics", "discrepancy"), skipped)
    steps = {"health": health}
    if settings.expect_version:
        steps["version"] = await check_version(server, settings.expect_version)
    # The page is read before the completion is requested, so that the counters before and after the
    # completion can be compared.
    page = await server.page()
    completion = await request_completion(server, settings.completion_deadline)
    # The counters include a request only once it has been completed.
    if completion.verdict is Conclusion.GOOD:
        metrics, page = await check_counters(server, page)
    else:
        empty_problem = "" if isinstance(page, Failure) else explain_empty_page(page)
        metrics = _check_inputs(page, empty_problem)
        if metrics.verdict is Conclusion.GOOD:
            metrics = _skip(f"{metrics.text}; there is no completion to look for in them")
    discrepancy = await check_discrepancy(settings, page, settings.max_discrepancy)
    return steps | {"completion": completion, "metrics": metrics, "discrepancy": discrepancy}


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
