"""Find the configuration of the model that vLLM serves, in the server's file system."""

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
"""Options that may change the bytes of a token from those in the model's own configuration."""

_RETRY_SECONDS: Final = 15.0
"""The pause after a search that found no configuration. A search reads the server's environment,
which takes the lock of its memory map. A download of a model takes longer.
"""

_HUB_FOLDER: Final = ".cache/huggingface/hub"
_HUB_PLACES: Final = (
    ("HF_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("HOME", _HUB_FOLDER),
    ("", f"root/{_HUB_FOLDER}"),
)
"""The places at which Hugging Face's cache may be: below the folder that a variable of the server's
environment names, or below the root of its file system for "". The first place that has the model
counts.
"""


class ServedRun(Struct, frozen=True, kw_only=True):
    """A run of an engine and the model that it serves."""

    process: ProcessName
    """The engine's first process: its pid, and its start since the epoch."""
    model: str


class ModelConfiguration(Struct, frozen=True, kw_only=True):
    """What a model's configuration that was found and read gives."""

    token_bytes: TokenBytes | None
    """The bytes per token; None if the configuration does not determine them."""


class ServedModel:
    """Reads the configuration of the model that the engine serves, once for each run.

    The class reads on a separate thread, because the model's folder may be on a network volume.
    `parse` returns the bytes per token that a configuration file gives.
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
        """The search for the run's model; None before it begins. The result of the search is None
        if no configuration could be read.
        """
        self._run: ServedRun | None = None
        """The run of the last search; None if its model is unknown."""
        self._began_seconds = 0.0
        """When the last search began, on the monotonic clock."""

    def find(self, processes: ProcessReadings | Failure) -> TokenBytes | None:
        """Return the bytes per token of the engine's model; never wait.

        Returns None until the configuration was read, and also if it does not determine the bytes.
        A search begins for a new run, and _RETRY_SECONDS after one that found no configuration.
        """
        if not isinstance(processes, Failure):
            # After a failed reading of /proc, the last run still counts.
            run = _describe_run(processes)
            if run != self._run:
                self._run = run
                self._reading = None
            if run is not None and (self._reading is None or self._is_retry_due()):
                self._began_seconds = self._monotonic()
                # TimeoutError means that an earlier call hangs. OSError means that no thread can be
                # started.
                with contextlib.suppress(TimeoutError, OSError):
                    self._reading = self._worker.begin(partial(self._read, run))
        if self._reading is None or not self._reading.done():
            return None
        configuration = self._reading.result()
        return None if configuration is None else configuration.token_bytes

    async def wait(self, processes: ProcessReadings, timeout_seconds: float) -> TokenBytes | None:
        """Return the bytes per token of the engine's model; None if unknown within the time."""
        self.find(processes)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=timeout_seconds)
        return self.find(processes)

    def _is_retry_due(self) -> bool:
        """Return whether the last search found no configuration, and its pause is over."""
        if self._reading is None or not self._reading.done() or self._reading.result() is not None:
            return False
        return self._monotonic() - self._began_seconds >= _RETRY_SECONDS

    def _read(self, run: ServedRun) -> ModelConfiguration | None:
        """Read the first configuration that exists; None if there is none or reading fails."""
        pid, _ = run.process
        with contextlib.suppress(OSError, ValueError):
            for path in _list_places(self._proc / str(pid), run.model):
                if path.is_file():
                    return ModelConfiguration(token_bytes=self._parse(path))
        return None


def _describe_run(processes: ProcessReadings) -> ServedRun | None:
    """Return the engine's run and its model.

    Returns None if the command line names no model, or has options whose effect on the cache is
    unknown.
    """
    options = processes.options
    if options is None or options.model is None:
        return None
    if not _CACHE_OPTIONS.isdisjoint(options.option_names):
        return None
    server = processes.engine[0]
    return ServedRun(process=(server.pid, server.started_at_seconds), model=options.model)


def _list_places(process: Path, model: str) -> Iterator[Path]:
    """Yield the paths at which the model's config.json may be, the most likely first.

    `model` is a folder, or a name in Hugging Face's cache. The paths lead through `process`, the
    server's folder in /proc, into the server's file system. Raises OSError if the server's
    environment cannot be read.
    """
    # An absolute path is a folder. Anything else may be a folder or a name on the hub.
    if model.startswith("/"):
        yield process / "root" / model.lstrip("/") / "config.json"
        return
    # As in vLLM, a folder of this name comes before a model on the hub.
    yield process / "cwd" / model / "config.json"
    entries = read_content(process / "environ").decode(errors="replace").split("\0")
    environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    for variable, subfolder in _HUB_PLACES:
        hub = process / "root" / environment.get(variable, "").lstrip("/") / subfolder
        folder = hub / f"models--{model.replace('/', '--')}"
        with contextlib.suppress(OSError):
            revision = read_content(folder / "refs" / "main").decode(errors="replace").strip()
            yield folder / "snapshots" / Path(revision).name / "config.json"
