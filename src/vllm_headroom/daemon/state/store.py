"""Decide when to read, restore, refuse and write the state."""

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.state.file import HISTORY, RUNS, STATE, StateFile, UnusableState
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.daemon.state.saved import (
    Identity,
    Memory,
    SavedState,
    explain_refusal,
    identify_engine,
    is_gpu_list_known,
    restore_memory,
)
from vllm_headroom.derive.life.engine import ENGINE_RUN, EngineMemory
from vllm_headroom.log import Log
from vllm_headroom.model import Snapshot
from vllm_headroom.worker import Worker

log = Log(__name__)

T = TypeVar("T")

STATE_FILE_SECONDS: Final = 2.0
"""A file operation takes milliseconds; beyond this the volume counts as hung."""


class StateKeeper:
    """Reads the files of state in a folder, and writes them once `lock` is this daemon's.

    The runs of the engine are restored at once. A file that cannot be read or set aside, or that
    waits for its engine, is not overwritten.
    """

    def __init__(self, *, folder: Path, clock: Clock, version: str, lock: FolderLock) -> None:
        self._folder = folder
        self._clock = clock
        self._version = version
        self._lock = lock
        self._is_locked: bool | None = None
        """Whether the folder is this daemon's; None until that could be found out."""
        self._worker = Worker[Any]("state")
        self._unread_names = {RUNS.name, HISTORY.name, STATE.name}
        """Files that are not read yet, or not set aside yet."""
        self._saved: SavedState | None = None
        """The state that was read and waits until its engine is recognised."""
        self._identity: Identity | None = None
        """The engine as it was last seen."""
        self._failing_names: set[str] = set()
        """Files whose last operation failed."""

    async def recall(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """Return the saved states by derivation, once, when they are found to be this engine's."""
        if not self._is_locked:
            await self._lock_folder()
        states: dict[str, Any] = {}
        if self._is_locked is not None:
            # A file that cannot be read is tried again at the next tick.
            runs = await self._read(RUNS)
            history = await self._read(HISTORY)
            saved_state = await self._read(STATE)
            if runs is not None:
                states[ENGINE_RUN] = EngineMemory(runs=runs)
            if history is not None:
                states[HISTORY.name] = history
            if saved_state is not None:
                self._saved = saved_state

        identity = identify_engine(snapshot.engines)
        if identity is not None:
            self._identity = identity
        saved = self._saved
        if saved is None:
            return states
        refusal = explain_refusal(saved, snapshot)
        if refusal is not None:
            self._saved = None
            await self._refuse(STATE, refusal)
        elif identity is not None and is_gpu_list_known(saved, snapshot):
            self._saved = None
            memory = restore_memory(saved, snapshot)
            log.info(
                "saved state taken up",
                saved_by=saved.version,
                age_seconds=round(snapshot.time_seconds - saved.saved_at_seconds),
                gpus=",".join(memory.leak.gpus),
            )
            states["leak"] = memory.leak
            states["baseline"] = memory.baseline
        return states

    async def save(
        self, states: Mapping[str, Any], timeout_seconds: float = STATE_FILE_SECONDS
    ) -> None:
        """Write the states of this engine; a failure is logged when it begins and when it ends."""
        if self._is_locked:
            # Another daemon may have created the deleted folder again.
            await self._lock_folder(timeout_seconds)
        if not self._is_locked:
            return
        run_state: EngineMemory | None = states.get(ENGINE_RUN)
        if run_state is not None and run_state.runs.newest is not None:
            await self._write(RUNS, run_state.runs, timeout_seconds)
        if HISTORY.name in states:
            await self._write(HISTORY, states[HISTORY.name], timeout_seconds)
        if self._saved is not None or self._identity is None:
            return
        saved = SavedState(
            version=self._version,
            saved_at_seconds=self._clock.time(),
            monotonic_seconds=self._clock.monotonic(),
            identity=self._identity,
            memory=Memory(leak=states["leak"], baseline=states["baseline"]),
        )
        await self._write(STATE, saved, timeout_seconds)

    async def _lock_folder(self, timeout_seconds: float = STATE_FILE_SECONDS) -> None:
        """Lock the folder, and log when another daemon has it."""
        was_locked = self._is_locked
        if was_locked is None:
            # Where the folder is a link, only the folder that it leads to at first is used.
            real_folder = await self._try(".", lambda: Path(os.path.realpath(self._folder)))
            if real_folder is not None:
                self._folder = real_folder
        is_locked = await self._try(".", partial(self._lock.take, self._folder), timeout_seconds)
        if is_locked is None:
            return
        self._is_locked = is_locked
        if not is_locked and was_locked is not False:
            log.warning(
                "another daemon keeps its state here: nothing is kept until it ends",
                folder=str(self._folder),
            )
        elif is_locked and was_locked is False:
            log.info(
                "the other daemon has ended: state is kept from now on", folder=str(self._folder)
            )

    async def _read(self, file: StateFile[T]) -> T | None:
        """Return the content of a file that was not read before, None without a usable one."""
        if file.name not in self._unread_names:
            return None
        try:
            value: T | None = await self._try(file.name, partial(file.read, self._folder))
        except UnusableState as error:
            self._report(file.name, None)
            await self._refuse(file, str(error))
            return None
        if file.name not in self._failing_names:
            self._unread_names.discard(file.name)
            if value is None:
                self._report(file.rejected_name, None)
        return value

    async def _write(self, file: StateFile[T], value: T, timeout_seconds: float) -> None:
        if file.name not in self._unread_names:
            await self._try(file.name, partial(file.write, self._folder, value), timeout_seconds)

    async def _refuse(self, file: StateFile[T], problem: str) -> None:
        """Set a file aside; where that fails it is tried again, and not overwritten."""
        if not self._is_locked:
            self._unread_names.discard(file.name)
            return  # the files are the other daemon's
        self._unread_names.add(file.name)
        await self._try(file.rejected_name, partial(file.set_aside, self._folder))
        if file.rejected_name not in self._failing_names:
            self._unread_names.discard(file.name)
            event = f"saved state set aside, {file.loss}"
            log.warning(event, problem=problem, file=str(self._folder / file.rejected_name))

    async def _try(
        self, name: str, function: Callable[[], Any], timeout_seconds: float = STATE_FILE_SECONDS
    ) -> Any:  # noqa: ANN401 - what the operation returns
        """Return what an operation on the file of this name returns, None when it fails."""
        # Shielded: a call cancelled by the shutdown would block the last one.
        value, problem = await asyncio.shield(self._worker.attempt(function, timeout_seconds))
        self._report(name, problem)
        return value

    def _report(self, name: str, problem: str | None) -> None:
        """Note how an operation ended, None for well, and log where that changes anything."""
        was_failing = bool(self._failing_names)
        if problem is None:
            self._failing_names.discard(name)
        else:
            self._failing_names.add(name)
        if problem is not None and not was_failing:
            log.warning(
                "state is not kept: a restart would forget it; HEADROOM_STATE_DIR must be writable"
                " and have space",
                problem=problem,
                file=str(self._folder / name),
            )
        elif was_failing and not self._failing_names:
            log.info("state is kept again", file=str(self._folder / name))
