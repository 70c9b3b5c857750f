"""Decide when to read, restore, refuse and write the state."""

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.state.file import (
    HISTORY,
    RUNS,
    STATE,
    FolderLock,
    Identity,
    Memory,
    SavedState,
    StateFile,
    UnusableState,
    explain_refusal,
    identify_engine,
    is_gpu_list_known,
    restore_memory,
)
from vllm_headroom.derive.life.runs import ENGINE_RUN, RunState
from vllm_headroom.log import Log
from vllm_headroom.model import Snapshot
from vllm_headroom.worker import Worker

T = TypeVar("T")
log = Log(__name__)

FILE_SECONDS: Final = 2.0
"""A file operation takes milliseconds; beyond this the volume counts as hung."""


class StateKeeper:
    """Owns the files of state in `folder` once `lock` is this daemon's; until then they are only read.

    The runs of the engine are restored at once. A file that cannot be read or set aside, or that waits for its engine,
    is not overwritten.
    """

    def __init__(self, *, folder: Path, clock: Clock, version: str, lock: FolderLock) -> None:
        self._folder, self._clock, self._version, self._lock = folder, clock, version, lock
        self._owned: bool | None = None
        self._worker = Worker[Any]("state")
        self._unread = {RUNS.name, HISTORY.name, STATE.name}
        self._saved: SavedState | None = None
        self._identity: Identity | None = None
        self._failing: set[str] = set()

    async def recall(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """Return the saved states by derivation, once, when the snapshot shows that they are this engine's."""
        if not self._owned:
            await self._lock_state()
        runs: dict[str, Any] = {}
        if self._owned is not None:  # a file that cannot be read is tried again at the next tick
            saved_runs, history = await self._read(RUNS), await self._read(HISTORY)
            self._saved = await self._read(STATE) or self._saved
            found = {
                ENGINE_RUN: None if saved_runs is None else RunState(runs=saved_runs),
                HISTORY.name: history,
            }
            runs = {name: state for name, state in found.items() if state is not None}
        self._identity = identify_engine(snapshot.engines) or self._identity
        saved = self._saved
        if saved is None:
            return runs
        if reason := explain_refusal(saved, snapshot):
            self._saved = None
            await self._refuse(STATE, reason)
        elif identify_engine(snapshot.engines) is not None and is_gpu_list_known(saved, snapshot):
            self._saved = None
            memory = restore_memory(saved, snapshot)
            log.info(
                "saved state taken up",
                saved_by=saved.version,
                age_seconds=round(snapshot.time_seconds - saved.saved_at_seconds),
                gpus=",".join(memory.leak.gpus),
            )
            return {**runs, "leak": memory.leak, "baseline": memory.baseline}
        return runs

    async def save(self, states: Mapping[str, Any], timeout_seconds: float = FILE_SECONDS) -> None:
        """Write the states of this engine; a failure is logged when it begins and when it ends."""
        if self._owned:
            await self._lock_state(
                timeout_seconds
            )  # another daemon may have created the deleted folder again
        if not self._owned:
            return
        run = states.get(ENGINE_RUN)
        if RUNS.name not in self._unread and run is not None and run.runs.newest is not None:
            await self._try(RUNS.name, partial(RUNS.write, self._folder, run.runs), timeout_seconds)
        if HISTORY.name not in self._unread and HISTORY.name in states:
            await self._try(
                HISTORY.name,
                partial(HISTORY.write, self._folder, states[HISTORY.name]),
                timeout_seconds,
            )
        if STATE.name in self._unread or self._saved is not None or self._identity is None:
            return
        saved = SavedState(
            version=self._version,
            saved_at_seconds=self._clock.time(),
            monotonic_seconds=self._clock.monotonic(),
            identity=self._identity,
            memory=Memory(leak=states["leak"], baseline=states["baseline"]),
        )
        await self._try(STATE.name, partial(STATE.write, self._folder, saved), timeout_seconds)

    async def _lock_state(self, timeout_seconds: float = FILE_SECONDS) -> None:
        """Lock the folder, where it is a link the one it leads to at first, and log when another daemon has it."""
        before = self._owned
        if before is None:
            self._folder = (
                await self._try(".", lambda: Path(os.path.realpath(self._folder))) or self._folder
            )
        owned = await self._try(".", partial(self._lock.take, self._folder), timeout_seconds)
        self._owned = before if owned is None else owned
        if self._owned is False and before is not False:
            log.warning(
                "another daemon keeps its state here: nothing is kept until it ends",
                folder=str(self._folder),
            )
        elif self._owned and before is False:
            log.info(
                "the other daemon has ended: state is kept from now on", folder=str(self._folder)
            )

    async def _read(self, file: StateFile[T]) -> T | None:
        """Return the content of a file that was not read before, None without a usable one."""
        if file.name not in self._unread:
            return None
        try:
            saved: T | None = await self._try(file.name, partial(file.read, self._folder))
        except UnusableState as error:
            self._report(file.name, None)
            await self._refuse(file, str(error))
            return None
        if file.name not in self._failing:
            self._unread.discard(file.name)
            if saved is None:
                self._report(file.rejected_name, None)
        return saved

    async def _refuse(self, file: StateFile[T], reason: str) -> None:
        """Set a file aside; where that fails it is tried again, and not overwritten."""
        self._unread.discard(file.name)
        if not self._owned:
            return  # the files are the other daemon's
        self._unread.add(file.name)
        await self._try(file.rejected_name, partial(file.set_aside, self._folder))
        if file.rejected_name not in self._failing:
            self._unread.discard(file.name)
            event = f"saved state set aside, {file.lost}"
            log.warning(event, problem=reason, file=str(self._folder / file.rejected_name))

    async def _try(
        self, name: str, function: Callable[[], Any], timeout_seconds: float = FILE_SECONDS
    ) -> Any:  # noqa: ANN401 - what the operation returns
        """Return what an operation on the file of this name returns, None when it fails."""
        # shielded: a call cancelled by the shutdown would block the last one
        value, problem = await asyncio.shield(self._worker.attempt(function, timeout_seconds))
        self._report(name, problem)
        return value

    def _report(self, name: str, problem: str | None) -> None:
        failed = bool(self._failing)
        self._failing = self._failing - {name} if problem is None else self._failing | {name}
        if problem is not None and not failed:
            log.warning(
                "state is not kept: a restart would forget it; HEADROOM_STATE_DIR must be writable and have space",
                problem=problem,
                file=str(self._folder / name),
            )
        elif failed and not self._failing:
            log.info("state is kept again", file=str(self._folder / name))
