"""The composition root of `load`."""

import os
import signal
from collections.abc import Callable, Sequence
from random import Random, SystemRandom
from typing import Final

from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.loop import handle_signals
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts
from vllm_headroom.daemon.sources import ReadProcesses
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.http.failures import UnusableCredentials, load_trust, read_token
from vllm_headroom.scrape.http.reader import PageReader, find_port, is_here
from vllm_headroom.scrape.probe import ProbeReader
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.load.capacity import check_capacity
from vllm_headroom_tools.load.clients import Clients
from vllm_headroom_tools.load.order import LoadOrder
from vllm_headroom_tools.load.prompts import (
    build_prompt_maker,
    build_request_body,
    draw_image,
    read_prompts,
)
from vllm_headroom_tools.load.report import build_report
from vllm_headroom_tools.load.run import LoadRun, count_streams
from vllm_headroom_tools.load.sampling import Sampling, UnavailableSource, create_trace
from vllm_headroom_tools.load.sender import RequestSender
from vllm_headroom_tools.load.target import Target, fetch_model, find_target

SAMPLE_SECONDS: Final = 1.0
"""Our choice: the interval between samples during a load. A step of the load takes a minute."""

PAGE_TIMEOUT_SECONDS: Final = 10.0
"""This is longer than the daemon's timeout, because an overloaded server responds slowly."""


async def run_load(order: LoadOrder) -> Report:
    """Put the load on the server and return the report.

    SIGINT or SIGTERM ends the load early; a second signal ends the process. Raises BadInput if the
    load cannot begin, for one of these reasons:

    - There is no server.
    - The credentials cannot be used.
    - This machine cannot keep enough streams open.
    - The trace already exists.
    """
    try:
        # Read the files first, because the load must not begin if one of these files is invalid.
        tls = load_trust(order.ca_file) if order.url.scheme == "https" else None
        bearer = read_token(order.bearer_token_file) if order.bearer_token_file else None
    except UnusableCredentials as error:
        raise BadInput(str(error)) from None
    prompts = read_prompts(order.prompts) if order.prompts else ()
    target = await find_target(order.url, order.api, tls, bearer)
    check_capacity(order.concurrency, count_streams(order.concurrency), uses_tls=tls is not None)
    model = await _choose_model(order, target)
    # Create the trace before the first request. If the trace could not be written later, an hour of
    # results would be lost.
    create_trace(order.trace)
    sampling = Sampling(
        parts=_build_parts(order, target, SystemClock()),
        selection=Selection.of(order.gpus),
        interval_seconds=SAMPLE_SECONDS,
        trace=order.trace,
    )
    sender = RequestSender(
        target=target,
        make_body=_build_body_maker(order, model, prompts),
        timeout_seconds=order.timeout_seconds,
    )
    clients = Clients(
        sender=sender,
        grace_seconds=order.grace_seconds,
        most_requests=order.most_requests,
        requests_per_second=order.requests_per_second,
    )
    run = LoadRun(
        concurrency=order.concurrency, seconds=order.seconds, clients=clients, sampling=sampling
    )

    def stop() -> None:
        # after a second Ctrl-C, do not make the operator wait for the report
        if clients.is_stopped:
            os._exit(128 + signal.SIGINT)
        clients.stop()

    # The first Ctrl-C ends the load, which still produces a report.
    try:
        with handle_signals(stop):
            stages = await run.run_steps()
    finally:
        await sender.close()
        await sampling.close()
    # clients are also stopped if the engine has ended, which is not an interruption
    is_interrupted = clients.is_stopped and not run.has_lost_engine
    return build_report(
        order,
        model,
        stages,
        sampling.overall,
        sampling.detector,
        is_interrupted=is_interrupted,
    )


async def _choose_model(order: LoadOrder, target: Target) -> str:
    """Return the model to request: the given name, or else the server's first.

    Raises BadInput if the server does not list any model. Also raises BadInput if the requests are
    too long for the first model.
    """
    if order.model is not None:
        return order.model
    model = await fetch_model(order.url, target)
    longest_tokens = order.output_tokens.longest
    # Prompts from a file have lengths that the order does not set.
    if not order.prompts:
        longest_tokens += order.prompt_tokens.longest
    if model.max_tokens is not None and longest_tokens > model.max_tokens:
        raise BadInput(
            f"--prompt-tokens {order.prompt_tokens} and --output-tokens {order.output_tokens} "
            f"make up to {longest_tokens} tokens: {model.name} takes {model.max_tokens} "
            "(max_model_len)"
        )
    return model.name


def _build_parts(order: LoadOrder, target: Target, clock: SystemClock) -> Parts:
    """Return the sources to sample.

    If the server is on another machine, its processes and probe files cannot be read here. The
    server's GPUs cannot be read either, unless the order names them.
    """
    is_local = is_here(target.address[0])
    # If the server is on another machine, this machine's GPUs are not the engine's.
    gpus: Gpus | UnavailableSource = UnavailableSource(Source.NVML, Reason.NO_DEVICES)
    if is_local or order.gpus != "auto":
        gpus = Gpus(monotonic=clock.monotonic, call_timeout_seconds=GPU_TIMEOUT_SECONDS)
    read_processes: ReadProcesses = UnavailableSource(Source.PROCESS, Reason.UNAVAILABLE).read
    if is_local:
        port = find_port(order.page_url)
        read_processes = Processes(engine_port=port, monotonic=clock.monotonic).read
    read_probe = None
    if is_local and order.probe_dir is not None:
        read_probe = ProbeReader(order.probe_dir, parse=parse_probe).read
    page_reader = PageReader(
        url=str(order.page_url),
        timeout_seconds=PAGE_TIMEOUT_SECONDS,
        # the token is for the server; it is not sent to a different page
        bearer_token_file=None if order.metrics_url else order.bearer_token_file,
        ca_file=order.ca_file,
    )
    return Parts(
        engine=page_reader, gpus=gpus, processes=read_processes, probe=read_probe, clock=clock
    )


def _build_body_maker(order: LoadOrder, model: str, prompts: Sequence[str]) -> Callable[[], bytes]:
    """Return a function that builds the body of a request.

    The prompt is picked at random from `prompts`. If there are none, it consists of random words.
    """
    # Seed from the system's entropy, so that two loads never send the same prompts.
    random = Random(SystemRandom().random())  # noqa: S311 - not for secrets
    make_prompt = build_prompt_maker(order.shared_ratio, random)

    def make_body() -> bytes:
        """Return the body of the next request, drawn from the order's distributions."""
        if prompts:
            prompt = random.choice(prompts)
        else:
            prompt = make_prompt(order.prompt_tokens.draw(random.random()))
        image = None
        if order.image_size is not None:
            image = draw_image(order.image_size, random)
        output_tokens = order.output_tokens.draw(random.random())
        return build_request_body(order.api, model, prompt, output_tokens, image)

    return make_body
