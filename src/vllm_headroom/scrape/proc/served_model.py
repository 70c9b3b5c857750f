"""Find the configuration of vLLM's model in the server's file system."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.model import Failure, ProcessName, ProcessReadings, TokenBytes
from vllm_headroom.scrape.proc.files import read_content
from vllm_headroom.worker import Worker

_CACHE_OPTIONS: Final = frozenset(
    {
        "config",
        "hf_config_path",
        "hf_overrides",
        "kv_cache_dtype_skip_layers",
        "speculative_config",
        "speculative_model",
    }
)
"""Options that may cause the bytes per token to differ from the model's own configuration."""

_RETRY_SECONDS: Final = 15.0
"""The pause after a search that found no configuration. A search reads the server's environment,
which takes the lock on the server's memory map. Downloading a model takes longer than the pause.
"""

_HUB_FOLDER: Final = ".cache/huggingface/hub"
_HUB_PLACES: Final = (
    ("HF_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("HOME", _HUB_FOLDER),
    ("", f"root/{_HUB_FOLDER}"),
)
"""Where Hugging Face's cache may be. Each entry has a server's environment variable and a path. The
variable names a folder, and the path is below that folder. Without a variable (""), the path is
below the root of the server's file system. The first place that contains the model is used.
"""


class ServedRun(Struct, frozen=True, kw_only=True):
    """A run of an engine and the model that it serves."""

    process: ProcessName
    """The engine's first process: its pid, and its start time in seconds since the epoch."""
    model: str


class ModelConfiguration(Struct, frozen=True, kw_only=True):
    """The facts from a model configuration that was found and read."""

    token_bytes: TokenBytes | None
    """The bytes per token, or None if the configuration does not determine them."""


class ServedModel:
    """Reads the configuration of the model that the engine serves, once per run.

    The file is read on a separate thread. The model's folder may be on a network volume. `parse`
    returns the bytes per token according to a configuration file.
    """

    def __init__(
        self,
        parse: Callable[[Path], TokenBytes | None],
        proc: Path = Path("/proc"),
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._parse = parse
        self._proc = proc
        self._monotonic = monotonic
        self._worker = Worker[ModelConfiguration | None]("model")
        self._reading: asyncio.Future[ModelConfiguration | None] | None = None
        """The search for the run's model, or None before it begins. The result of the search is
        None if no configuration could be read.
        """
        self._run: ServedRun | None = None
        """The run of the last search, or None if its model is unknown."""
        self._began_seconds = 0.0
        """When the last search began, on the monotonic clock."""

    def find(self, processes: ProcessReadings | Failure) -> TokenBytes | None:
        """Return the bytes per token of the engine's model; never wait.

        A search begins for each new run. If a search finds no configuration, the next one begins
        _RETRY_SECONDS later. Returns None until the configuration has been read. Also returns None
        if the configuration does not determine the bytes.
        """
        if not isinstance(processes, Failure):
            # If reading /proc failed, the last run remains valid.
            run = _describe_run(processes)
            if run != self._run:
                self._run = run
                self._reading = None
            if run is not None and (self._reading is None or self._is_retry_due()):
                self._began_seconds = self._monotonic()
                # TimeoutError means that an earlier call is hanging. OSError means that no thread
                # can be started.
                with contextlib.suppress(TimeoutError, OSError):
                    self._reading = self._worker.begin(partial(self._read, run))
        if self._reading is None or not self._reading.done():
            return None
        configuration = self._reading.result()
        return None if configuration is None else configuration.token_bytes

    async def wait(self, processes: ProcessReadings, timeout_seconds: float) -> TokenBytes | None:
        """Return the bytes per token of the engine's model.

        Returns None if they are not found in time.
        """
        self.find(processes)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=timeout_seconds)
        return self.find(processes)

    def _is_retry_due(self) -> bool:
        """Return whether the last search found nothing and began at least _RETRY_SECONDS ago."""
        if self._reading is None or not self._reading.done() or self._reading.result() is not None:
            return False
        return self._monotonic() - self._began_seconds >= _RETRY_SECONDS

    def _read(self, run: ServedRun) -> ModelConfiguration | None:
        """Return the first configuration that exists, or None if there is none or reading fails."""
        pid, _ = run.process
        with contextlib.suppress(OSError, ValueError):
            for path in _list_places(self._proc / str(pid), run.model):
                if path.is_file():
                    return ModelConfiguration(token_bytes=self._parse(path))
        return None


def _describe_run(processes: ProcessReadings) -> ServedRun | None:
    """Return the engine's run and its model.

    Returns None if the command line does not name a model. Also returns None if an option's effect
    on the cache is unknown.
    """
    options = processes.options
    if options is None or options.model is None:
        return None
    if not _CACHE_OPTIONS.isdisjoint(options.option_names):
        return None
    server = processes.engine[0]
    return ServedRun(process=(server.pid, server.started_at_seconds), model=options.model)


def _list_places(process: Path, model: str) -> Iterator[Path]:
    """Yield the paths where the model's config.json may be, most likely first.

    `model` is a folder, or a name in Hugging Face's cache. The paths lead into the server's file
    system through `process`, the server's folder in /proc. Raises OSError if the server's
    environment cannot be read.
    """
    # An absolute path is a folder. Anything else may be either a folder or a name on the hub.
    if model.startswith("/"):
        yield process / "root" / model.lstrip("/") / "config.json"
        return
    # As in vLLM, this folder takes precedence over a model on the hub.
    yield process / "cwd" / model / "config.json"
    entries = read_content(process / "environ").decode(errors="replace").split("\0")
    environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    for variable, subfolder in _HUB_PLACES:
        hub = process / "root" / environment.get(variable, "").lstrip("/") / subfolder
        folder = hub / f"models--{model.replace('/', '--')}"
        with contextlib.suppress(OSError):
            revision = read_content(folder / "refs" / "main").decode(errors="replace").strip()
            yield folder / "snapshots" / Path(revision).name / "config.json"
