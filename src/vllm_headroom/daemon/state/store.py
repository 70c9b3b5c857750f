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
    DerivationStates,
    Identity,
    SavedState,
    explain_refusal,
    identify_engine,
    is_gpu_list_known,
    restore_memory,
    restore_precedents,
)
from vllm_headroom.derive.life.engine import ENGINE_RUN, EngineMemory
from vllm_headroom.log import Log
from vllm_headroom.model import Snapshot
from vllm_headroom.worker import Worker

log = Log(__name__)

T = TypeVar("T")

STATE_FILE_SECONDS: Final = 2.0
"""The time limit for one file operation, which usually takes milliseconds. If it takes longer, the
volume counts as hung.
"""


class StateKeeper:
    """Reads the state files in a folder, and writes them once this daemon holds `lock`.

    A file is not overwritten while:

    - it cannot be read or set aside
    - its state is still waiting for its engine
    """

    def __init__(self, *, folder: Path, clock: Clock, version: str, lock: FolderLock) -> None:
        self._folder = folder
        self._clock = clock
        self._version = version
        self._lock = lock
        self._owns_folder: bool | None = None
        """Whether this daemon owns the folder, or None until the volume has responded."""
        self._worker = Worker[Any]("state")
        self._unread_names = {RUNS.name, HISTORY.name, STATE.name}
        """Files that must not be overwritten, because they have not been read or set aside."""
        self._waiting_state: SavedState | None = None
        """The leak detector's state from the file, or None if no state is waiting. The state waits
        until it is clear whether it belongs to the running engine.
        """
        self._identity: Identity | None = None
        """The engine on the last page that named one. None before the first page that names an
        engine.
        """
        self._failing_names: set[str] = set()
        """The files whose last operation failed."""

    async def recall(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """Return the saved states that can be restored in this tick, keyed by derivation.

        Each saved state is returned in only one tick. In most ticks, the result is empty. The
        engine's runs and the page's history are restored when their files are read. The leak
        detector and the baseline wait until the engine and GPUs are recognised.
        """
        if not self._owns_folder:
            await self._lock_folder()
        states: dict[str, Any] = {}
        # The files are read even if another daemon holds the lock. The lock prevents only writing.
        if self._owns_folder is not None:
            states |= await self._read_files()
        states |= await self._restore_waiting(snapshot)
        return states

    async def _read_files(self) -> dict[str, Any]:
        """Read each file that has not been read yet.

        Returns the runs and the history if this call has read their files. States from unusable
        files are omitted. The leak detector's state is stored as the waiting state.
        """
        # If a file cannot be read, reading it is retried in the next tick.
        runs = await self._read(RUNS)
        history = await self._read(HISTORY)
        saved = await self._read(STATE)
        if saved is not None:
            self._waiting_state = saved
        states: dict[str, Any] = {}
        if runs is not None:
            states[ENGINE_RUN] = EngineMemory(runs=runs)
        if history is not None:
            states[HISTORY.name] = history
        return states

    async def _restore_waiting(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the states of the detector and baseline if they can be restored now.

        The result is empty if no state is waiting. The result is also empty while the engine or its
        GPUs are still unknown. If the engine or its GPUs differ from the saved ones, the file is
        set aside. In that case, the result contains at most the precedents of an earlier run.
        """
        identity = identify_engine(snapshot.engines)
        if identity is not None:
            self._identity = identity
        saved = self._waiting_state
        if saved is None:
            return {}
        # In case of doubt, the detector starts over. A wrongly restored detector could continue
        # another engine's leak.
        refusal = explain_refusal(saved, snapshot)
        if refusal is not None:
            self._waiting_state = None
            await self._refuse(STATE, refusal)
            precedents = restore_precedents(saved, snapshot)
            return {"leak": precedents} if precedents.gpus or precedents.host else {}
        if identity is None or not is_gpu_list_known(saved, snapshot):
            return {}
        self._waiting_state = None
        memory = restore_memory(saved, snapshot)
        log.info(
            "saved state taken up",
            saved_by=saved.version,
            age_seconds=round(snapshot.time_seconds - saved.saved_at_seconds),
            gpus=",".join(memory.leak.gpus),
        )
        return {"leak": memory.leak, "baseline": memory.baseline}

    async def save(
        self, states: Mapping[str, Any], timeout_seconds: float = STATE_FILE_SECONDS
    ) -> None:
        """Write the states of this engine, each file within `timeout_seconds`.

        Nothing is written while another daemon holds the folder's lock. The leak detector's state
        is written only after a page has named the engine. The detector's state is not written while
        an older state is waiting to be restored. Failures are logged when they begin and when they
        end. Never raises OSError.
        """
        if self._owns_folder:
            # Another daemon may have deleted and recreated the folder.
            await self._lock_folder(timeout_seconds)
        if not self._owns_folder:
            return
        run_state: EngineMemory | None = states.get(ENGINE_RUN)
        # If there was no run, there is nothing to restore.
        if run_state is not None and run_state.runs.newest is not None:
            await self._write(RUNS, run_state.runs, timeout_seconds)
        if HISTORY.name in states:
            await self._write(HISTORY, states[HISTORY.name], timeout_seconds)
        # While an older state is waiting, its file is the only copy.
        if self._waiting_state is not None or self._identity is None:
            return
        saved = SavedState(
            version=self._version,
            saved_at_seconds=self._clock.time(),
            monotonic_seconds=self._clock.monotonic(),
            identity=self._identity,
            memory=DerivationStates(leak=states["leak"], baseline=states["baseline"]),
        )
        await self._write(STATE, saved, timeout_seconds)

    async def _lock_folder(self, timeout_seconds: float = STATE_FILE_SECONDS) -> None:
        """Lock the folder, and log when another daemon takes it or gives it up.

        If the volume does not respond, `_owns_folder` does not change. A folder that cannot be
        opened or locked counts as owned (see FolderLock).
        """
        owned_before = self._owns_folder
        if owned_before is None:
            # A link may be changed later. Only the folder that it points to now is used.
            real_folder = await self._try(".", lambda: Path(os.path.realpath(self._folder)))
            if real_folder is not None:
                self._folder = real_folder
        owns_folder = await self._try(".", partial(self._lock.take, self._folder), timeout_seconds)
        if owns_folder is None:
            return
        self._owns_folder = owns_folder
        if not owns_folder and owned_before is not False:
            log.warning(
                "another daemon keeps its state here: nothing is kept until it ends",
                folder=str(self._folder),
            )
        elif owns_folder and owned_before is False:
            log.info(
                "the other daemon has ended: state is kept from now on", folder=str(self._folder)
            )

    async def _read(self, file: StateFile[T]) -> T | None:
        """Return a file's value on the first call that can read the file.

        An unusable file is set aside. Returns None in two cases:

        - An earlier call has read the file.
        - The file does not exist, cannot be read now, or is unusable.
        """
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
            # If there is no file, there is nothing to set aside.
            if value is None:
                self._report(file.rejected_name, None)
        return value

    async def _write(self, file: StateFile[T], value: T, timeout_seconds: float) -> None:
        """Write a file, unless the old file must first be read or set aside."""
        if file.name not in self._unread_names:
            await self._try(file.name, partial(file.write, self._folder, value), timeout_seconds)

    async def _refuse(self, file: StateFile[T], problem: str) -> None:
        """Set a file aside because of `problem`.

        A file that cannot be set aside counts as unread. An unread file is not overwritten, and a
        later tick reads it and sets it aside.
        """
        if not self._owns_folder:
            self._unread_names.discard(file.name)
            return  # The files belong to another daemon.
        self._unread_names.add(file.name)
        await self._try(file.rejected_name, partial(file.set_aside, self._folder))
        if file.rejected_name not in self._failing_names:
            self._unread_names.discard(file.name)
            event = f"saved state set aside, {file.loss}"
            log.warning(event, problem=problem, file=str(self._folder / file.rejected_name))

    async def _try(
        self, name: str, function: Callable[[], Any], timeout_seconds: float = STATE_FILE_SECONDS
    ) -> Any:  # noqa: ANN401 - what the operation returns
        """Return what an operation on the file `name` returns, or None if it fails.

        Raises any error of `function` other than OSError and ValueError.
        """
        # The shutdown must not cancel the call. A cancelled call would block the thread for the
        # final save.
        value, problem = await asyncio.shield(self._worker.attempt(function, timeout_seconds))
        self._report(name, problem)
        return value

    def _report(self, name: str, problem: str | None) -> None:
        """Record the problem of a file's last operation, or None if the operation succeeded.

        A line is logged when the first file begins to fail. Another line is logged when no file
        fails any more.
        """
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
