"""The last end of the engine in a trace, or the one that an incident is about."""

from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.life.case import build_ending, describe_gpus
from vllm_headroom.model import Ending, GpuAtEnd, Snapshot
from vllm_headroom.trace.incident import Incident, add_evidence
from vllm_headroom.vocabulary import IncidentKind, LeakState
from vllm_headroom_tools.history import LeakReplay, Moment

SAME_SECONDS: Final = 0.5


class Follower:
    """Finds the end sample by sample; the facts of an incident have the time of the event.

    Without them the last exit in the trace counts, or a stall that goes on. `silent` is whether a page that once
    answered no longer does.
    """

    def __init__(self, incident: Incident | None = None) -> None:
        self.ending: Ending | None = None
        self.watch = LeakReplay()
        self.silent = False
        self._incident = incident
        self._was_read = False
        self._leaks: dict[str, tuple[LeakState, Moment | None]] = {}

    def step(self, snapshot: Snapshot) -> Snapshot:
        """Add a sample; return it with the state of the engine added."""
        before = self.watch.run
        snapshot = self.watch.step(snapshot)
        event = None if snapshot.life is None else snapshot.life.event
        if self._incident is not None and (event := self._find_due(snapshot, event)) is not None:
            is_stall, now = event.what is IncidentKind.STALLED, self.watch.run
            run = now.lives.present if is_stall else before.lives.newest or before.lives.present
            age = None if snapshot.life is None or not is_stall else snapshot.life.progress_age_seconds
            gpus = describe_gpus(before.case, run, snapshot)
            event = build_ending(
                before.case, run, snapshot, event.what, reason=event.reason, gpus=gpus, age_seconds=age
            )
        if event is not None:
            found = replace(event, gpus=tuple(map(self._add_leak, event.gpus)))
            self.ending = found if self._incident is None else add_evidence(found, self._incident)
        if snapshot.life is not None and (snapshot.life.ended or not self.watch.run.case.gpus):
            self._leaks = {}
        for _, uuid, course in self.watch.gpus:
            if snapshot.in_service and course.state is not LeakState.UNKNOWN:
                self._leaks[uuid] = course.state, course.last or course.warning
        self._was_read = self._was_read or snapshot.page is not None
        self.silent = self._was_read and snapshot.page is None
        return snapshot

    def _find_due(self, snapshot: Snapshot, event: Ending | None) -> Ending | None:
        """Return the kind and reason of the incident's event at its time, or at the first sample after it."""
        known = self._incident
        assert known is not None  # noqa: S101 - the caller looks
        late = snapshot.time_seconds - known.t
        if not (abs(late) <= SAME_SECONDS or (self.ending is None and late > 0)):
            return None
        reason = known.reason or (None if event is None else event.reason)
        return Ending(
            what=known.what, seconds=snapshot.time_seconds, reason=reason if known.what is IncidentKind.ENDED else None
        )

    def _add_leak(self, gpu: GpuAtEnd) -> GpuAtEnd:
        state, moment = self._leaks.get(gpu.uuid, (LeakState.UNKNOWN, None))
        return replace(gpu, leak=state, leak_bytes_per_request=None if moment is None else moment.bytes_per_request)
