"""The composition root of a daemon that watches several engines."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import httpx
import uvloop
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.config import Settings
from vllm_headroom.daemon import app, logs, loop
from vllm_headroom.daemon.evict import (
    EVICTION_REQUEST_SECONDS,
    STAYS_OFF,
    TURN_SECONDS,
    Evictor,
    build_evictor_of,
)
from vllm_headroom.daemon.model_reader import NO_MODEL, ModelReader
from vllm_headroom.daemon.node import NodeWatch, SharedGpus, WatchedEngine, WatchParts
from vllm_headroom.daemon.parts import (
    GPU_TIMEOUT_SECONDS,
    NodeParts,
    build_eviction_policy,
    build_node_parts,
    build_real_parts,
)
from vllm_headroom.daemon.pod_api import ACCOUNT, open_api
from vllm_headroom.daemon.state.folders import name_folder, remove_unused
from vllm_headroom.expose.answers import Handler, Request, Response, build_application
from vllm_headroom.expose.metrics import HeadroomCollector, MetricsPage
from vllm_headroom.expose.node import (
    EngineView,
    NodeView,
    OtherEngine,
    respond_node_metrics,
    respond_node_page,
    respond_node_snapshot,
)
from vllm_headroom.expose.view import View, find_no_name
from vllm_headroom.expose.web.door import Door
from vllm_headroom.log import Log
from vllm_headroom.model import EngineName, EnginePod, Published, Sample
from vllm_headroom.scrape.http.failures import hide_secrets
from vllm_headroom.scrape.http.reader import find_port, is_here
from vllm_headroom.scrape.proc.node import LocatedEngine
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import EngineKind
from vllm_headroom.worker import SharedCaller, SharedThread

log = Log(__name__)

NO_TOKEN: Final = f"no token in {ACCOUNT}, which the component node-evict provides"

NO_HOST_PIDS: Final = (
    "only processes of this pod can be seen: set hostPID: true in the pod of the daemon"
)


YOUNG_OBJECTS: Final = 20_000
"""The number of new objects after which Python searches them for garbage. The samples of 16 engines
are 5,000 objects that live until the next tick. With Python's default of 700, each object is
visited several times, which takes 5 % of the daemon's CPU time (measured).
"""


def serve(settings: Settings, model: ModelReader = NO_MODEL) -> NoReturn:
    """Run the daemon for several engines until it is stopped, and exit with its status."""
    logs.configure(settings.log_format, settings.log_level)
    app.prepare_process()
    gc.set_threshold(YOUNG_OBJECTS)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    parts = build_node_parts(settings)
    if settings.evict != "off" and open_api(ACCOUNT, EVICTION_REQUEST_SECONDS) is None:
        log.error(STAYS_OFF, problem=NO_TOKEN)
    if parts.processes is not None and not parts.processes.sees_host:
        log.warning("engines of other pods cannot be found", problem=NO_HOST_PIDS)
    status = runner.run(app.run(parts, settings, model, NodeDaemon))
    logging.shutdown()
    # As in app.serve, a hung DNS resolver's thread must not delay the exit.
    os._exit(status)


def locate_urls(settings: Settings) -> tuple[LocatedEngine, ...]:
    """Return the engines that the operator named by URL.

    The result is () if the daemon finds the engines itself.
    """
    if not isinstance(settings.engines, tuple):
        return ()
    engines = []
    for url in settings.engines:
        shown_url = str(hide_secrets(httpx.URL(url)))
        engine = LocatedEngine(
            kind=EngineKind.WATCHED,
            key=url,
            owner_key="",
            name=EngineName(engine_url=shown_url),
            port=find_port(httpx.URL(url)),
            page_url=url,
        )
        engines.append(engine)
    return tuple(engines)


def list_folder_parts(located: LocatedEngine) -> tuple[str, ...]:
    """Return the parts of a state folder's name: pod names, UID and port."""
    name = located.name
    if name.pod is not None:
        uid = located.owner_key.removeprefix("pod:")
        pod = name.pod if name.pod != uid else ""
        return (name.namespace or "", pod, uid, str(located.port))
    return (name.text.partition("://")[2] or name.text, str(located.port))


def find_pod(name: EngineName) -> EnginePod | None:
    """Return an engine's pod, for commands that are shown.

    Returns None if the pod's names are unknown.
    """
    if name.namespace is None or name.pod is None or name.container is None:
        return None
    return EnginePod(namespace=name.namespace, pod=name.pod, container=name.container)


