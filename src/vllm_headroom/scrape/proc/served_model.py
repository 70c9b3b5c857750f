"""Find the configuration of the model that vLLM serves, in the file system of its server."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from vllm_headroom.model import EngineOptions, Failure, ProcessName, ProcessReadings, TokenBytes
from vllm_headroom.scrape.proc.files import read_content
from vllm_headroom.worker import Worker

_OTHERWISE: Final = frozenset(
    {"config", "hf_config_path", "hf_overrides", "kv_cache_dtype_skip_layers"}
    | {"speculative_config", "speculative_model"}
)
"""Options with which the cache may differ from what the model's own configuration gives."""

_CACHE: Final = ".cache/huggingface/hub"
_HUBS: Final = (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("HOME", _CACHE), ("", f"root/{_CACHE}"))
"""Where Hugging Face's cache may be: below a variable of the environment."""


class ServedModel:
    """Reads the bytes per token of the model of each run once, on a separate thread: its folder may be on a network."""

    def __init__(
        self, parse: Callable[[Path], TokenBytes | None], proc: Path = Path("/proc")
    ) -> None:
        self._parse = parse
        self._proc = proc
        self._worker = Worker[tuple[TokenBytes | None, ...]]("model")
        self._reading: asyncio.Future[tuple[TokenBytes | None, ...]] | None = None
        self._served: tuple[ProcessName, str] | None = None

    def find(self, processes: ProcessReadings | Failure) -> TokenBytes | None:
        """Return what the model's configuration gives, None before it could be read; the next call tries again."""
        if not isinstance(processes, Failure):
            options, served = processes.options, None
            if (
                options is not None
                and options.model is not None
                and _OTHERWISE.isdisjoint(options.option_names)
            ):
                first = processes.engine[0]
                served = ((first.pid, first.started_at_seconds), options.model)
            if served != self._served:
                self._served, self._reading = served, None
            has_failed = (
                self._reading is not None and self._reading.done() and not self._reading.result()
            )
            if served is not None and options is not None and (self._reading is None or has_failed):
                with contextlib.suppress(
                    TimeoutError, OSError
                ):  # an earlier call hangs, or no thread can be started
                    self._reading = self._worker.begin(partial(self._read, served[0][0], options))
        found = self._reading.result() if self._reading is not None and self._reading.done() else ()
        return found[0] if found else None

    async def wait(self, processes: ProcessReadings, timeout_seconds: float) -> TokenBytes | None:
        """Return what the model's configuration gives, read within this time; None where it cannot be."""
        self.find(processes)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=timeout_seconds)
        return self.find(processes)

    def _read(self, pid: int, options: EngineOptions) -> tuple[TokenBytes | None, ...]:
        with contextlib.suppress(OSError, ValueError):
            for path in _list_places(self._proc / str(pid), options.model or ""):
                if path.is_file():
                    return (self._parse(path),)
        return ()


def _list_places(process: Path, name: str) -> Iterator[Path]:
    """Yield where the model's config.json may be, seen through the server's /proc: its folder, or the hub's cache."""
    if name.startswith("/"):
        yield process / "root" / name.lstrip("/") / "config.json"
        return
    yield process / "cwd" / name / "config.json"
    variables = read_content(process / "environ").decode(errors="replace").split("\0")
    environ = dict(entry.split("=", 1) for entry in variables if "=" in entry)
    for variable, below in _HUBS:
        hub = process / "root" / environ.get(variable, "").lstrip("/") / below
        folder = hub / f"models--{name.replace('/', '--')}"
        with contextlib.suppress(OSError):
            revision = read_content(folder / "refs" / "main").decode(errors="replace").strip()
            yield folder / "snapshots" / Path(revision).name / "config.json"
