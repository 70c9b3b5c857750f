"""One reading of the engine's metrics page, GPUs and processes."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct

from vllm_headroom.config import Settings
from vllm_headroom.daemon.node_daemon import locate_urls
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS
from vllm_headroom.daemon.sources import close_all
from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.model import EnginePage, Failure, Gpu, GpuReadings, ProcessReadings
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.http.reader import PageReader, find_port, is_here
from vllm_headroom.scrape.pods import CONTAINER_LOGS, POD_LOGS
from vllm_headroom.scrape.proc.node import LocatedEngine, NodeProcesses
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom_tools.bad_input import BadInput

PROC: Final = Path("/proc")
SYS: Final = Path("/sys")
LOOK_SECONDS: Final = 6.0
"""The time limit for reading the GPUs and the page. Both are read concurrently.

The processes are read afterwards. The GPUs, the page and the processes must all be read within ten
seconds.
"""

PROC_SECONDS: Final = 3.0
"""The time limit for reading the processes, which are read after the page."""


class Machine(Struct, frozen=True, kw_only=True):
    """A single reading of this machine's GPUs and processes."""

    readings: GpuReadings | Failure
    processes: ProcessReadings | Failure

    gpus: tuple[Gpu, ...]
    """The GPUs, or an empty tuple if none could be read."""


FIND_ENGINES_SECONDS: Final = 5.0
"""The time limit for finding all engines on this machine."""


async def locate_engines(
    settings: Settings,
    proc: Path = PROC,
    container_logs: Path = CONTAINER_LOGS,
    pod_logs: Path = POD_LOGS,
) -> tuple[LocatedEngine, ...]:
    """Return the engines of HEADROOM_ENGINES, located as in the daemon.

    Raises BadInput if /proc cannot be read.
    """
    if settings.engines != "node":
        return locate_urls(settings)
    processes = NodeProcesses(
        proc=proc,
        container_logs=container_logs,
        pod_logs=pod_logs,
        usual_container=settings.engine_container,
        monotonic=time.monotonic,
    )
    try:
        # The scan finds pods and systemd units; the search then finds the servers in them.
        await processes.scan(FIND_ENGINES_SECONDS)
        return await processes.find_engines(FIND_ENGINES_SECONDS)
    except TimeoutError:
        raise BadInput(f"{proc} does not answer within {FIND_ENGINES_SECONDS:g} s") from None
    except OSError as error:
        raise BadInput(f"{proc} cannot be read: {error.strerror or error}") from error


async def fetch_once(reader: PageReader) -> str | Failure:
    """Return the text of a page, or a Failure, and close the reader."""
    try:
        return await reader.fetch()
    finally:
        await close_all(reader)


async def fetch_engines(reader: PageReader, profile: str | None = None) -> EnginePage | Failure:
    """Return the engines on a page, or a Failure, and close the reader.

    If `profile` is None, the page itself shows the kind of engine.
    """
    text = await fetch_once(reader)
    return text if isinstance(text, Failure) else parse_engines(text, profile)


async def survey_machine(
    settings: Settings, page: Awaitable[EnginePage | Failure], proc: Path = PROC, sys: Path = SYS
) -> Machine:
    """Read the GPUs and processes once, and attribute the GPUs to the engine.

    A part that cannot be read is replaced by a Failure in the result. The processes are read after
    `page`, which determines the engine to watch.
    """
    gpu_reader = Gpus(
        monotonic=time.monotonic, call_timeout_seconds=GPU_TIMEOUT_SECONDS, proc=proc, sys=sys
    )
    url = httpx.URL(settings.engine_url)
    process_reader = Processes(
        engine_port=find_port(url),
        engine_is_here=is_here(url.host),
        proc=proc,
        monotonic=time.monotonic,
    )

    async def read_processes() -> ProcessReadings | Failure:
        """Return the engine's processes, or a Failure."""
        return await process_reader.read(PROC_SECONDS, await page)

    try:
        readings, processes = await asyncio.gather(gpu_reader.read(LOOK_SECONDS), read_processes())
    # NVML's thread must not outlive the command.
    finally:
        await gpu_reader.close()
    gpus: tuple[Gpu, ...] = ()
    # There is no earlier reading, so the attribution starts with an empty state.
    if not isinstance(readings, Failure):
        selection = Selection.of(settings.gpus)
        _, gpus = attribute(AttributionState(), readings, processes, selection)
    return Machine(readings=readings, processes=processes, gpus=gpus)