def find_probe_dir(probe_dir: Path, located: LocatedEngine) -> Path | None:
    """Return the folder of an engine's probe, named after the pod's UID.

    Returns None if the engine is not in a pod or the folder does not exist.
    """
    folder = probe_dir / located.owner_key.removeprefix("pod:")
    is_in_pod = located.name.pod is not None
    return folder if is_in_pod and folder.is_dir() else None


class NodeDaemon:
    """Watches several engines, and shows what it finds."""

    def __init__(
        self,
        parts: NodeParts,
        settings: Settings,
        model: ModelReader = NO_MODEL,
        *,
        home: str,
        ending: asyncio.Future[int],
    ) -> None:
        """`home` is the URL of the daemon's own page; `ending` receives the exit status."""
        self._clock = parts.clock
        self._processes = parts.processes
        self._settings = settings
        self._model = model
        self._process_thread = SharedThread("processes")
        """Reads the processes of all engines."""
        self._monitor = loop.TickMonitor(
            interval_seconds=settings.sample_interval_seconds,
            grace_seconds=settings.gpu_fatal_grace_seconds,
            clock=parts.clock,
            home=home,
            ending=ending,
        )
        self._node = NodeWatch(
            gpus=parts.gpus,
            processes=parts.processes,
            engines=locate_urls(settings),
            build_engine=self._build_engine,
            clock=self._clock,
            interval_seconds=settings.sample_interval_seconds,
            gpu_timeout_seconds=min(GPU_TIMEOUT_SECONDS, settings.sample_interval_seconds),
        )

    def list_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops that run until shutdown."""
        interval_seconds = self._settings.sample_interval_seconds
        gpu_interval_seconds = self._settings.gpu_sample_interval_seconds
        loops = [loop.run_every(interval_seconds, self._tick, self._clock), self._node.run()]
        if gpu_interval_seconds < interval_seconds:
            timeout_seconds = min(GPU_TIMEOUT_SECONDS, gpu_interval_seconds)
            sample_gpu_memory = partial(self._node.sample_gpu_memory, timeout_seconds)
            loops.append(loop.run_every(gpu_interval_seconds, sample_gpu_memory, self._clock))
        if self._settings.evict != "off":
            take_turns = self._node.begin_eviction_turns
            loops.append(loop.run_every(TURN_SECONDS, take_turns, self._clock))
        return loops

    def build_handler(self, door: Door | None) -> Handler:
        """Return the handler for all requests."""

        def list_other_samples() -> Iterator[Sample]:
            if door is not None:
                yield Sample(catalog.WEB_CONFIG_RELOAD, (), float(door.problem is None))

        def show_page(request: Request) -> Response:
            return respond_node_page(self._build_view(), request)

        def show_snapshot(request: Request) -> Response:
            return respond_node_snapshot(self._build_view(), request)

        def build_metrics(read_published: Callable[[], Published | None]) -> MetricsPage:
            """Return a metrics page; on each scrape, `read_published` returns its samples."""
            return MetricsPage(
                HeadroomCollector(
                    read_published,
                    self._clock.monotonic,
                    app.read_build(),
                    list_other_samples,
                )
            )

        def find_metrics(name: EngineName) -> MetricsPage:
            # The name comes from the page, so exactly one engine has it.
            (engine,) = (engine for engine in self._node.engines.values() if engine.name == name)
            return build_metrics(lambda: engine.watch.published)

        metrics = build_metrics(self._node.build_published)

        def show_metrics(request: Request) -> Response:
            return respond_node_metrics(self._build_view(), request, metrics, find_metrics)

        return build_application(
            metrics=show_metrics,
            page=show_page,
            snapshot=show_snapshot,
            find_problem=self._monitor.find_stall,
            has_sample=lambda: self._node.readings is not None,
        )

    async def _tick(self) -> None:
        """Begin a sample of each engine; end the daemon if the GPUs stay unreadable."""
        self._monitor.note_tick(await self._node.tick())

    def _build_engine(self, located: LocatedEngine, gpus: SharedGpus) -> WatchParts:
        """Return the parts that watch an engine, as in a daemon for one engine."""
        # The settings are as if this URL had been configured as the only engine.
        changes: dict[str, Any] = {
            "engine_url": located.page_url,
            "engines": None,
            "evict": "off",
        }
        if self._settings.state_dir is not None:
            changes["state_dir"] = self._prepare_folder(self._settings.state_dir, located)
        if self._settings.probe_dir is not None:
            changes["probe_dir"] = find_probe_dir(self._settings.probe_dir, located)
        settings = self._settings.model_copy(update=changes)
        parts = replace(
            build_real_parts(settings, self._model, partial(self._is_gone, located)),
            gpus=gpus,
            processes=self._build_processes(located).read,
            evictor=self._build_evictor(located),
        )
        return WatchParts(
            watch=app.build_engine_watch(parts, settings, self._model, find_pod(located.name)),
            evictor=parts.evictor,
            resources=(parts.engine, parts.canary_request, parts.server_request, parts.evictor),
        )

    def _is_gone(self, located: LocatedEngine) -> bool:
        """Return whether an engine's pod or unit no longer has any processes.

        The address of an engine that is gone may belong to another engine, because pod addresses
        are reused.
        """
        return self._processes is not None and not self._processes.has_processes(located.owner_key)

    def _build_evictor(self, located: LocatedEngine) -> Evictor | None:
        """Return the evictor of an engine's pod.

        Returns None if eviction is off or no pod is known.
        """
        pod = find_pod(located.name)
        if self._settings.evict == "off" or pod is None:
            return None
        uid = located.owner_key.removeprefix("pod:")
        return build_evictor_of(build_eviction_policy(self._settings), self._clock, pod, uid)

    def _build_processes(self, located: LocatedEngine) -> Processes:
        """Return the reader of an engine's processes.

        Usually, only the processes of the engine's pod or unit are searched. For an engine that is
        named by its URL, all processes are searched.
        """
        if self._processes is None:
            is_local = is_here(httpx.URL(located.page_url).host)
            return Processes(
                engine_port=located.port,
                engine_is_here=is_local,
                monotonic=self._clock.monotonic,
                worker=SharedCaller(self._process_thread),
            )
        return Processes(
            engine_port=located.port,
            engine_is_here=True,
            monotonic=self._clock.monotonic,
            read_scope=partial(self._processes.read_scope, located.owner_key),
            worker=SharedCaller(self._process_thread),
        )

    def _prepare_folder(self, state_dir: Path, located: LocatedEngine) -> Path:
        """Return the engine's folder; remove folders of engines that have long been gone."""
        folder = state_dir / name_folder(*list_folder_parts(located))
        used_names = {
            name_folder(*list_folder_parts(engine.located))
            for engine in self._node.engines.values()
        }
        with contextlib.suppress(OSError):  # The state files report the same problem.
            remove_unused(state_dir, {*used_names, folder.name})
        return folder

    def _build_view(self) -> NodeView:
        """Return what the page and the JSON document show now."""
        readings = self._node.readings
        stall_reason = self._monitor.find_stall()
        seconds = None
        age_seconds = 0.0
        if readings is not None:
            age_seconds = self._clock.monotonic() - readings.monotonic_seconds
            # The wall-clock time of the last sample, for the page.
            seconds = self._clock.time() - age_seconds
        return NodeView(
            version=app.read_version(),
            host=socket.gethostname(),
            interval_seconds=self._settings.sample_interval_seconds,
            engines=tuple(
                EngineView(name=engine.name, view=self._build_engine_view(engine, stall_reason))
                for engine in self._node.engines.values()
            ),
            own_sidecar=tuple(
                OtherEngine(name=engine.name, problem=engine.problem)
                for engine in self._node.list_others(EngineKind.OWN_SIDECAR)
            ),
            unreadable=tuple(
                OtherEngine(name=engine.name, problem=engine.problem)
                for engine in self._node.list_others(EngineKind.UNREADABLE)
            ),
            seconds=seconds,
            age_seconds=age_seconds,
            stall_reason=stall_reason,
        )

    def _build_engine_view(self, engine: WatchedEngine, stall_reason: str | None) -> View:
        """Return the view for an engine's own page.

        Before the first sample, the view has no snapshot.
        """
        view = View(
            version=app.read_version(),
            interval_seconds=self._settings.sample_interval_seconds,
            history=engine.watch.history,
            host=engine.name.text,
            engine_url=str(hide_secrets(httpx.URL(engine.located.page_url))),
            stall_reason=stall_reason,
            runbooks=self._settings.runbooks_url,
            last_incident=engine.watch.last_incident,
            pod=find_pod(engine.name),
            find_process_name=find_no_name
            if self._processes is None
            else self._processes.names.find,
        )
        return app.add_newest_tick(view, engine.watch, self._clock.monotonic())
