"""Whatever raises inside of a reader costs its own source, for every function that a tick calls."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import pytest

import vllm_headroom
from tests.engine_logs import DEATH, VLLM_0_19
from tests.fakes.amd_tree import AmdTree
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.nvml.library import FakeGpu
from tests.fakes.nvml.reader import in_process
from tests.fakes.proc_tree import ProcTree
from tests.samples import values
from vllm_headroom import catalog
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.engine_log import EngineLogFollower
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources, close_all
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.model import Failure, LogReading, TokenBytes
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.scrape.log.files import LogFiles
from vllm_headroom.scrape.probe import ProbeReader
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.scrape.proc.served_model import ServedModel
from vllm_headroom.vocabulary import Source
from vllm_headroom_tools.sizing.model_config import parse_model_config

SRC: Final = Path(vllm_headroom.__file__).parent.parent
READERS: Final = tuple(
    str(SRC / name) for name in ("vllm_headroom/scrape", "vllm_headroom/parse", "vllm_headroom_tools/sizing")
)
ERRORS: Final = (
    RecursionError("deep"),
    MemoryError(),
    struct.error("ushort"),
    IndexError("range"),
    KeyError("name"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "start"),
    OverflowError("large"),
    ValueError("text"),
    TypeError("None"),
    AttributeError("name"),
    OSError(5, "Input/output error"),
    RuntimeError("state"),
    ZeroDivisionError("zero"),
)
SOURCES_BY_PLACE: Final = {
    "scrape/log": {Source.LOG},
    "parse/log": {Source.LOG},
    "scrape/http": {Source.ENGINE},
    "scrape/probe": {Source.PROBE},
    "parse/probe": {Source.PROBE},
    "parse/fields": {Source.PROBE},
    "parse": {Source.ENGINE},
    "scrape/proc/files": {Source.PROCESS, Source.NVML},
    "scrape/proc": {Source.PROCESS},
    "scrape": {Source.NVML},
    "sizing": set[Source](),
}
"""Which sources may fail where a function of a place raises: the first place that fits counts."""
PAGE: Final = 'vllm:num_requests_running{model_name="m",engine="0"} 1\nprocess_start_time_seconds 1700000050\n'
PORT: Final = 8000

raised: list[Exception] = []
"""The error that a function raises that is broken."""


def read_token_bytes(file: Path) -> TokenBytes | None:
    parse_model_config(file.read_text())
    return None


class Machine:
    """The outside of a daemon: a page, a log, GPUs of two vendors, processes, files of the probe and of the model."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.proc, self.sys, self.probe = folder / "proc", folder / "sys", folder / "probe"
        for path in (self.proc, self.sys, self.probe, folder / "model"):
            path.mkdir()
        tree = ProcTree(self.proc)
        tree.add(20, 1, "vllm", "serve", str(folder / "model"), "--port", str(PORT))
        tree.add(21, 20, "VLLM::EngineCore")
        (self.proc / "20" / "root").symlink_to("/")
        (self.proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 5 kB\n")
        amd = AmdTree(self.sys)
        amd.add("0000:05:00.0", card=1)
        amd.add_node("0000:05:00.0", 100)
        config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 1024}
        (folder / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))
        document = {"headroom_probe": 1, "t": time.time(), "pid": 20, "started_at": 1.7e9 + 50, "boot_id": "boot"}
        document["interval_seconds"] = 3600
        device = {"uuid": "GPU-0", "allocated": 3, "reserved": 4}
        content = {**document, "role": "worker", "devices": [device], "parts": {"weights": 1}}
        (self.probe / "20-1700000050.json").write_text(json.dumps(content))
        (folder / "boot_id").write_text("boot\n")
        self.boot = folder / "boot_id"
        self.log = folder / "engine.log"

    @asynccontextmanager
    async def open_sampler(self) -> AsyncIterator[Sampler]:
        """Yield a sampler over new readers, which are closed afterwards."""
        clock = SystemClock()
        self.log.write_text("")
        follower = EngineLogFollower(LogFiles(str(self.log)), clock)

        async def read_log(timeout_seconds: float) -> LogReading | Failure:
            """Read what the engine has written since the last tick: each has a start and its end."""
            with self.log.open("a") as file:
                file.write(VLLM_0_19 + DEATH)
            return await follower.read(timeout_seconds)

        processes = Processes(engine_port=PORT, engine_is_here=True, monotonic=clock.monotonic, proc=self.proc)
        sources = Sources(
            engine=PageReader(url=self.url, timeout_seconds=30),
            gpus=Gpus(monotonic=clock.monotonic, proc=self.proc, sys=self.sys),
            processes=processes.read,
            probe=ProbeReader(self.probe, parse=parse_probe, boot=self.boot).read,
            log=read_log,
            model=ServedModel(read_token_bytes, self.proc, monotonic=clock.monotonic).find,
        )
        sampler = Sampler(
            sources=sources,
            parse=parse_engines,
            rules=TickRules(selection=Selection(everything=True), derivations=build_derivations()),
            clock=clock,
            gpu_timeout_seconds=10.0,
        )
        try:
            yield sampler
        finally:
            await close_all(sources.engine, sources.gpus)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    gpus = [FakeGpu(uuid="GPU-0", used_bytes=2**30, processes={20: 2**30})]
    folder = tmp_path / "outside"
    folder.mkdir()
    with EngineServer(page(PAGE)) as server, in_process(tmp_path, monkeypatch, gpus):
        yield Machine(folder, server.url)


