"""The composition root of `load`."""

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random, SystemRandom
from typing import Final

from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.loop import handle_signals
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.http.failures import UnusableCredentials, load_trust, read_token
from vllm_headroom.scrape.http.reader import PageReader, find_port, is_here
from vllm_headroom.scrape.probe import ProbeReader
from vllm_headroom.scrape.proc.files import read_own_pid
from vllm_headroom.scrape.proc.host import read_host
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom_tools.cli import write_note
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.load.clients import Clients, RequestSender
from vllm_headroom_tools.load.report import build_report
from vllm_headroom_tools.load.run import (
    LoadRun,
    Sampling,
    UnavailableSource,
    count_streams,
    create_trace,
)
from vllm_headroom_tools.load.target import (
    LoadOrder,
    Target,
    build_prompts,
    build_request_body,
    draw_image,
    fetch_model,
    find_target,
    read_prompts,
)
from vllm_headroom_tools.trace import BadInput

OWN_DESCRIPTORS: Final = 64
"""For what is opened besides streams: the sampler's files, /proc, the trace."""

STREAM_BYTES: Final = 16 * 2**10
"""Memory of a stream over http: 6 KiB in this process (measured) and what the kernel keeps of a socket, doubled."""

TLS_STREAM_BYTES: Final = 128 * 2**10
"""The same over https, with 47 KiB in this process (measured): each connection has buffers for encryption."""

MOST: Final = 2**31


def raise_descriptors() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(
        ValueError, OSError
    ):  # a kernel whose own limit is lower keeps the soft one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def list_limits(
    descriptors: int, *, tls: bool, proc: Path = Path("/proc")
) -> list[tuple[int, str]]:
    """Return how many streams to one address each limit allows, the lowest first; what cannot be read is left out.

    Memory is what the machine calls available, or what is left of the container's limit where that is less.
    """
    open_now = sum(1 for _ in Path("/proc/self/fd").iterdir())
    found = [(max(0, descriptors - open_now - OWN_DESCRIPTORS), f"ulimit -n {descriptors}")]
    with contextlib.suppress(OSError, ValueError):
        first, last = (proc / "sys/net/ipv4/ip_local_port_range").read_text().split()
        ports = int(last) - int(first) + 1
        found.append((ports, f"{ports} local ports (net.ipv4.ip_local_port_range)"))
    with contextlib.suppress(OSError):
        here = read_host(proc, read_own_pid(proc))
        free = [] if here.machine is None else [here.machine.available_bytes]
        if here.cgroup is not None and here.cgroup.limit_bytes is not None:
            free.append(
                max(0, here.cgroup.limit_bytes - here.cgroup.used_bytes + here.cgroup.cache_bytes)
            )
        each = TLS_STREAM_BYTES if tls else STREAM_BYTES
        found += [(least // each, "memory") for least in sorted(free)[:1]]
    return sorted(found)


async def run_load(order: LoadOrder) -> Report:
    """Put the load on the server, and report on it; raises BadInput where that cannot be done."""
    try:
        tls = load_trust(order.ca_file) if order.url.scheme == "https" else None
        bearer = read_token(order.bearer_token_file) if order.bearer_token_file else None
    except UnusableCredentials as error:
        raise BadInput(str(error)) from None
    texts = read_prompts(order.prompts) if order.prompts else ()
    target = await find_target(order.url, order.api, tls, bearer)
    _check_limits(order, tls=tls is not None)
    model = await _choose_model(order, target)
    create_trace(order.trace)
    clock = SystemClock()
    sampling = Sampling(
        parts=_build_parts(order, target, clock),
        selection=Selection.of(order.gpus),
        interval_seconds=1.0,
        trace=order.trace,
    )
    asker = RequestSender(
        target=target,
        make_body=_make_bodies(order, model, texts),
        timeout_seconds=order.timeout_seconds,
    )
    clients = Clients(
        asker=asker,
        grace_seconds=order.grace_seconds,
        most_requests=order.most_requests,
        requests_per_second=order.requests_per_second,
    )
    run = LoadRun(
        concurrency=order.concurrency, seconds=order.seconds, clients=clients, sampling=sampling
    )

    def stop() -> None:
        if clients.stopped:  # Ctrl-C again
            os._exit(128 + signal.SIGINT)
        clients.stop()

    try:
        with handle_signals(stop):
            steps = await run.steps()
    finally:
        await asker.close()
        await sampling.close()
    stopped = clients.stopped and not run.has_lost_engine
    return build_report(order, model, steps, sampling.whole, sampling.watch, stopped=stopped)


def _check_limits(order: LoadOrder, *, tls: bool) -> None:
    needed = count_streams(order.concurrency)
    held, name = list_limits(raise_descriptors(), tls=tls)[0]
    if needed > held:
        raise BadInput(
            f"--concurrency {order.concurrency} needs {needed} streams at once, and this process can hold {held}:"
            f" {name} ends first"
        )
    write_note(f"{needed} streams at most; this process can hold {held}, {name} ends first")


async def _choose_model(order: LoadOrder, target: Target) -> str:
    if order.model is not None:
        return order.model
    model = await fetch_model(order.url, target)
    longest = order.output_tokens.most + (0 if order.prompts else order.prompt_tokens.most)
    if model.max_tokens is not None and longest > model.max_tokens:
        raise BadInput(
            f"--prompt-tokens {order.prompt_tokens} and --output-tokens {order.output_tokens} make up to {longest}"
            f" tokens: {model.name} takes {model.max_tokens} (max_model_len)"
        )
    return model.name


def _build_parts(order: LoadOrder, target: Target, clock: SystemClock) -> Parts:
    here = is_here(target.address[0])
    return Parts(
        engine=PageReader(
            url=str(order.page),
            timeout_seconds=10.0,  # an overloaded server answers late
            bearer_token_file=None if order.metrics_url else order.bearer_token_file,
            ca_file=order.ca_file,
        ),
        gpus=Gpus(monotonic=clock.monotonic, call_timeout_seconds=GPU_TIMEOUT_SECONDS)
        if here or order.gpus != "auto"
        else UnavailableSource(Source.NVML, Reason.NO_DEVICES),
        processes=Processes(engine_port=find_port(order.page), monotonic=clock.monotonic).read
        if here
        else UnavailableSource(Source.PROCESS, Reason.UNAVAILABLE).read,
        probe=None
        if order.probe_dir is None or not here
        else ProbeReader(order.probe_dir, parse=parse_probe).read,
        clock=clock,
    )


def _make_bodies(order: LoadOrder, model: str, texts: Sequence[str]) -> Callable[[], bytes]:
    random = Random(SystemRandom().random())  # noqa: S311 - not for secrets
    make_prompt = build_prompts(order.shared_ratio, random)

    def body() -> bytes:
        prompt = (
            random.choice(texts)
            if texts
            else make_prompt(order.prompt_tokens.draw(random.random()))
        )
        image = None if order.image_size is None else draw_image(order.image_size, random)
        return build_request_body(
            order.api, model, prompt, order.output_tokens.draw(random.random()), image
        )

    return body
