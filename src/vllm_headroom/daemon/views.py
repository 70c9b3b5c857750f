"""What people and programs are shown: what was seen last, what is to be said of it, and the day before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.build import version
from vllm_headroom.daemon.sampler import Sampler
from vllm_headroom.daemon.state.file import HISTORY
from vllm_headroom.derive.page_facts import running_requests
from vllm_headroom.derive.verdicts import verdicts
from vllm_headroom.expose.history import History
from vllm_headroom.expose.view import Incident, View
from vllm_headroom.model import Verdict


class Views:
    """Follows the samples; `unhealthy` says why the sampling loop does not turn, `incident` which was the last."""

    def __init__(
        self,
        *,
        clock: Clock,
        interval_seconds: float,
        unhealthy: Callable[[], str | None],
        notice: str = "",
        runbooks: str | None = None,
        incident: Callable[[], Incident | None] = lambda: None,
    ) -> None:
        self.history = History()
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._unhealthy = unhealthy
        self._notice = notice
        self._runbooks = runbooks
        self._incident = incident
        self.verdicts: tuple[Verdict, ...] = ()

    def take_up(self, states: Mapping[str, Any]) -> None:
        """Go on from the history that an earlier process kept, where it is among the states."""
        if HISTORY.name in states:
            self.history.take_up(states[HISTORY.name])

    def states(self, sampler: Sampler) -> Mapping[str, Any]:
        """Return all that a later process takes up."""
        return {**sampler.states, HISTORY.name: self.history.kept()}

    def step(self, sampler: Sampler) -> None:
        """Take note of a sample that was published."""
        if sampler.snapshot is None or sampler.published is None:
            return
        page = sampler.snapshot.page
        self.verdicts = verdicts(sampler.snapshot, sampler.values)
        running = None if page is None else running_requests(page)
        self.history.step(sampler.snapshot, self.verdicts, running)

    def view(self, sampler: Sampler) -> View:
        """Return what is shown at this moment."""
        published = sampler.published
        return View(
            version=version(),
            interval_seconds=self._interval_seconds,
            history=self.history,
            snapshot=sampler.snapshot,
            values=sampler.values,
            verdicts=self.verdicts,
            age_seconds=0.0 if published is None else self._clock.monotonic() - published.monotonic_seconds,
            unwell=self._unhealthy(),
            notice=self._notice,
            runbooks=self._runbooks,
            last_incident=self._incident(),
        )