def list_called(run: Callable[[], None]) -> list[FunctionType]:
    """Return the functions of the readers that are called during `run`, on any thread."""
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(READERS):
            codes[frame.f_code] = None

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [function for function in list_functions() if function.__code__ in codes]


def list_functions() -> Iterator[FunctionType]:
    """Yield the functions and methods of the readers' modules, with what is behind a cache or a property."""
    for name, module in tuple(sys.modules.items()):
        if not str(getattr(module, "__file__", "")).startswith(READERS):
            continue
        members = [member for member in vars(module).values() if getattr(member, "__module__", "") == name]
        classes = [member for member in members if isinstance(member, type)]
        for owner in classes:
            members += vars(owner).values()
        for member in members:
            function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, FunctionType):
                yield function


def raise_error(*_: Any, **__: Any) -> Any:
    from tests.unit.daemon.test_borders import raised as errors  # noqa: PLC0415 - it runs with other globals

    raise errors[-1]


@contextmanager
def broken(function: FunctionType) -> Iterator[None]:
    """Make a function raise, wherever it is referred to."""
    code = function.__code__
    function.__code__ = raise_error.__code__.replace(co_freevars=code.co_freevars)
    try:
        yield
    finally:
        function.__code__ = code


def end_workers() -> None:
    """Wait for the readers' threads and collect what they left, such as a socket whose closing raised."""
    for error in ERRORS:  # their tracebacks keep readers
        error.__traceback__ = None
        error.__context__ = None
    gc.collect()
    for thread in threading.enumerate():
        if thread.name in {"engine", "processes", "probe", "model", "nvml", "amd", "parse", "log files", "engine log"}:
            thread.join(1)
    gc.collect()


def find_sources(function: FunctionType) -> set[Source]:
    file = function.__code__.co_filename
    return next(sources for place, sources in SOURCES_BY_PLACE.items() if f"/{place}" in file)


@pytest.mark.filterwarnings("ignore:Assigning a code object:DeprecationWarning")  # from Python 3.13 on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where what closes a socket raises
@pytest.mark.parametrize("errors_each", [1, pytest.param(len(ERRORS), marks=pytest.mark.fuzz)])
def test_whatever_a_reader_raises_costs_its_own_source(
    errors_each: int, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Each function raises one kind of error, in turn; in `make fuzz`, all kinds."""

    for logger in ("vllm_headroom", "asyncio"):
        caplog.set_level(logging.CRITICAL, logger)  # a record keeps its error

    async def tick_twice() -> None:
        async with machine.open_sampler() as sampler:
            await sampler.tick()
            await sampler.tick()

    async def tick_with(function: FunctionType, errors: Sequence[Exception]) -> None:
        async with machine.open_sampler() as sampler:
            await sampler.tick()
            for error in errors:
                raised[:] = [error]
                with broken(function):
                    result = await sampler.tick()
                up = values(result.published.samples, catalog.SOURCE_UP)
                failed = {Source(source) for (source,), value in up.items() if not value}
                assert failed <= find_sources(function), (function, error)

    functions = list_called(lambda: asyncio.run(tick_twice()))
    files = {function.__code__.co_filename for function in functions}
    assert all(any(f"/{place}" in file for file in files) for place in SOURCES_BY_PLACE), "all readers are called"
    for number, function in enumerate(functions):
        errors = [ERRORS[(number + offset) % len(ERRORS)] for offset in range(errors_each)]
        asyncio.run(tick_with(function, errors))
    end_workers()
