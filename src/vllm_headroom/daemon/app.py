"""The composition root: builds the parts, joins them and takes them down."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

import uvloop

from vllm_headroom.clock import Clock
from vllm_headroom.config import AUTO, Settings
from vllm_headroom.daemon import logs
from vllm_headroom.daemon.flight import Flight
from vllm_headroom.daemon.life import (
    NEEDS_NEW_CONTAINER,
    STOPPED,
    GraceTime,
    Heartbeat,
    handle_signals,
    request_end,
    run_every,
    run_until_end,
)
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts, build_real_parts
from vllm_headroom.daemon.sampler import Canary, Sampler, close_all
from vllm_headroom.daemon.state.file import FolderLock
from vllm_headroom.daemon.state.store import StateKeeper
from vllm_headroom.daemon.views import Views
from vllm_headroom.derive import build_derivations
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.gates import GATES, Rules, build_gates
from vllm_headroom.expose.answers import Handler, build_application
from vllm_headroom.expose.metrics import HeadroomCollector, MetricsPage
from vllm_headroom.expose.page import render_page, respond_html
from vllm_headroom.expose.server import Server, listen
from vllm_headroom.expose.snapshot import respond_snapshot
from vllm_headroom.expose.view import History, View
from vllm_headroom.expose.web.config import WebConfigError
from vllm_headroom.expose.web.door import Door
from vllm_headroom.log import Log
from vllm_headroom.model import Snapshot
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.trace.recorder import Recorder
from vllm_headroom_tools.sizing.footprint import bind_token_bytes

LONGEST_TICK_SECONDS: Final = 30.0
"""Between two ticks, whatever hangs meanwhile: each source has seconds. Beyond it the daemon was stopped or starved."""

Recall = Callable[[Snapshot], Awaitable[Mapping[str, Any]]]
"""Returns states that an earlier process kept, by derivation."""


def build_sampler(parts: Parts, settings: Settings, recall: Recall | None, canary: Canary | None) -> Sampler:
    """Return the straight line from the sources to what is published."""
    return Sampler(
        sources=parts,
        parse=partial(parse_engines, profile=None if settings.engine_profile == AUTO else settings.engine_profile),
        selection=Selection.of(settings.gpus),
        derivations=build_derivations(
            reported_bytes=settings.reported_bytes,
            kv_bytes_per_token=settings.kv_bytes_per_token,
            model=bind_token_bytes(settings.model_shape),
            baseline_bytes_per_request=settings.baseline_bytes_per_request,
        ),
        clock=parts.clock,
        gpu_timeout_seconds=min(GPU_TIMEOUT_SECONDS, settings.sample_interval_seconds),
        recall=recall,
        judge=partial(build_gates, _build_gate_rules(settings)),
        canary=canary,
        host_limit_bytes=settings.host_memory_limit_bytes,
    )


def _build_gate_rules(settings: Settings) -> Rules:
    return Rules(
        ready_seconds=settings.gate_ready_seconds,
        ready_most_seconds=settings.gate_ready_most_seconds,
        live_seconds=settings.gate_live_seconds,
        name=settings.gate_name or socket.gethostname(),
    )


def build_canary(parts: Parts, settings: Settings) -> Canary | None:
    """Return what asks an idle engine for a token; None where it is not wanted, or nobody can be asked."""
    if parts.asked is None or settings.canary_interval_seconds is None:
        return None
    most = max(LONGEST_TICK_SECONDS, 3 * settings.sample_interval_seconds)
    return Canary(parts.asked.ask, settings.canary_interval_seconds, parts.clock, most_pause_seconds=most)


@cache  # looked up in the distribution's files, and told on every page
def read_version() -> str:
    """Return the version of the installed distribution."""
    return metadata.version("vllm-headroom")


def read_build() -> tuple[str, str, str]:
    """Return version, source revision (empty where the build wrote none) and the version of Python."""
    stamp = Path(__file__).parents[1] / "REVISION"
    revision = stamp.read_text().strip() if stamp.is_file() else ""
    return read_version(), revision, platform.python_version()


log = Log(__name__)

CANNOT_LISTEN: Final = 2
SAVE_SECONDS: Final = 60.0
LAST_SAVE_SECONDS: Final = 0.5
"""Scrapes in progress may take as long beside it."""

TOKENS_DIFFER: Final = (
    "layers of HEADROOM_MODEL_CONFIG's model keep a window or a state, so that tokens differ in size; a size to count"
    " with can be given in HEADROOM_KV_BYTES_PER_TOKEN"
)


def serve(settings: Settings) -> NoReturn:
    """Run the real daemon until it is told to stop, and end the process with its status; an error of its own is raised.

    The process ends without waiting for threads: one may wait for a resolver that does not answer (10 s, measured), and
    SIGTERM may not.
    """
    logs.configure(settings.log_format, settings.log_level)
    status = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run(build_real_parts(settings), settings))
    logging.shutdown()
    os._exit(status)


async def run(parts: Parts, settings: Settings) -> int:
    """Run the daemon over `parts`, which it closes at the end; return the exit status."""
    try:
        listener = listen(settings.listen_host, settings.listen_port)
    except OSError as error:
        log.error(  # noqa: TRY400 - the operator needs the address, not a traceback
            "cannot listen; set HEADROOM_LISTEN_HOST and HEADROOM_LISTEN_PORT to a free address of this machine",
            host=settings.listen_host or "all interfaces",
            port=settings.listen_port,
            problem=error.strerror,
        )
        return CANNOT_LISTEN
    try:
        door = None if settings.web_config_file is None else Door(settings.web_config_file)
    except WebConfigError as error:
        for line in error.lines:
            log.error("cannot use HEADROOM_WEB_CONFIG_FILE", file=str(settings.web_config_file), problem=line)  # noqa: TRY400 - a line says it all
        return CANNOT_LISTEN
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    shape = settings.model_shape
    if shape is not None and not shape.has_every_token and settings.kv_bytes_per_token is None:
        log.warning("KV cache known in tokens only", problem=TOKENS_DIFFER)
    with handle_signals(partial(request_end, ending, STOPPED)):
        try:
            log.info("listening", port=listener.getsockname()[1], version=read_version())
            return await _run(parts, settings, listener, ending, door)
        finally:
            await close_all(parts.engine, parts.gpus, parts.asked)


async def _run(
    parts: Parts, settings: Settings, listener: socket.socket, ending: asyncio.Future[int], door: Door | None
) -> int:
    interval, clock, fast = settings.sample_interval_seconds, parts.clock, settings.gpu_sample_interval_seconds
    folder, trace, lock = settings.state_dir, settings.trace_file, FolderLock()
    keeper = None if folder is None else StateKeeper(folder=folder, clock=clock, version=read_version(), lock=lock)
    canary = build_canary(parts, settings)
    heartbeat = Heartbeat(interval, clock, asyncio.get_running_loop().time)
    empty = View(
        version=read_version(),
        interval_seconds=interval,
        history=History(),
        notice=parts.notice,
        runbooks=settings.runbooks_url,
    )
    lines = logs.remember_lines().lines
    flight = None if folder is None else Flight(folder=folder, lines=lines, version=read_version(), lock=lock)
    views = Views(empty=empty, clock=clock, unhealthy=heartbeat.find_stall, flight=flight)
    recall = None if keeper is None else partial(_recall_states, keeper, views)
    sampler = build_sampler(parts, settings, recall, canary)
    grace = GraceTime(settings.gpu_fatal_grace_seconds)
    recorder = None if trace is None else Recorder(file=trace, max_bytes=settings.trace_max_bytes)
    home = f"http://localhost:{listener.getsockname()[1]}/"

    async def tick() -> None:
        first = sampler.published is None
        await sampler.tick()
        views.step(sampler)
        heartbeat.beat()
        if first:
            log.info("first sample published", look_at=home, scrape=f"{home}metrics")
        if sampler.snapshot is not None and grace.is_over(sampler.snapshot.gpus, clock.monotonic()):
            log.critical("the GPUs stay unreadable until this container is made anew: ending with status 3")
            request_end(ending, NEEDS_NEW_CONTAINER)
        if sampler.snapshot is not None and recorder is not None:
            await recorder.record(sampler.snapshot)
        await views.record(sampler)

    served = _build_handler(sampler, views, heartbeat, clock)
    looking = () if fast >= interval else (run_every(fast, partial(_sample_memory, parts, views, fast), clock),)
    saving = () if keeper is None else (_save(keeper, lambda: views.states(sampler), clock),)
    asking = () if canary is None else (canary.run(lambda: sampler.snapshot),)
    return await run_until_end(
        (run_every(interval, tick, clock), *looking, *saving, *asking), Server(served, door), listener, ending
    )


def _build_handler(sampler: Sampler, views: Views, heartbeat: Heartbeat, clock: Clock) -> Handler:
    return build_application(
        metrics=MetricsPage(
            HeadroomCollector(
                lambda: sampler.published,
                clock.monotonic,
                read_build(),
                lambda: None if views.last_incident is None else views.last_incident.seconds,
            )
        ),
        page=lambda _: respond_html(render_page(views.build_view(sampler))),
        snapshot=lambda _: respond_snapshot(views.build_view(sampler)),
        unhealthy=heartbeat.find_stall,
        ready=lambda: sampler.published is not None,
        gate=lambda name: None if heartbeat.find_stall() else sampler.states[GATES].reason(name),
    )


async def _sample_memory(parts: Parts, views: Views, interval: float) -> None:
    """Look at the memory of the GPUs between two ticks."""
    views.look(parts.clock.time(), await parts.gpus.sample_used(min(GPU_TIMEOUT_SECONDS, interval)))


async def _recall_states(keeper: StateKeeper, views: Views, snapshot: Snapshot) -> Mapping[str, Any]:
    """Return the states that an earlier process kept of this engine; its curves go to what is shown."""
    states = await keeper.recall(snapshot)
    views.take_up(states)
    return states


async def _save(keeper: StateKeeper, states: Callable[[], Mapping[str, Any]], clock: Clock) -> None:
    try:
        await run_every(SAVE_SECONDS, lambda: keeper.save(states()), clock)
    finally:
        await keeper.save(states(), LAST_SAVE_SECONDS)
