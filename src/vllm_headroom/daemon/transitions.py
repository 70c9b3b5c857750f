"""Log each change of state once."""

from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.attribution import Selection, describe_orphans
from vllm_headroom.derive.log_agreement import find_disagreements
from vllm_headroom.log import Log
from vllm_headroom.model import (
    EnginePage,
    EngineStatus,
    Failure,
    Gpu,
    ProbeReadings,
    Snapshot,
    Values,
    name_device,
)
from vllm_headroom.parse.engines import explain_empty_page
from vllm_headroom.units import HOUR_SECONDS
from vllm_headroom.vocabulary import EngineState, LeakState, Source

log = Log(__name__)

NOT_ATTRIBUTED: Final = (
    "cannot tell which GPUs the engine uses: set HEADROOM_GPUS to their UUIDs or indices, or let"
    " the sidecar see the engine's processes (shareProcessNamespace: true in the pod)"
)
AMBIGUOUS: Final = (
    "several engines' servers are visible, and the one to watch is unknown: give each its own"
    " --port, let HEADROOM_ENGINE_URL name that of the one to watch and wait until it answers, or"
    " do not share the host's processes"
)

ENGINE_EVENTS: Final = {
    EngineState.UNKNOWN: "engine's state unknown",
    EngineState.STALLED: "engine is stalled: it should make progress and makes none",
}
"""The log events for two states. For any other state, the event is "engine is" followed by the
state's name.
"""

MOST_LOGGED_PROBES: Final = 64
"""The maximum number of stopped probes logged within FORGET_PROBES_SECONDS. Files written by the
engine's container must not fill the log.
"""

FORGET_PROBES_SECONDS: Final = HOUR_SECONDS
"""The time after which a logged probe is forgotten if its file is gone."""

DISAGREEING_SECONDS: Final = 60.0
"""A disagreement of the log with the probe or page is reported after this time. After a restart,
each source is read at a different moment.
"""

NOTHING_YET: Final = "nothing yet"
"""The logged state of every source before the first sample."""


