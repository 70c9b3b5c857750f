"""The changes that preceded the end of a run, with their times."""

from collections import deque
from typing import Final

from vllm_headroom.model import EngineStatus, GpuReading, Snapshot, name_device
from vllm_headroom.trace.incident import MOST_SHOWN_ENTRIES, Incident
from vllm_headroom.units import GIB, format_size
from vllm_headroom.vocabulary import EngineState, LeakState
from vllm_headroom_tools.history import LeakReplay

MOST_MOMENTS: Final = 40
"""Our choice: the largest number of entries in a timeline; the newest ones are kept."""

NEIGHBOUR_CHANGE_BYTES: Final = GIB
"""Our choice: a smaller change in the memory held by other processes is not listed."""

STATE_SENTENCES: Final = {
    EngineState.UNKNOWN: "the state of the engine is not known",
    EngineState.DOWN: "the engine is down",
    EngineState.STARTING: "the engine is starting",
    EngineState.SERVING: "the engine serves",
    EngineState.STALLED: "the engine is stalled: no progress",
    EngineState.ASLEEP: "the engine sleeps",
}

LEAK_VERBS: Final = {LeakState.GROWING: "may leak", LeakState.LEAKING: "leaks"}
"""The leak detector's states that become entries, and the verbs used in these entries."""


class Timeline:
    """Collects changes in the engine's state, leak states, and memory held by other processes."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, str]] = deque(maxlen=MOST_MOMENTS)
        self._state: EngineState | None = None
        self._leak_states: dict[str, LeakState] = {}
        self._other_bytes: dict[str, int] = {}

    def step(self, snapshot: Snapshot, replay: LeakReplay) -> None:
        """Add an entry for each change from the previous sample to this one."""
        now = snapshot.time_seconds
        if snapshot.engine_status is not None:
            self._add_state(now, snapshot.engine_status)
        for index, uuid, course in replay.gpus:
            if course.state in LEAK_VERBS and self._leak_states.get(uuid) is not course.state:
                device = name_device(index, uuid)
                self._add(now, f"by this record {device} {LEAK_VERBS[course.state]}")
            # The end of a leak is not listed. A leak that starts again gets another entry.
            self._leak_states[uuid] = course.state
        for gpu in snapshot.owned_gpus:
            if gpu.other_bytes is not None:
                self._add_neighbour(now, gpu.reading, gpu.other_bytes)

    def list_entries(self, incident: Incident) -> tuple[tuple[float, str], ...]:
        """Return the entries and the incident's XIDs, sorted by time."""
        xids = [
            (error.t, f"the driver reported XID {error.xid} on {error.uuid}")
            for error in incident.xids[-MOST_SHOWN_ENTRIES:]
        ]
        return tuple(sorted((*self._moments, *xids)))

    def _add(self, seconds: float, sentence: str) -> None:
        self._moments.append((seconds, sentence))

    def _add_state(self, now: float, status: EngineStatus) -> None:
        """Add an exit, and add the state unless it is the same as before."""
        if status.exit_reason is not None:
            self._add(now, "the engine exited")
        if self._state is None:
            self._add(now, f"the record begins: {STATE_SENTENCES[status.state]}")
        elif status.state is not self._state:
            self._add(now, STATE_SENTENCES[status.state])
        self._state = status.state

    def _add_neighbour(self, now: float, gpu: GpuReading, other_bytes: int) -> None:
        """Add an entry if other processes' memory has changed considerably since the last entry."""
        previous_bytes = self._other_bytes.setdefault(gpu.uuid, other_bytes)
        if abs(other_bytes - previous_bytes) < NEIGHBOUR_CHANGE_BYTES:
            return
        size = format_size(other_bytes)
        previous_size = format_size(previous_bytes)
        self._add(now, f"others hold {size} of {gpu.display_name}, {previous_size} before")
        self._other_bytes[gpu.uuid] = other_bytes
