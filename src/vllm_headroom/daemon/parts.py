"""The parts of the daemon that read the real engine, GPUs and processes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct

from vllm_headroom.clock import Clock, SystemClock
from vllm_headroom.config import Settings
from vllm_headroom.daemon.evict import EvictionPolicy, Evictor, build_evictor
from vllm_headroom.daemon.model_reader import NO_MODEL, ModelReader
from vllm_headroom.daemon.sources import Closable, GpuSource, Sources
from vllm_headroom.expose.view import find_no_name
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.http.reader import (
    CanaryRequest,
    PageReader,
    ServerRequest,
    find_port,
    is_here,
)
from vllm_headroom.scrape.pods import ContainerNames
from vllm_headroom.scrape.probe import ProbeReader
from vllm_headroom.scrape.proc.names import ProcessNames
from vllm_headroom.scrape.proc.node import NodeProcesses
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.scrape.proc.served_model import ServedModel
from vllm_headroom.scrape.proc.smaps import read_mappings

GPU_TIMEOUT_SECONDS: Final = 2.0
"""The time after which an NVML call counts as hung (NVIDIA/go-nvml#152). Normally, NVML responds
within milliseconds.
"""

CANARY_HEALTH_SECONDS: Final = 10.0
"""The time limit for a response from the server's /health."""

CANARY_TOKEN_SECONDS: Final = 60.0
"""The time limit for an idle engine to return one token. After this, the request is abandoned and
another one is sent.
"""


SERVER_PAGE_SECONDS: Final = 3.0
"""The time limit for each of the server's other pages. A round requests three pages and ends before
the next round begins.
"""


class Parts(Sources, frozen=True, kw_only=True):
    """The parts that differ between the daemon and the demo."""

    clock: Clock
    notice: str = ""
    """A line for people who view the page."""
    canary_request: CanaryRequest | None = None
    """The sender of the canary's requests, or None if there is no canary."""
    server_request: ServerRequest | None = None
    """The sender of requests for the server's other pages, or None in the demo."""
    evictor: Evictor | None = None
    mappings: Callable[[int], dict[str, int] | None] = lambda _: None
    """Returns a process's resident bytes by kind of mapping. Returns None if they are not visible.
    """

    find_process_name: Callable[[int], str | None] = find_no_name
    """Returns a process's name for display, or None if it is not visible."""

    def list_resources(self) -> tuple[Closable | None, ...]:
        """Return the resources to close on shutdown."""
        return (self.engine, self.gpus, self.canary_request, self.server_request, self.evictor)


def is_never_gone() -> bool:
    """Return False: requests are always sent to an engine that the operator named by URL."""
    return False


def build_real_parts(
    settings: Settings,
    model: ModelReader = NO_MODEL,
    is_gone: Callable[[], bool] = is_never_gone,
) -> Parts:
    """Return the readers of the engine, the GPUs and /proc on this machine.

    Nothing is requested from the engine while `is_gone` returns True.
    """
    clock = SystemClock()
    url = httpx.URL(settings.engine_url)
    processes = Processes(
        engine_port=find_port(url), engine_is_here=is_here(url.host), monotonic=clock.monotonic
    )
    read_probe = None
    if settings.probe_dir is not None:
        read_probe = ProbeReader(settings.probe_dir, parse=parse_probe).read
    read_log = None
    if settings.engine_log is not None:
        from vllm_headroom.daemon.engine_log import (  # noqa: PLC0415 - 130 patterns to compile
            EngineLogFollower,
            build_log_source,
        )

        source = build_log_source(settings.engine_log, settings.engine_container)
        read_log = EngineLogFollower(source, clock).read
    find_served_model = None
    if model.parse is not None:
        find_served_model = ServedModel(model.parse, monotonic=clock.monotonic).find
    canary_request = None
    if settings.canary_interval_seconds is not None:
        canary_request = build_canary_request(settings, is_gone)
    return Parts(
        engine=build_page_reader(
            settings,
            settings.engine_url,
            # The timeout does not exceed the interval. A tick must end before the next one is due.
            timeout_seconds=min(settings.engine_timeout_seconds, settings.sample_interval_seconds),
            is_gone=is_gone,
        ),
        gpus=Gpus(monotonic=clock.monotonic, call_timeout_seconds=GPU_TIMEOUT_SECONDS),
        processes=processes.read,
        clock=clock,
        probe=read_probe,
        log=read_log,
        model=find_served_model,
        canary_request=canary_request,
        server_request=build_server_request(settings, is_gone),
        evictor=build_real_evictor(settings, clock),
        mappings=partial(read_mappings, Path("/proc")),
        find_process_name=ProcessNames(
            processes.find_command, ContainerNames(settings.engine_container)
        ).find,
    )


class NodeParts(Struct, frozen=True, kw_only=True):
    """The readers of the machine, which are shared by all engines."""

    gpus: GpuSource
    processes: NodeProcesses | None
    """The search for engines, or None if the operator named the engines by URL."""
    clock: Clock

    def list_resources(self) -> tuple[Closable | None, ...]:
        """Return the resources to close on shutdown."""
        return (self.gpus,)


def build_node_parts(settings: Settings) -> NodeParts:
    """Return the readers of this machine."""
    clock = SystemClock()
    processes = None
    if settings.engines == "node":
        processes = NodeProcesses(
            usual_container=settings.engine_container,
            monotonic=clock.monotonic,
        )
    return NodeParts(
        gpus=Gpus(monotonic=clock.monotonic, call_timeout_seconds=GPU_TIMEOUT_SECONDS),
        processes=processes,
        clock=clock,
    )


def build_real_evictor(settings: Settings, clock: Clock) -> Evictor | None:
    """Return the evictor for this pod.

    Returns None if there is no pod or eviction is not configured.
    """
    if settings.evict == "off":
        return None
    return build_evictor(build_eviction_policy(settings), clock)


def build_eviction_policy(settings: Settings) -> EvictionPolicy:
    """Return the conditions under which a pod is evicted; HEADROOM_EVICT must not be off."""
    return EvictionPolicy(
        is_dry_run=settings.evict == "dry-run",
        near_seconds=settings.evict_seconds,
        quiet_hour=settings.evict_quiet_hour,
    )


def build_page_reader(
    settings: Settings,
    url: str,
    *,
    timeout_seconds: float,
    is_gone: Callable[[], bool] = is_never_gone,
) -> PageReader:
    """Return a reader for one of the engine's pages, with the connection settings."""
    return PageReader(
        url=url,
        timeout_seconds=timeout_seconds,
        max_bytes=settings.engine_max_page_bytes,
        bearer_token_file=settings.engine_bearer_token_file,
        ca_file=settings.engine_ca_file,
        headers={name: value.get_secret_value() for name, value in settings.engine_headers.items()},
        is_gone=is_gone,
    )


def build_sibling_reader(
    settings: Settings, is_gone: Callable[[], bool], path: str, timeout_seconds: float
) -> PageReader:
    """Return a reader for another path of the server that serves the metrics page."""
    url = httpx.URL(settings.engine_url).join(path)
    return build_page_reader(settings, str(url), timeout_seconds=timeout_seconds, is_gone=is_gone)


def build_server_request(settings: Settings, is_gone: Callable[[], bool]) -> ServerRequest:
    """Return the requests that show whether the server is running."""
    build_reader = partial(build_sibling_reader, settings, is_gone)
    return ServerRequest(
        health=build_reader("health", SERVER_PAGE_SECONDS),
        models=build_reader("v1/models", SERVER_PAGE_SECONDS),
        load=build_reader("load", SERVER_PAGE_SECONDS),
    )


def build_canary_request(
    settings: Settings, is_gone: Callable[[], bool] = is_never_gone
) -> CanaryRequest:
    """Return the canary's requests to paths on the engine's server."""
    build_reader = partial(build_sibling_reader, settings, is_gone)
    return CanaryRequest(
        health=build_reader("health", CANARY_HEALTH_SECONDS),
        sleep=build_reader("is_sleeping", CANARY_TOKEN_SECONDS),
        completion=build_reader("v1/completions", CANARY_TOKEN_SECONDS),
    )