class Transitions:
    """Remembers the last state of each source, so that each change is logged once."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._logged_states: dict[str, object] = {}
        self._engine_state: EngineState | None = None
        self._leak_states: dict[str, str | None] = {}
        """GROWING, LEAKING, or None for neither, keyed by a GPU's name or host memory's."""
        self._logged_probes: set[tuple[int, float]] = set()
        """The pid and start time of each stopped probe that was logged."""
        self._forget_probes_at_seconds = 0.0
        self._disagreeing_since_seconds: float | None = None
        """When the engine's log began to disagree, on the monotonic clock. None if the log agrees.
        """

    def report(self, snapshot: Snapshot) -> None:
        """Log changes since the last snapshot."""
        self._report_sources(snapshot)
        if isinstance(snapshot.probe, ProbeReadings):
            self._report_stopped_probes(snapshot.probe, snapshot.monotonic_seconds)
        if not isinstance(snapshot.engines, Failure):
            self._report_inputs(snapshot.engines)
        if not isinstance(snapshot.gpus, Failure):
            self._report_left_out_gpus(snapshot.gpus)
            self._report_owned_gpus(snapshot.gpus)
        self._report_processes(snapshot)
        self._report_disagreements(snapshot)
        if snapshot.engine_status is not None:
            self._report_engine(snapshot.engine_status)

    def report_leaks(self, values: Values) -> None:
        """Log when the leak detector begins or stops finding growth in GPU or host memory.

        While the detector cannot reach a verdict, nothing is logged. The last state is kept.
        """
        gpu_states = values.find_all(catalog.LEAK_STATE)
        host_states = values.find_all(catalog.HOST_LEAK_STATE)
        for labels, is_current in (gpu_states | host_states).items():
            *device, state = labels
            # An alarm that resumes after a period without a verdict must not be logged twice.
            if not is_current or state in (LeakState.UNKNOWN, LeakState.ASLEEP):
                continue
            # A GPU has two labels, index and UUID. Host memory has one label, the role.
            is_gpu = len(device) > 1
            name = name_device(*device) if is_gpu else f"host memory of {device[0]}"
            is_growth = state in (LeakState.GROWING, LeakState.LEAKING)
            growth_state = state if is_growth else None
            former_state = self._leak_states.get(name)
            self._leak_states[name] = growth_state
            if growth_state == former_state:
                continue
            if growth_state is None:
                log.info("leak no longer suspected", of=name, before=former_state)
            else:
                log.warning(
                    "leak suspected",
                    of=name,
                    verdict=growth_state,
                    before=former_state or "nothing found",
                )

    def log_fault(self, name: str, error: Exception | None) -> None:
        """Log an error of a derivation when it begins and when it ends.

        The line includes the traceback. `error` is what the derivation raised in this tick, or None
        if it succeeded.
        """
        is_faulty = error is not None
        if not self._note_change(f"derivation {name}", is_faulty, usual_state=False):
            return
        if is_faulty:
            log.error("derivation failed, its series are absent", derivation=name, exc_info=error)
        else:
            log.info("derivation works again", derivation=name)

    def log_reader_fault(self, source: Source, step: str, error: Exception | None) -> None:
        """Log an error when a step of reading a source begins to fail.

        The line includes the traceback. `error` is None if the source responded. Do not call this
        while the source is already failing for another reason. The fault would be logged twice.
        """
        is_faulty = error is not None
        is_change = self._note_change(f"{step} of {source}", is_faulty, usual_state=False)
        if is_change and is_faulty:
            log.error("source raised, its series are absent", source=str(source), exc_info=error)

    def _report_engine(self, status: EngineStatus) -> None:
        """Log engine exits and changes in the engine's state."""
        if self._engine_state is not None and status.exit_reason is not None:
            log.warning("engine exited", reason=str(status.exit_reason), restarts=status.restarts)
        if status.state is self._engine_state:
            return
        is_alarming = status.state in (EngineState.DOWN, EngineState.STALLED)
        write = log.warning if is_alarming else log.info
        write(
            ENGINE_EVENTS.get(status.state, f"engine is {status.state}"),
            before=str(self._engine_state or NOTHING_YET),
        )
        self._engine_state = status.state

    def _report_sources(self, snapshot: Snapshot) -> None:
        failures = {failure.source: failure for failure in snapshot.failures}
        optional_sources = {Source.PROBE: snapshot.probe, Source.LOG: snapshot.log}
        for source in Source:
            if source not in optional_sources or optional_sources[source] is not None:
                self._report_source(source, failures.get(source))

    def _report_source(self, source: Source, failure: Failure | None) -> None:
        """Log whenever a source begins to fail or responds again."""
        reason = None if failure is None else failure.reason
        if not self._note_change(str(source), reason):
            return
        if failure is None:
            log.info("source answers", source=str(source))
        else:
            log.warning(
                "source failed",
                source=str(source),
                reason=str(failure.reason),
                problem=failure.message,
            )

    def _report_stopped_probes(self, probe: ProbeReadings, now_seconds: float) -> None:
        """Log each probe that has stopped for good, but only once."""
        stopped_probes = {
            (process.pid, process.started_at_seconds): process
            for process in probe.others
            if process.stopped
        }
        # The files of exited probes remain for a while. A probe that is forgotten too early would
        # be logged twice.
        if now_seconds >= self._forget_probes_at_seconds:
            self._logged_probes &= stopped_probes.keys()
            self._forget_probes_at_seconds = now_seconds + FORGET_PROBES_SECONDS
        for name, process in stopped_probes.items():
            if name in self._logged_probes or len(self._logged_probes) >= MOST_LOGGED_PROBES:
                continue
            self._logged_probes.add(name)
            log.warning(
                "a probe gave up", pid=process.pid, role=str(process.role), problem=process.stopped
            )

    def _report_processes(self, snapshot: Snapshot) -> None:
        """Log if the engine cannot be identified, or if an exited engine left processes behind."""
        if self._note_change("engines", snapshot.ambiguous_engines) and snapshot.ambiguous_engines:
            log.warning(
                "engine's processes not chosen",
                problem=AMBIGUOUS,
                visible=snapshot.ambiguous_engines,
            )
        # No GPUs are passed, so that all orphans are named, even those that hold memory.
        orphans = describe_orphans(snapshot.left_behind, ())
        if self._note_change("left behind", orphans, usual_state=None) and orphans is not None:
            log.warning("an engine that exited left processes behind", problem=orphans)

    def _report_disagreements(self, snapshot: Snapshot) -> None:
        """Log once when the engine's log disagrees with the probe or the page."""
        disagreements = find_disagreements(snapshot)
        if not disagreements:
            self._disagreeing_since_seconds = None
            return
        now_seconds = snapshot.monotonic_seconds
        if self._disagreeing_since_seconds is None:
            self._disagreeing_since_seconds = now_seconds
        if now_seconds - self._disagreeing_since_seconds < DISAGREEING_SECONDS:
            return
        # Disagreements are compared by name, because the sizes may change slightly between
        # readings.
        names = [text.partition(":")[0] for text in disagreements]
        if self._note_change("log agreement", names):
            log.warning(
                "the engine's log disagrees: it may be another engine's (HEADROOM_ENGINE_LOG)",
                problem="; ".join(disagreements),
            )

    def _report_inputs(self, page: EnginePage) -> None:
        """Log when the page begins or stops offering at least one of the profile's inputs."""
        missing_inputs = [name for name, is_offered in page.inputs if not is_offered]
        # A page with at least one of the inputs is the engine's. A page with none is not.
        offers_inputs = len(missing_inputs) < len(page.inputs)
        if not self._note_change("inputs", offers_inputs):
            return
        if offers_inputs:
            log.info(
                "engine's inputs found",
                profile=page.profile,
                engines=len(page.engines),
                not_offered=",".join(missing_inputs),
            )
        else:
            log.warning("engine's inputs missing", problem=explain_empty_page(page))

    def _report_left_out_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """Log which of the engine's GPUs are excluded by the setting HEADROOM_GPUS."""
        uuids = ",".join(sorted(gpu.reading.uuid for gpu in gpus if gpu.is_left_out))
        if self._note_change("left out", uuids) and uuids:
            log.warning(
                "HEADROOM_GPUS leaves out GPUs that the engine's processes are on", left_out=uuids
            )

    def _report_owned_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """Log which GPUs are attributed to the engine and how, or why none are."""
        attributions = [
            (gpu.reading.uuid, str(gpu.attribution)) for gpu in gpus if gpu.attribution is not None
        ]
        # The attributions are compared as a set. NVML may renumber the GPUs after a loss.
        if not self._note_change("owners", frozenset(attributions)):
            return
        for uuid, attribution in attributions:
            log.info("GPU attributed to the engine", uuid=uuid, attribution=attribution)
        if gpus and not attributions and not self._selection.listed:
            log.warning(
                "no GPU attributed to the engine", problem=NOT_ATTRIBUTED, visible=len(gpus)
            )
        # Operators name a GPU by its index or its UUID. The UUID may be in upper or lower case.
        visible_names: set[str] = set()
        for gpu in gpus:
            visible_names.add(gpu.reading.uuid.casefold())
            visible_names.add(str(gpu.reading.index))
        missing_names = [
            name for name in self._selection.listed if name.casefold() not in visible_names
        ]
        if missing_names:
            log.warning(
                "HEADROOM_GPUS names GPUs that are not visible",
                missing=",".join(missing_names),
                visible=" ".join(f"{gpu.reading.index}={gpu.reading.uuid}" for gpu in gpus),
            )

    def _note_change(self, name: str, state: object, usual_state: object = NOTHING_YET) -> bool:
        """Remember the state under this name; return whether it has changed.

        The first state is compared with `usual_state`.
        """
        former_state = self._logged_states.get(name, usual_state)
        self._logged_states[name] = state
        return state != former_state
