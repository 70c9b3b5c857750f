"""What people and programs are shown: what was seen last, what is to be said of it, and the day before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.flight import Flight
from vllm_headroom.daemon.sampler import Sampler
from vllm_headroom.daemon.state.file import HISTORY
from vllm_headroom.derive.readings import running_requests
from vllm_headroom.derive.verdicts import verdicts
from vllm_headroom.expose.view import Incident, View
from vllm_headroom.model import Verdict


class Views:
    """Follows the samples from an `empty` view on; `flight` keeps what leads to ends."""

    def __init__(
        self, *, empty: View, clock: Clock, unhealthy: Callable[[], str | None], flight: Flight | None = None
    ) -> None:
        self.history = empty.history
        self.verdicts: tuple[Verdict, ...] = ()
        self._empty = empty
        self._clock = clock
        self._unhealthy = unhealthy
        self._flight = flight

    @property
    def last_incident(self) -> Incident | None:
        """The newest incident that is on disk."""
        return None if self._flight is None else self._flight.last

    def take_up(self, states: Mapping[str, Any]) -> None:
        """Go on from what an earlier process kept, where it is among the states."""
        if HISTORY.name in states:
            self.history.take_up(states[HISTORY.name])

    def states(self, sampler: Sampler) -> Mapping[str, Any]:
        """Return all that a later process takes up."""
        return {**sampler.states, HISTORY.name: self.history.kept()}

    def step(self, sampler: Sampler) -> None:
        """Take note of a sample that was published."""
        if sampler.snapshot is None or sampler.published is None:
            return
        self.verdicts = verdicts(sampler.snapshot, sampler.values)
        self.history.step(sampler.snapshot, self.verdicts, running_requests(sampler.snapshot.page))

    async def record(self, sampler: Sampler) -> None:
        """Write down a sample that was published, where a record is kept."""
        if self._flight is not None and sampler.snapshot is not None:
            await self._flight.step(sampler.snapshot, self.verdicts, sampler.values)

    def look(self, seconds: float, used_bytes: Mapping[str, int]) -> None:
        """Take note of the memory in use between two samples, by UUID."""
        if self._flight is not None:
            self._flight.look(seconds, used_bytes)

    def view(self, sampler: Sampler) -> View:
        """Return what is shown at this moment."""
        published = sampler.published
        return replace(
            self._empty,
            snapshot=sampler.snapshot,
            values=sampler.values,
            verdicts=self.verdicts,
            age_seconds=0.0 if published is None else self._clock.monotonic() - published.monotonic_seconds,
            unwell=self._unhealthy(),
            last_incident=self.last_incident,
        )
