"""The composition root: build the daemon, run it and shut it down."""

import asyncio
import contextlib
import ctypes
import logging
import os
import platform
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import httpx
import uvloop
from msgspec.structs import asdict, replace

from vllm_headroom import catalog
from vllm_headroom.config import AUTO, Settings
from vllm_headroom.daemon import logs, loop
from vllm_headroom.daemon.canary import Canary
from vllm_headroom.daemon.engine_watch import EngineWatch, Sampler, recall_states
from vllm_headroom.daemon.evict import TURN_SECONDS, Evictor
from vllm_headroom.daemon.flight import Flight
from vllm_headroom.daemon.mappings import Mappings
from vllm_headroom.daemon.model_reader import NO_MODEL, ModelReader
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts, build_real_parts
from vllm_headroom.daemon.pod import read_engine_pod
from vllm_headroom.daemon.server_pages import ServerPages
from vllm_headroom.daemon.sources import AnyParts, close_all
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.daemon.state.store import StateKeeper
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.expose.answers import Handler, Request, Response, build_application
from vllm_headroom.expose.metrics import HeadroomCollector, MetricsPage
from vllm_headroom.expose.page import render_page, respond_html
from vllm_headroom.expose.server import Server, listen
from vllm_headroom.expose.snapshot import respond_snapshot
from vllm_headroom.expose.view import History, View
from vllm_headroom.expose.web.config import WebConfigError
from vllm_headroom.expose.web.door import Door
from vllm_headroom.log import ENGINE_NAME, Log
from vllm_headroom.model import EnginePod, Sample
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.scrape.http.failures import hide_secrets
from vllm_headroom.trace.recorder import Recorder

log = Log(__name__)

CANNOT_LISTEN: Final = 2
"""The exit status if the daemon cannot start until an operator changes a setting."""

LONGEST_TICK_SECONDS: Final = 30.0
"""The longest time between two ticks. A hung source delays the next tick by less, because each
source has a timeout. If more time passes, the daemon itself was stopped or did not get any CPU.
"""

OTHERS_WRITE_BITS: Final = 0o022
"""The permission bits that the daemon never sets on its files. Other users therefore cannot change
its state.
"""


M_MMAP_THRESHOLD: Final = -3
"""The number of this option in glibc's malloc.h (see mallopt(3))."""

MMAP_THRESHOLD_BYTES: Final = 128 * 2**10
"""glibc's default threshold. The text of vLLM's page takes 67 kB."""


@cache  # Reading the version opens files, and every page shows it.
def read_version() -> str:
    """Return the version of the installed distribution."""
    return metadata.version("vllm-headroom")


def read_build() -> tuple[str, str, str]:
    """Return the version, source revision and Python version.

    The revision is empty if the build did not record one.
    """
    stamp = Path(__file__).parents[1] / "REVISION"
    revision = stamp.read_text().strip() if stamp.is_file() else ""
    return read_version(), revision, platform.python_version()


def serve(settings: Settings, model: ModelReader = NO_MODEL) -> NoReturn:
    """Run the real daemon until it is stopped, and exit with its status.

    Errors in the daemon itself are raised.
    """
    logs.configure(settings.log_format, settings.log_level)
    prepare_process()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    status = runner.run(run(build_real_parts(settings, model), settings, model))
    logging.shutdown()
    # Exit without waiting for threads. A DNS resolver that hangs blocks a thread for 10 s
    # (measured).
    os._exit(status)


def prepare_process() -> None:
    """Configure the process: who may write to its files, and how it frees memory."""
    forbid_writing_by_others()
    # Only glibc has this function. By default, glibc raises its mmap threshold when a large block
    # is freed. As a result, a single 4 MiB page left 13 MiB in use. An explicitly set threshold
    # does not change.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def forbid_writing_by_others() -> None:
    """Allow only this user to write to new files, regardless of the inherited umask."""
    inherited_mask = os.umask(0o777)
    os.umask(inherited_mask | OTHERS_WRITE_BITS)


