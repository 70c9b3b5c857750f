"""The composition root: build the daemon, run it and shut it down."""

import asyncio
import logging
import os
import platform
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

import httpx
import uvloop

from vllm_headroom import catalog
from vllm_headroom.config import AUTO, Settings
from vllm_headroom.daemon import logs, loop
from vllm_headroom.daemon.evict import TURN_SECONDS
from vllm_headroom.daemon.flight import Flight
from vllm_headroom.daemon.mappings import Mappings
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts, build_real_parts
from vllm_headroom.daemon.sampler import Canary, Sampler, close_all
from vllm_headroom.daemon.state.file import HISTORY, FolderLock
from vllm_headroom.daemon.state.store import StateKeeper
from vllm_headroom.derive import LEAK, build_derivations
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.gates import GATE, build_gate
from vllm_headroom.derive.readings import count_running
from vllm_headroom.derive.verdicts import VERDICTS, build_verdicts, measure_watches
from vllm_headroom.expose.answers import Handler, build_application
from vllm_headroom.expose.metrics import HeadroomCollector, MetricsPage
from vllm_headroom.expose.page import render_page, respond_html
from vllm_headroom.expose.server import Server, listen
from vllm_headroom.expose.snapshot import respond_snapshot
from vllm_headroom.expose.view import History, View
from vllm_headroom.expose.web.config import WebConfigError
from vllm_headroom.expose.web.door import Door
from vllm_headroom.log import Log
from vllm_headroom.model import Sample, Snapshot, Verdict
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.scrape.http.failures import hide_secrets
from vllm_headroom.trace.recorder import Recorder

LONGEST_TICK_SECONDS: Final = 30.0
"""Between two ticks, with hanging sources: each has a timeout of seconds. Longer, the daemon was stopped or starved."""


@cache  # read from the distribution's files, and shown on every page
def read_version() -> str:
    """Return the version of the installed distribution."""
    return metadata.version("vllm-headroom")


def read_build() -> tuple[str, str, str]:
    """Return version, source revision (empty where the build wrote none) and Python version."""
    stamp = Path(__file__).parents[1] / "REVISION"
    revision = stamp.read_text().strip() if stamp.is_file() else ""
    return read_version(), revision, platform.python_version()


log = Log(__name__)

CANNOT_LISTEN: Final = 2
SAVE_SECONDS: Final = 60.0
LAST_SAVE_SECONDS: Final = 0.5
"""Scrapes in progress may take as long in parallel."""


def serve(settings: Settings) -> NoReturn:
    """Run the real daemon until it is stopped, and exit with its status; raise an error of the daemon itself."""
    logs.configure(settings.log_format, settings.log_level)
    status = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(
        run(build_real_parts(settings), settings)
    )
    logging.shutdown()
    os._exit(
        status
    )  # without waiting for threads: a resolver that does not answer holds one for 10 s (measured)


async def run(parts: Parts, settings: Settings, make: "Callable[..., Daemon] | None" = None) -> int:
    """Run the daemon that `make` builds over `parts`, which it closes at the end; return the exit status."""
    try:
        listener = listen(settings.listen_host, settings.listen_port)
        door = None if settings.web_config_file is None else Door(settings.web_config_file)
    except OSError as error:
        log.error(  # noqa: TRY400 - the operator needs the address, not a traceback
            "cannot listen; set HEADROOM_LISTEN_HOST and HEADROOM_LISTEN_PORT to a free address of this machine",
            host=settings.listen_host or "all interfaces",
            port=settings.listen_port,
            problem=str(error.strerror).partition(" (while")[
                0
            ],  # the module socket adds the address
        )
        return CANNOT_LISTEN
    except WebConfigError as error:
        for line in error.lines:
            log.error(  # noqa: TRY400 - one line per mistake
                "cannot use HEADROOM_WEB_CONFIG_FILE",
                file=str(settings.web_config_file),
                problem=line,
            )
        return CANNOT_LISTEN
    if settings.model_problem and settings.kv_bytes_per_token is None:
        log.warning("KV cache known in tokens only", problem=settings.model_problem)
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with loop.handle_signals(partial(loop.request_end, ending, loop.STOPPED)):
        try:
            port = listener.getsockname()[1]
            log.info("listening", port=port, version=read_version())
            daemon = (make or Daemon)(
                parts, settings, home=f"http://localhost:{port}/", ending=ending
            )
            server = Server(daemon.build_handler(door), door)
            return await loop.run_until_end([server.serve(listener), *daemon.list_loops()], ending)
        finally:
            await close_all(parts.engine, parts.gpus, parts.asked, parts.evictor)


