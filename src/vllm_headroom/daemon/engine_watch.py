"""All that watches one engine: a daemon may hold several, which share nothing."""

from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Final

from vllm_headroom.clock import Clock
from vllm_headroom.daemon import loop
from vllm_headroom.daemon.canary import Canary
from vllm_headroom.daemon.flight import Flight
from vllm_headroom.daemon.logs import RecentLines
from vllm_headroom.daemon.sampler import Sampler
from vllm_headroom.daemon.server_pages import ServerPages
from vllm_headroom.daemon.sources import GpuSource
from vllm_headroom.daemon.state.file import HISTORY
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.daemon.state.store import StateKeeper
from vllm_headroom.derive.pages import count_running, find_highest_kv_use
from vllm_headroom.derive.tick import TickResult
from vllm_headroom.expose.view import History, LastIncident
from vllm_headroom.model import Published, Snapshot
from vllm_headroom.trace.recorder import Recorder

SAVE_SECONDS: Final = 60.0
"""The pause between two savings of the state."""

LAST_SAVE_SECONDS: Final = 0.5
"""How long the saving at the shutdown may take. Scrapes in progress get as long, in parallel."""


class EngineWatch:
    """Samples one engine, and owns what is remembered, saved and recorded of it."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        history: History,
        keeper: StateKeeper | None,
        flight: Flight | None,
        recorder: Recorder | None,
        canary: Canary | None,
        server_pages: ServerPages | None,
        gpus: GpuSource,
        clock: Clock,
        lock: FolderLock | None = None,
        recent_lines: RecentLines | None = None,
    ) -> None:
        """`lock` is that of the folder with the state and the flight record."""
        self.history = history
        """The curves of the last day, which the page draws."""
        self._sampler = sampler
        self._keeper = keeper
        self._flight = flight
        self._recorder = recorder
        self._canary = canary
        self._server_pages = server_pages
        self._gpus = gpus
        self._clock = clock
        self._lock = lock
        self._recent_lines = recent_lines
        # What follows the sampling: an error in one of them must not keep the others from running.
        self._history_guard = loop.StepGuard()
        self._recorder_guard = loop.StepGuard()
        self._flight_guard = loop.StepGuard()

    def close(self) -> None:
        """Give up the folder, so that it can be watched again; no sample may follow."""
        if self._lock is not None:
            self._lock.release()
        if self._recent_lines is not None:
            self._recent_lines.close()

    @property
    def latest(self) -> TickResult | None:
        """The newest tick's result, None before the first."""
        return self._sampler.latest

    @property
    def published(self) -> Published | None:
        """The newest tick's samples, None before the first."""
        return self._sampler.published

    @property
    def last_incident(self) -> LastIncident | None:
        """The newest incident on disk; None without one, or where no folder is configured."""
        return None if self._flight is None else self._flight.last

    async def sample(self) -> TickResult:
        """Take one sample and add it to the history."""
        result = await self._sampler.tick()
        await self._history_guard.run(partial(self._add_to_history, result))
        return result

    async def _add_to_history(self, result: TickResult) -> None:
        snapshot = result.snapshot
        page = snapshot.page
        self.history.step(snapshot, result.verdicts, count_running(page), find_highest_kv_use(page))

    async def record(self, result: TickResult) -> None:
        """Write a tick to the trace and to the flight record, where they are configured."""
        if self._recorder is not None:
            await self._recorder_guard.run(partial(self._recorder.record, result.snapshot))
        if self._flight is not None:
            step = partial(self._flight.step, result.snapshot, result.verdicts, result.values)
            await self._flight_guard.run(step)

    async def sample_gpu_memory(self, timeout_seconds: float) -> None:
        """Read the used memory of the GPUs alone, for their peaks and the flight record."""
        used_bytes = await self._gpus.sample_used(timeout_seconds)
        if self._flight is not None:
            self._flight.recent.add(self._clock.time(), used_bytes)

    def list_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops that run beside the sampling until shutdown."""
        loops: list[Coroutine[Any, Any, None]] = []
        if self._keeper is not None:
            loops.append(self._save_states(self._keeper))
        if self._canary is not None:
            loops.append(self._canary.run(self._read_snapshot))
        if self._server_pages is not None:
            loops.append(self._server_pages.run(self._read_snapshot))
        return loops

    def _read_snapshot(self) -> Snapshot | None:
        """Return the newest sample's snapshot; None before the first sample."""
        return None if self.latest is None else self.latest.snapshot

    async def _save_states(self, keeper: StateKeeper) -> None:
        """Save the states at every interval until the shutdown, and once more then."""

        def collect_states() -> Mapping[str, Any]:
            return {**self._sampler.states, HISTORY.name: self.history.save()}

        try:
            await loop.run_every(SAVE_SECONDS, lambda: keeper.save(collect_states()), self._clock)
        finally:
            # The shutdown cancels this task: what came since the last saving is written here.
            await loop.StepGuard().run(lambda: keeper.save(collect_states(), LAST_SAVE_SECONDS))


async def recall_states(
    keeper: StateKeeper, history: History, snapshot: Snapshot
) -> Mapping[str, Any]:
    """Return the states to continue from, by derivation; restore the page's history.

    Both are those that an earlier daemon saved. Empty at most ticks: each state is returned once.
    """
    states = dict(await keeper.recall(snapshot))
    saved_history = states.pop(HISTORY.name, None)
    if saved_history is not None:
        history.restore(saved_history)
    return states