class Service(Protocol):
    """A daemon that watches one or several engines."""

    def list_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops that run until shutdown."""

    def build_handler(self, door: Door | None) -> Handler:
        """Return the handler for all requests."""


async def run(
    parts: AnyParts,
    settings: Settings,
    model: ModelReader = NO_MODEL,
    build_daemon: Callable[..., Service] | None = None,
) -> int:
    """Run a daemon until it is stopped, and return the exit status.

    The parts are closed at the end. The status is CANNOT_LISTEN if the port or the web
    configuration file cannot be used. `build_daemon` builds the daemon. The demo uses it to replace
    the class Daemon. Raises an ExceptionGroup if a loop raises.
    """
    # The port is opened and the web configuration is read first. A mistake in the address or the
    # web configuration therefore leads only to a log line and an exit.
    door = None
    try:
        listener = listen(settings.listen_host, settings.listen_port)
        if settings.web_config_file is not None:
            door = Door(settings.web_config_file)
    except OSError as error:
        # The module `socket` appends the address to this text. The log line already contains the
        # address as fields.
        problem, _, _ = str(error.strerror).partition(" (while")
        log.error(  # noqa: TRY400 - the operator needs the address, not a traceback
            "cannot listen; set HEADROOM_LISTEN_HOST and HEADROOM_LISTEN_PORT to a free address of"
            " this machine",
            host=settings.listen_host or "all interfaces",
            port=settings.listen_port,
            problem=problem,
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
    if model.problem and settings.kv_bytes_per_token is None:
        log.warning("KV cache known in tokens only", problem=model.problem)

    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with loop.handle_signals(partial(loop.request_end, ending, loop.STOPPED)):
        try:
            port = listener.getsockname()[1]
            pod = read_engine_pod(settings.engine_container)
            names = {} if pod is None else asdict(pod)
            log.info("listening", port=port, version=read_version(), **names)
            build: Callable[..., Service] = build_daemon or Daemon
            daemon = build(parts, settings, model, home=f"http://localhost:{port}/", ending=ending)
            server = Server(daemon.build_handler(door), door)
            return await loop.run_until_end([server.serve(listener), *daemon.list_loops()], ending)
        finally:
            # The Lease is given back after the loops have ended. If the Lease were given back
            # earlier, a loop could take it again.
            if isinstance(parts, Parts) and parts.evictor is not None:
                await parts.evictor.give_lease_back()
            await close_all(*parts.list_resources())


def build_engine_watch(
    parts: Parts, settings: Settings, model: ModelReader, pod: EnginePod | None
) -> EngineWatch:
    """Build the watch that samples the engine in `parts` and, if configured, saves its state.

    `pod` is the engine's pod, or None if unknown.
    """
    clock = parts.clock
    history = History()
    keeper = None
    flight = None
    recall = None
    lock = None
    recent_lines = None
    if settings.state_dir is not None:
        # The state and the flight record share a folder, and therefore a lock.
        lock = FolderLock()
        keeper = StateKeeper(
            folder=settings.state_dir, clock=clock, version=read_version(), lock=lock
        )
        recall = partial(recall_states, keeper, history)
        recent_lines = logs.RecentLines(ENGINE_NAME.get())
        flight = Flight(
            folder=settings.state_dir,
            lines=partial(tuple, recent_lines.lines),
            version=read_version(),
            lock=lock,
            mappings=Mappings(parts.mappings),
            pod=pod,
        )
    recorder = None
    if settings.trace_file is not None:
        recorder = Recorder(file=settings.trace_file, max_bytes=settings.trace_max_bytes)
    canary = None
    if parts.canary_request is not None and settings.canary_interval_seconds is not None:
        canary = Canary(
            parts.canary_request.ask,
            settings.canary_interval_seconds,
            clock,
            # A pause longer than a slow tick means that the daemon itself was stopped.
            pause_seconds=max(LONGEST_TICK_SECONDS, 3 * settings.sample_interval_seconds),
        )
    server_pages = None
    if parts.server_request is not None:
        server_pages = ServerPages(parts.server_request.send, clock)
    profile_name = None if settings.engine_profile == AUTO else settings.engine_profile
    sampler = Sampler(
        sources=parts,
        parse=partial(parse_engines, profile_name=profile_name),
        rules=TickRules(
            selection=Selection.of(settings.gpus),
            derivations=build_derivations(
                reported_bytes=settings.reported_bytes,
                kv_bytes_per_token=settings.kv_bytes_per_token,
                model=model.configured,
                baseline_bytes_per_request=settings.baseline_bytes_per_request,
            ),
            model=model.configured,
            host_limit_bytes=settings.host_memory_limit_bytes,
            reported_bytes=settings.reported_bytes,
            role=settings.role,
            gate_ready_seconds=settings.gate_ready_seconds,
            read_guardrail=None if parts.evictor is None else parts.evictor.read_guardrail,
        ),
        clock=clock,
        gpu_timeout_seconds=min(GPU_TIMEOUT_SECONDS, settings.sample_interval_seconds),
        recall=recall,
        canary=canary,
        server_pages=server_pages,
    )
    return EngineWatch(
        sampler=sampler,
        history=history,
        keeper=keeper,
        flight=flight,
        recorder=recorder,
        canary=canary,
        server_pages=server_pages,
        gpus=parts.gpus,
        clock=clock,
        lock=lock,
        recent_lines=recent_lines,
    )


class Daemon:
    """Watches one engine, shows the results and, if configured, evicts its own pod."""

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        model: ModelReader = NO_MODEL,
        *,
        home: str,
        ending: asyncio.Future[int],
    ) -> None:
        """`home` is the URL of the daemon's own page; `ending` receives the exit status."""
        self._clock = parts.clock
        self._evictor = parts.evictor
        self._notice = parts.notice
        self._find_process_name = parts.find_process_name
        self._interval_seconds = settings.sample_interval_seconds
        self._gpu_interval_seconds = settings.gpu_sample_interval_seconds
        self._runbooks_url = settings.runbooks_url
        self._pod = read_engine_pod(settings.engine_container)
        self._engine_url = str(hide_secrets(httpx.URL(settings.engine_url)))
        self._monitor = loop.TickMonitor(
            interval_seconds=settings.sample_interval_seconds,
            grace_seconds=settings.gpu_fatal_grace_seconds,
            clock=parts.clock,
            home=home,
            ending=ending,
        )
        self._watch = build_engine_watch(parts, settings, model, self._pod)

    def list_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops that run until shutdown."""
        loops = [loop.run_every(self._interval_seconds, self._tick, self._clock)]
        # GPU memory is read more often than other sources, to notice short peaks.
        if self._gpu_interval_seconds < self._interval_seconds:
            timeout_seconds = min(GPU_TIMEOUT_SECONDS, self._gpu_interval_seconds)
            sample_gpu_memory = partial(self._watch.sample_gpu_memory, timeout_seconds)
            loops.append(loop.run_every(self._gpu_interval_seconds, sample_gpu_memory, self._clock))
        loops += self._watch.list_loops()
        if self._evictor is not None:
            take_turn = partial(self._take_eviction_turn, self._evictor)
            loops.append(loop.run_every(TURN_SECONDS, take_turn, self._clock))
        return loops

    def build_handler(self, door: Door | None) -> Handler:
        """Return the handler for all requests."""
        watch = self._watch

        def list_other_samples() -> Iterator[Sample]:
            if watch.last_incident is not None:
                yield Sample(catalog.LAST_INCIDENT, (), watch.last_incident.seconds)
            if door is not None:
                yield Sample(catalog.WEB_CONFIG_RELOAD, (), float(door.problem is None))

        def show_page(request: Request) -> Response:
            return respond_html(render_page(self._build_view(), request.query))

        def show_snapshot(_: Request) -> Response:
            return respond_snapshot(self._build_view())

        def explain_closed_gate() -> str | None:
            """Return why the gate is closed, or None if it is open."""
            if watch.latest is None or self._monitor.find_stall():
                return None  # Without a recent sample, the gate stays open.
            return watch.latest.gate.reason

        collector = HeadroomCollector(
            lambda: watch.published,
            self._clock.monotonic,
            read_build(),
            list_other_samples,
        )
        return build_application(
            metrics=MetricsPage(collector),
            page=show_page,
            snapshot=show_snapshot,
            find_problem=self._monitor.find_stall,
            has_sample=lambda: watch.latest is not None,
            find_gate_reason=explain_closed_gate,
        )

    async def _tick(self) -> None:
        """Take a sample and write it to files.

        Ends the daemon if the GPUs stay unreadable.
        """
        result = await self._watch.sample()
        # The tick is noted before the files are written. A hung volume therefore does not fail the
        # health check.
        self._monitor.note_tick(result.snapshot.gpus)
        await self._watch.record()

    async def _take_eviction_turn(self, evictor: Evictor) -> None:
        """Let the evictor take its next step, based on the gate in the latest sample."""
        latest = self._watch.latest
        if latest is None or self._monitor.find_stall():
            await evictor.turn(None)  # An old sample is not a reason to evict.
        else:
            await evictor.turn(latest.gate.due)

    def _build_view(self) -> View:
        """Return what the page shows now; before the first sample, the view has no snapshot."""
        view = View(
            version=read_version(),
            interval_seconds=self._interval_seconds,
            history=self._watch.history,
            host=socket.gethostname(),
            pod=self._pod,
            engine_url=self._engine_url,
            stall_reason=self._monitor.find_stall(),
            notice=self._notice,
            runbooks=self._runbooks_url,
            last_incident=self._watch.last_incident,
            find_process_name=self._find_process_name,
        )
        return add_newest_tick(view, self._watch, self._clock.monotonic())


def add_newest_tick(view: View, watch: EngineWatch, now_seconds: float) -> View:
    """Return `view` with an engine's latest tick added, or unchanged before the first sample.

    `now_seconds` is a time on the monotonic clock.
    """
    latest = watch.latest
    if latest is None:
        return view
    return replace(
        view,
        snapshot=latest.snapshot,
        values=latest.values,
        verdicts=latest.verdicts,
        age_seconds=now_seconds - latest.snapshot.monotonic_seconds,
    )