class Daemon:
    """Joins the parts, and owns what is shown and kept beside the samples: verdicts, the day's history, incidents."""

    def __init__(
        self, parts: Parts, settings: Settings, *, home: str, ending: asyncio.Future[int]
    ) -> None:
        clock, version, folder, lock = parts.clock, read_version(), settings.state_dir, FolderLock()
        self._parts, self._clock, self._home, self._ending = parts, clock, home, ending
        self._settings, self._interval_seconds = settings, settings.sample_interval_seconds
        self._engine_url = str(hide_secrets(httpx.URL(settings.engine_url)))
        self._heartbeat = loop.Heartbeat(
            self._interval_seconds, clock, asyncio.get_running_loop().time
        )
        self._grace = loop.GraceTime(settings.gpu_fatal_grace_seconds)
        self._history = History()
        lines = partial(tuple, logs.RecentLines().lines)
        self._flight = None
        if folder is not None:
            mappings = Mappings(parts.mappings)
            self._flight = Flight(
                folder=folder, lines=lines, version=version, lock=lock, mappings=mappings
            )
        self._keeper = (
            None
            if folder is None
            else StateKeeper(folder=folder, clock=clock, version=version, lock=lock)
        )
        trace = settings.trace_file
        self._recorder = (
            None if trace is None else Recorder(file=trace, max_bytes=settings.trace_max_bytes)
        )
        pause, canary_seconds = (
            max(LONGEST_TICK_SECONDS, 3 * self._interval_seconds),
            settings.canary_interval_seconds,
        )
        self._canary = None
        if parts.asked is not None and canary_seconds is not None:
            self._canary = Canary(parts.asked.ask, canary_seconds, clock, pause_seconds=pause)
        self._sampler = Sampler(
            sources=parts,
            parse=partial(
                parse_engines,
                profile=None if settings.engine_profile == AUTO else settings.engine_profile,
            ),
            selection=Selection.of(settings.gpus),
            derivations=build_derivations(
                reported_bytes=settings.reported_bytes,
                kv_bytes_per_token=settings.kv_bytes_per_token,
                model=settings.token_bytes,
                baseline_bytes_per_request=settings.baseline_bytes_per_request,
            ),
            clock=parts.clock,
            gpu_timeout_seconds=min(GPU_TIMEOUT_SECONDS, settings.sample_interval_seconds),
            recall=None if self._keeper is None else self._recall,
            judges=(
                lambda values, _: build_gate(
                    settings.gate_ready_seconds,
                    values,
                    None if parts.evictor is None else parts.evictor.guardrail,
                ),
                lambda values, states: build_verdicts(
                    values, measure_watches(states[LEAK.name]), settings.role
                ),
            ),
            canary=self._canary,
            host_limit_bytes=settings.host_memory_limit_bytes,
        )

    def list_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops that run until shutdown."""
        loops = [loop.run_every(self._interval_seconds, self._tick, self._clock)]
        if self._settings.gpu_sample_interval_seconds < self._interval_seconds:
            loops.append(
                loop.run_every(
                    self._settings.gpu_sample_interval_seconds, self._sample_memory, self._clock
                )
            )
        if self._keeper is not None:
            loops.append(self._save_states(self._keeper))
        if self._canary is not None:
            loops.append(self._canary.run(lambda: self._sampler.snapshot))
        if (evictor := self._parts.evictor) is not None:

            async def evict() -> None:
                await evictor.turn(
                    None if self._heartbeat.find_stall() else self._sampler.states[GATE].due
                )

            loops.append(loop.run_every(TURN_SECONDS, evict, self._clock))
        return loops

    def build_handler(self, door: Door | None) -> Handler:
        """Return the handler of all requests."""
        sampler, find_stall = self._sampler, self._heartbeat.find_stall

        def list_others() -> Iterator[Sample]:
            if self._flight is not None and self._flight.last is not None:
                yield Sample(catalog.LAST_INCIDENT, (), self._flight.last.seconds)
            if door is not None:
                yield Sample(catalog.WEB_CONFIG_RELOAD, (), float(door.problem is None))

        collector = HeadroomCollector(
            lambda: sampler.published, self._clock.monotonic, read_build(), list_others
        )
        return build_application(
            metrics=MetricsPage(collector),
            page=lambda _: respond_html(render_page(self._build_view())),
            snapshot=lambda _: respond_snapshot(self._build_view()),
            unhealthy=find_stall,
            ready=lambda: sampler.published is not None,
            gate=lambda: None if find_stall() else sampler.states[GATE].reason,
        )

    async def _tick(self) -> None:
        is_first = self._sampler.published is None
        snapshot = await self._sampler.tick()
        self._history.step(snapshot, self._verdicts, count_running(snapshot.page))
        self._heartbeat.beat()
        if is_first:
            log.info("first sample published", look_at=self._home, scrape=f"{self._home}metrics")
        if self._grace.is_over(snapshot.gpus, self._clock.monotonic()):
            log.critical(
                "the GPUs stay unreadable until this container is restarted: exiting with status 3"
            )
            loop.request_end(self._ending, loop.NEEDS_NEW_CONTAINER)
        if self._recorder is not None:
            await self._recorder.record(snapshot)
        if self._flight is not None:
            await self._flight.step(snapshot, self._verdicts, self._sampler.values)

    async def _sample_memory(self) -> None:
        timeout_seconds = min(GPU_TIMEOUT_SECONDS, self._settings.gpu_sample_interval_seconds)
        used_bytes = await self._parts.gpus.sample_used(timeout_seconds)
        if self._flight is not None:
            self._flight.recent.add(self._clock.time(), used_bytes)

    async def _recall(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """Return the states that an earlier process kept of this engine, and restore the history it kept."""
        states = {} if self._keeper is None else await self._keeper.recall(snapshot)
        if HISTORY.name in states:
            self._history.restore(states[HISTORY.name])
        return states

    async def _save_states(self, keeper: StateKeeper) -> None:
        def collect() -> Mapping[str, Any]:
            return {**self._sampler.states, HISTORY.name: self._history.save()}

        try:
            await loop.run_every(SAVE_SECONDS, lambda: keeper.save(collect()), self._clock)
        finally:
            await keeper.save(collect(), LAST_SAVE_SECONDS)

    @property
    def _verdicts(self) -> tuple[Verdict, ...]:
        return tuple(self._sampler.states[VERDICTS])

    def _build_view(self) -> View:
        published = self._sampler.published
        return View(
            version=read_version(),
            interval_seconds=self._interval_seconds,
            history=self._history,
            host=socket.gethostname(),
            engine_url=self._engine_url,
            snapshot=self._sampler.snapshot,
            values=self._sampler.values,
            verdicts=self._verdicts,
            age_seconds=0.0
            if published is None
            else self._clock.monotonic() - published.monotonic_seconds,
            stall_reason=self._heartbeat.find_stall(),
            notice=self._parts.notice,
            runbooks=self._settings.runbooks_url,
            last_incident=None if self._flight is None else self._flight.last,
        )
