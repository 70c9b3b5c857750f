"""The composition root: builds the parts, joins them and takes them down."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from vllm_headroom.clock import Clock
from vllm_headroom.config.settings import Settings
from vllm_headroom.daemon.build import build, version
from vllm_headroom.daemon.life import BEYOND_REPAIR, STOPPED, Ending, GraceTime, Heartbeat, every, live, signals
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts, real_parts
from vllm_headroom.daemon.sampler import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.daemon.state.store import Keeper
from vllm_headroom.derive import derivations
from vllm_headroom.expose.answers import application
from vllm_headroom.expose.metrics import MetricsPage
from vllm_headroom.expose.page import html, landing_page
from vllm_headroom.expose.server import Server, listen
from vllm_headroom.expose.web.config import WebConfigError
from vllm_headroom.expose.web.door import Door
from vllm_headroom.parse import parse_engines
from vllm_headroom.scrape.worker import Worker
from vllm_headroom.sizing.footprint import token_bytes
from vllm_headroom.trace.recorder import Recorder

log = structlog.get_logger()

CANNOT_LISTEN: Final = 2
CLOSE_SECONDS: Final = 0.3
SAVE_SECONDS: Final = 60.0
LAST_SAVE_SECONDS: Final = 0.5
"""Scrapes in progress may take as long beside it."""

RECORD_SECONDS: Final = 1.0
"""A line takes microseconds; a volume that hangs delays one tick by this, and none after it."""

NO_BYTES: Final = (
    "layers of HEADROOM_MODEL_CONFIG's model keep a window or a state, so that tokens differ in size; a size to count"
    " with can be given in HEADROOM_KV_BYTES_PER_TOKEN"
)


async def serve(settings: Settings) -> int:
    """Run the real daemon until it is told to stop; return the exit status."""
    return await run(real_parts(settings), settings)


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
        door = None if settings.web_config_file is None else _door(settings.web_config_file)
    except WebConfigError as error:
        for line in error.lines:
            log.error("cannot use HEADROOM_WEB_CONFIG_FILE", file=str(settings.web_config_file), problem=line)  # noqa: TRY400 - a line says it all
        return CANNOT_LISTEN
    ending = Ending()
    shape = settings.model_shape
    if shape is not None and not shape.keeps_every_token and settings.kv_bytes_per_token is None:
        log.warning("KV cache known in tokens only", problem=NO_BYTES)
    with signals(partial(ending.ask, STOPPED)):
        try:
            log.info("listening", port=listener.getsockname()[1], version=version())
            return await _run(parts, settings, listener, ending, door)
        finally:
            await _close(parts)


async def _close(parts: Parts) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await parts.engine.close()
            await parts.gpus.close()


async def _run(parts: Parts, settings: Settings, listener: socket.socket, ending: Ending, door: Door | None) -> int:
    interval, clock, fast = settings.sample_interval_seconds, parts.clock, settings.gpu_sample_interval_seconds
    keeper = None if settings.state_dir is None else _keeper(settings.state_dir, clock)
    sampler = Sampler(
        sources=Sources(engine=parts.engine, gpus=parts.gpus, processes=parts.processes),
        parse=partial(parse_engines, profile=settings.profile),
        selection=settings.selection,
        derivations=derivations(
            reported_bytes=settings.reported_bytes,
            kv_bytes_per_token=settings.kv_bytes_per_token,
            model=token_bytes(settings.model_shape),
            baseline_bytes_per_request=settings.baseline_bytes_per_request,
        ),
        clock=clock,
        gpu_timeout_seconds=min(GPU_TIMEOUT_SECONDS, interval),
        recall=None if keeper is None else keeper.recall,
        engine_is_here=parts.engine_is_here,
    )
    heartbeat = Heartbeat(interval, clock, asyncio.get_running_loop().time)
    grace = GraceTime(settings.gpu_fatal_grace_seconds)
    recorder = None if settings.trace_file is None else _recorder(settings.trace_file, settings.trace_max_bytes)
    home = f"http://localhost:{listener.getsockname()[1]}/"

    async def tick() -> None:
        first = sampler.published is None
        await sampler.tick()
        heartbeat.beat()
        if first:
            log.info("first sample published", look_at=home, scrape=f"{home}metrics")
        if sampler.snapshot is not None and grace.is_over(sampler.snapshot.gpus, clock.monotonic()):
            log.critical("the GPUs stay unreadable until this container is made anew: ending with status 3")
            ending.ask(BEYOND_REPAIR)
        if recorder is not None and sampler.snapshot is not None:
            await recorder.record(sampler.snapshot)

    served = application(
        metrics=MetricsPage(lambda: sampler.published, clock.monotonic, build()),
        page=lambda _: html(landing_page(sampler.published, version=version(), notice=parts.notice)),
        unhealthy=heartbeat.unhealthy,
        ready=lambda: sampler.published is not None,
    )
    sampling = every(interval, tick, clock)
    peaks = every(fast, partial(parts.gpus.sample_used, min(GPU_TIMEOUT_SECONDS, fast)), clock)
    saving = () if keeper is None else (_save(keeper, sampler, clock),)
    return await live((sampling, peaks, *saving), Server(served, door), listener, ending)


def _door(file: Path) -> Door:
    """Return the door; passwords have a thread of their own, since each takes its time on purpose."""
    return Door(file, Worker[Any]("web").call, Worker[Any]("passwords").call)


def _keeper(folder: Path, clock: Clock) -> Keeper:
    return Keeper(folder=folder, call=Worker[Any]("state").call, clock=clock, version=version())


async def _save(keeper: Keeper, sampler: Sampler, clock: Clock) -> None:
    try:
        await every(SAVE_SECONDS, lambda: keeper.save(sampler.states), clock)
    finally:
        await keeper.save(sampler.states, LAST_SAVE_SECONDS)


def _recorder(file: Path, max_bytes: int) -> Recorder:
    """Return a recorder whose writes hang, on a volume that does, on a thread that ends with the process."""
    return Recorder(file=file, max_bytes=max_bytes, call=Worker[None]("trace").call, timeout_seconds=RECORD_SECONDS)
