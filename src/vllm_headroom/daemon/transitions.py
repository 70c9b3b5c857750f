"""Log each change of state once."""

from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.attribution import Selection, describe_orphans
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
from vllm_headroom.vocabulary import EngineState, LeakState, Source

log = Log(__name__)

NOT_ATTRIBUTED: Final = (
    "cannot tell which GPUs the engine uses: set HEADROOM_GPUS to their UUIDs or indices, or let the sidecar see the"
    " engine's processes (shareProcessNamespace: true in the pod)"
)
AMBIGUOUS: Final = (
    "several engines' servers are visible, and the one to watch is unknown: give each its own --port, let"
    " HEADROOM_ENGINE_URL name that of the one to watch and wait until it answers, or do not share the host's processes"
)


STATES: Final = {
    EngineState.UNKNOWN: "engine's state unknown",
    EngineState.STALLED: "engine is stalled: it should make progress and makes none",
}
"""The events of states; any other is as `engine is serving`."""

MOST_STOPPED: Final = 64
FORGET_SECONDS: Final = 3600.0
"""Probes that stopped are logged so often an hour, so that files of the engine's container cannot fill the log."""


class Transitions:
    """Remembers the last state of each source, so that it is logged once."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._said: dict[str, object] = {}
        self._state: EngineState | None = None
        self._found: dict[str, str | None] = {}
        self._stopped: set[tuple[int, float]] = set()
        self._forgets_at = 0.0

    def report(self, snapshot: Snapshot) -> None:
        """Log what changed since the last snapshot."""
        failures = {failure.source: failure for failure in snapshot.failures}
        for source in Source:
            if source is not Source.PROBE or snapshot.probe is not None:
                self._source(source, failures.get(source))
        if isinstance(snapshot.probe, ProbeReadings):
            self._probe(snapshot.probe, snapshot.monotonic_seconds)
        if not isinstance(snapshot.engines, Failure):
            self._page(snapshot.engines)
        if not isinstance(snapshot.gpus, Failure):
            self._gpus(snapshot.gpus)
        if self._is_new("engines", snapshot.ambiguous) and snapshot.ambiguous:
            log.warning(
                "engine's processes not chosen", problem=AMBIGUOUS, visible=snapshot.ambiguous
            )
        left = describe_orphans(snapshot.left_behind, ())
        if self._is_new("left behind", left, usual=None) and left is not None:
            log.warning("an engine that exited left processes behind", problem=left)
        self._log_engine(snapshot.engine_status)

    def verdicts(self, values: Values) -> None:
        """Log where the leak detector begins and ceases to find growth; not where it cannot judge."""
        for labels, held in {
            **values.find_all(catalog.LEAK_STATE),
            **values.find_all(catalog.HOST_LEAK_STATE),
        }.items():
            *named, state = labels
            if not held or state in (LeakState.UNKNOWN, LeakState.ASLEEP):
                continue
            whose = name_device(*named) if len(named) > 1 else f"host memory of {named[0]}"
            now = state if state in (LeakState.GROWING, LeakState.LEAKING) else None
            before, self._found[whose] = self._found.get(whose), now
            if now is None and before is not None:
                log.info("leak no longer suspected", of=whose, before=before)
            elif now != before:
                log.warning(
                    "leak suspected", of=whose, verdict=now, before=before or "nothing found"
                )

    def _log_engine(self, engine_status: EngineStatus | None) -> None:
        if engine_status is None:
            return
        if self._state is not None and engine_status.ended is not None:
            log.warning(
                "engine exited", reason=str(engine_status.ended), restarts=engine_status.restarts
            )
        if engine_status.state is self._state:
            return
        is_alarming = engine_status.state in (EngineState.DOWN, EngineState.STALLED)
        write = log.warning if is_alarming else log.info
        write(
            STATES.get(engine_status.state, f"engine is {engine_status.state}"),
            before=str(self._state or "nothing yet"),
        )
        self._state = engine_status.state

    def log_fault(self, name: str, error: Exception | None) -> None:
        """Log a derivation's fault with its traceback, and its recovery."""
        is_new = self._is_new(f"derivation {name}", error is not None, usual=False)
        if is_new and error is not None:
            log.error("derivation failed, its series are absent", derivation=name, exc_info=error)
        elif is_new:
            log.info("derivation works again", derivation=name)

    def _source(self, source: Source, failure: Failure | None) -> None:
        is_new = self._is_new(str(source), None if failure is None else failure.reason)
        if is_new and failure is not None:
            log.warning(
                "source failed",
                source=str(source),
                reason=str(failure.reason),
                problem=failure.message,
            )
        elif is_new:
            log.info("source answers", source=str(source))

    def _probe(self, probe: ProbeReadings, now: float) -> None:
        stopped = {
            (each.pid, each.started_at_seconds): each for each in probe.others if each.stopped
        }
        if now >= self._forgets_at:
            self._stopped &= stopped.keys()
            self._forgets_at = now + FORGET_SECONDS
        for name, each in stopped.items():
            if name not in self._stopped and len(self._stopped) < MOST_STOPPED:
                self._stopped.add(name)
                log.warning(
                    "a probe gave up", pid=each.pid, role=str(each.role), problem=each.stopped
                )

    def _page(self, page: EnginePage) -> None:
        absent = [name for name, found in page.inputs if not found]
        has_some = len(absent) < len(page.inputs)
        if not self._is_new("inputs", has_some):
            return
        if has_some:
            missing = ",".join(absent)
            log.info(
                "engine's inputs found",
                profile=page.profile,
                engines=len(page.engines),
                not_offered=missing,
            )
        else:
            log.warning("engine's inputs missing", problem=explain_empty_page(page))

    def _gpus(self, gpus: tuple[Gpu, ...]) -> None:
        uuids = ",".join(sorted(gpu.reading.uuid for gpu in gpus if gpu.is_left_out))
        if self._is_new("left out", uuids) and uuids:
            log.warning(
                "HEADROOM_GPUS leaves out GPUs that the engine's processes are on", left_out=uuids
            )
        owners = tuple((gpu.reading.uuid, str(gpu.attribution)) for gpu in gpus if gpu.attribution)
        if not self._is_new(
            "owners", frozenset(owners)
        ):  # after a loss NVML may number the GPUs in another order
            return
        for uuid, attribution in owners:
            log.info("GPU attributed to the engine", uuid=uuid, attribution=attribution)
        if not owners and gpus and not self._selection.listed:
            log.warning(
                "no GPU attributed to the engine", problem=NOT_ATTRIBUTED, visible=len(gpus)
            )
        visible = {
            name.casefold() for gpu in gpus for name in (gpu.reading.uuid, str(gpu.reading.index))
        }
        missing = [name for name in self._selection.listed if name.casefold() not in visible]
        if missing:
            shown = " ".join(f"{gpu.reading.index}={gpu.reading.uuid}" for gpu in gpus)
            log.warning(
                "HEADROOM_GPUS names GPUs that are not visible",
                missing=",".join(missing),
                visible=shown,
            )

    def _is_new(self, what: str, now: object, usual: object = "nothing yet") -> bool:
        """Remember the state of a thing; return whether it changed."""
        before, self._said[what] = self._said.get(what, usual), now
        return now != before
