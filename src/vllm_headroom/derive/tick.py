"""The steps of a tick: attribute GPUs, follow the run, derive, judge."""

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any, Final, Generic, Protocol, TypeVar

from msgspec import Struct

from vllm_headroom.derive.admission import Batches, derive_admission
from vllm_headroom.derive.allocator_counts import Counts, derive_counters
from vllm_headroom.derive.attribution import AttributionState, Selection, add_lost_gpus, attribute
from vllm_headroom.derive.configured import complete_page, list_pools
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.derive.gates import GATE, Gate, Guardrail, derive_gate
from vllm_headroom.derive.health import INITIAL, derive_health
from vllm_headroom.derive.host_memory import ContainerState, derive_host_memory, update_container
from vllm_headroom.derive.inside import add_inside
from vllm_headroom.derive.kv_cache import derive_kv_cache
from vllm_headroom.derive.leak.leak import LeakMemory, derive_leaks
from vllm_headroom.derive.life.engine import (
    ENGINE_RUN,
    EngineMemory,
    derive_engine_state,
    forget_run,
    update_engine,
)
from vllm_headroom.derive.peaks import derive_peaks
from vllm_headroom.derive.per_request import Baselines, derive_baseline, derive_per_request
from vllm_headroom.derive.prefix_cache import PrefixCacheState, derive_prefix_cache
from vllm_headroom.derive.probe_files import classify_probe
from vllm_headroom.derive.readings import derive_readings
from vllm_headroom.derive.startup import derive_refusal, derive_startup
from vllm_headroom.derive.verdicts import (
    SERVING,
    VERDICTS,
    derive_verdicts,
)
from vllm_headroom.model import (
    NO_VERDICT,
    EnginePage,
    EngineProcess,
    Failure,
    Gpu,
    GpuReadings,
    LogReading,
    ProbedProcess,
    ProbeReadings,
    ProcessReadings,
    Published,
    ReadingTime,
    Sample,
    ServerReply,
    Snapshot,
    TokenBytes,
    Values,
    Verdict,
)
from vllm_headroom.vocabulary import Reason, Source

NO_PROCESSES: Final = ProcessReadings(engine=(), visible_pids=frozenset(), sees_host_pids=False)
"""Used in place of the process readings while /proc cannot be read."""

UNEXPECTED: Final = {
    source: Failure(
        source=source,
        reason=Reason.UNEXPECTED,
        message="reading it raised an error that is a fault of the sidecar: report the traceback"
        " in the sidecar's log",
    )
    for source in Source
}
"""The failure used for a source if reading or evaluating it raises an error."""

State = TypeVar("State")
T = TypeVar("T")
F = TypeVar("F")


StepFunction = Callable[[State, Snapshot], tuple[State, tuple[Sample, ...]]]


class Derivation(Struct, Generic[State], frozen=True, kw_only=True):
    """A question that every snapshot answers; `step` returns the next state and the samples."""

    name: str
    initial: State
    step: StepFunction[State]


def answer(
    derivation: Derivation[State], state: State, snapshot: Snapshot
) -> tuple[State, tuple[Sample, ...]]:
    """Run one step of a derivation.

    Returns the next state and the samples with finite values. Absurd numbers on a page may overflow
    or yield infinity. Infinite values are dropped.
    """
    following, samples = derivation.step(state, snapshot)
    return following, tuple([sample for sample in samples if isfinite(sample.value)])


def make_stateless(
    name: str, question: Callable[[Snapshot], tuple[Sample, ...]]
) -> Derivation[None]:
    """Build a derivation that does not need any state."""
    return Derivation(name=name, initial=None, step=lambda _, snapshot: (None, question(snapshot)))


LEAK: Final = Derivation(name="leak", initial=LeakMemory(), step=derive_leaks)
"""The leak detector, which is also run by `replay` on recorded traces."""


def build_derivations(
    *,
    reported_bytes: float | None = None,
    kv_bytes_per_token: float | None = None,
    model: TokenBytes | None = None,
    baseline_bytes_per_request: float | None = None,
) -> tuple[Derivation[Any], ...]:
    """Return every derivation, in the order in which the page shows them.

    Add new derivations here. An argument is None if the operator has not configured it.
    `reported_bytes` is the memory that the engine should use on each GPU. `kv_bytes_per_token` is
    the size of one token in the KV cache of one engine. `model` computes this size from the cache's
    dtype. `baseline_bytes_per_request` is the expected memory per running request on each GPU.
    """
    return (
        Derivation(name="health", initial=INITIAL, step=derive_health),
        make_stateless("readings", derive_readings),
        make_stateless("engine_state", derive_engine_state),
        make_stateless("startup", derive_startup),
        make_stateless("refusal", derive_refusal),
        Derivation(name="allocator", initial=Counts(), step=derive_counters),
        make_stateless("peaks", derive_peaks),
        make_stateless("discrepancy", partial(derive_discrepancy, configured_bytes=reported_bytes)),
        make_stateless("per_request", derive_per_request),
        make_stateless(
            "kv_cache", partial(derive_kv_cache, bytes_per_token=kv_bytes_per_token, model=model)
        ),
        Derivation(name="admission", initial=Batches(), step=derive_admission),
        Derivation(name="prefix_cache", initial=PrefixCacheState(), step=derive_prefix_cache),
        make_stateless("host_memory", derive_host_memory),
        LEAK,
        Derivation(
            name="baseline",
            initial=Baselines(),
            step=partial(derive_baseline, configured_bytes=baseline_bytes_per_request),
        ),
    )


class Border(Protocol):
    """Catches any error that a step of a tick raises."""

    def __call__(self, name: str, step: Callable[[], T], fallback: F) -> T | F:
        """Return the step's result; if the step raises, report the error and return `fallback`."""


def run_unguarded(name: str, step: Callable[[], T], fallback: F) -> T | F:
    """Return a step's result, and let every error propagate to the caller."""
    return step()


class TickRules(Struct, frozen=True, kw_only=True):
    """The operator's settings that affect the evaluation of a tick."""

    selection: Selection
    derivations: tuple[Derivation[Any], ...]
    model: TokenBytes | None = None
    """Computes the bytes per token of the model that the operator named. It is None if no model was
    named.
    """
    host_limit_bytes: int | None = None
    """The limit of the engine's container. If it is None, the limit is read from /proc and cgroups.
    """
    reported_bytes: float | None = None
    """The memory in bytes that the engine should use on each GPU. If it is None, the figure is
    taken from the page or the probe.
    """
    role: str = SERVING
    gate_ready_seconds: float | None = None
    """The gate closes if less time than this remains until out-of-memory. If the value is None, the
    gate never closes.
    """
    read_guardrail: Callable[[], Guardrail] | None = None
    """Returns the guardrail's settings and state, or None if this pod must never be evicted."""


class TickReadings(Struct, frozen=True, kw_only=True):
    """What was read from all sources for one tick, at nearly the same moment."""

    time_seconds: float
    monotonic_seconds: float
    page: EnginePage | Failure
    gpus: GpuReadings | Failure
    processes: ProcessReadings | Failure
    probe_files: tuple[ProbedProcess, ...] | Failure | None
    """The probe's files, or None if no probe folder is configured."""
    log: LogReading | Failure | None = None
    """What the engine's log reports, or None if no engine log is configured."""
    reading_times: tuple[ReadingTime, ...]
    token_bytes: TokenBytes | None
    unanswered_since_seconds: float | None
    server: ServerReply | None


class TickResult(Struct, frozen=True, kw_only=True):
    """What was read, derived and judged in one tick.

    The result contains everything that is shown, published and recorded.
    """

    snapshot: Snapshot
    """The tick's readings. `snapshot.engine_status.event` is the engine's exit or stall, if this
    tick observed one.
    """
    published: Published
    """The samples of the metrics page."""
    values: Values
    """The same samples, for lookup by metric and labels."""
    verdicts: tuple[Verdict, ...]
    gate: Gate


class Evaluation:
    """Evaluates the ticks of one engine, and owns the state of its derivations.

    If a step raises an error, only the samples of that step are lost.
    """

    def __init__(self, rules: TickRules, border: Border) -> None:
        self._rules = rules
        self._border = border
        self._attribution = AttributionState()
        self._container = ContainerState()
        self.states: dict[str, Any] = {ENGINE_RUN: EngineMemory()}
        """The state of the run and of each derivation, by name, in its saved form."""
        for derivation in rules.derivations:
            self.states[derivation.name] = derivation.initial

    def build_snapshot(self, readings: TickReadings) -> Snapshot:
        """Return the snapshot of the readings, without the status of the engine's run."""
        page = readings.page
        processes: tuple[EngineProcess, ...] | Failure
        if isinstance(readings.processes, Failure):
            process_facts = NO_PROCESSES
            processes = readings.processes
        else:
            process_facts = readings.processes
            processes = process_facts.engine

        probe = self._border(
            "probe files",
            partial(classify_probe, readings.probe_files, processes, readings.time_seconds),
            None if readings.probe_files is None else UNEXPECTED[Source.PROBE],
        )
        self._container, host = self._border(
            "host memory",
            partial(
                update_container,
                self._container,
                readings.processes,
                probe,
                limit_bytes=self._rules.host_limit_bytes,
            ),
            (ContainerState(), None),
        )
        gpus = self._attribute_gpus(readings.gpus, readings.processes)
        options = process_facts.options
        model = self._rules.model or readings.token_bytes
        return Snapshot(
            time_seconds=readings.time_seconds,
            monotonic_seconds=readings.monotonic_seconds,
            engines=self._border(
                "page's facts", partial(complete_page, page, probe, options, model), page
            ),
            gpus=self._border("inside", partial(add_inside, gpus, probe), gpus),
            processes=processes,
            probe=probe,
            log=readings.log,
            reading_times=readings.reading_times,
            host=host,
            unanswered_since_seconds=readings.unanswered_since_seconds,
            server=readings.server,
            neighbours=process_facts.neighbours,
            ambiguous_engines=process_facts.ambiguous_engines,
            left_behind=process_facts.left_behind,
            has_silent_core=isinstance(probe, ProbeReadings) and probe.has_silent_core,
            pools=self._border("pools", partial(list_pools, page, processes, options), ()),
            token_bytes=readings.token_bytes,
        )

    def follow_run(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the run's status and the GPUs that were lost.

        If following the run fails, the snapshot is returned unchanged, and the run is forgotten.
        """
        memory: EngineMemory = self.states[ENGINE_RUN]

        def follow() -> tuple[EngineMemory, Snapshot]:
            new_memory, followed = update_engine(
                memory, snapshot, configured_bytes=self._rules.reported_bytes
            )
            return new_memory, add_lost_gpus(followed)

        outcome = self._border(ENGINE_RUN, follow, None)
        if outcome is None:
            # The error may come from the remembered data of the run. An error of this kind would
            # recur at every tick.
            self.states[ENGINE_RUN] = forget_run(memory)
            return snapshot
        self.states[ENGINE_RUN], snapshot = outcome
        return snapshot

    def judge(self, snapshot: Snapshot) -> TickResult:
        """Derive the samples of a snapshot, and judge its gate and verdicts.

        The snapshot must have the engine's status. If judging the gate fails, the gate is open. If
        judging the verdicts fails, the only verdict is NO_VERDICT.
        """
        samples: list[Sample] = []
        for derivation in self._rules.derivations:
            self.states[derivation.name], derived = self._border(
                derivation.name,
                partial(answer, derivation, self.states[derivation.name], snapshot),
                (derivation.initial, ()),
            )
            samples += derived
        values = Values(samples)

        # The verdicts need the gate, and both need the samples of all derivations.
        gate, gate_samples = self._border(
            GATE, partial(self._judge_gate, snapshot, values), (Gate(), ())
        )
        samples += gate_samples
        values.add(gate_samples)
        verdicts, verdict_samples = self._border(
            VERDICTS, partial(self._judge_verdicts, snapshot, values), ((NO_VERDICT,), ())
        )
        samples += verdict_samples
        values.add(verdict_samples)
        return TickResult(
            snapshot=snapshot,
            published=Published(
                samples=tuple(samples), monotonic_seconds=snapshot.monotonic_seconds
            ),
            values=values,
            verdicts=verdicts,
            gate=gate,
        )

    def _attribute_gpus(
        self, gpus: GpuReadings | Failure, processes: ProcessReadings | Failure
    ) -> tuple[Gpu, ...] | Failure:
        """Return the GPUs with what the engine holds, or a Failure if none is readable."""
        if isinstance(gpus, Failure):
            return gpus
        self._attribution, attributed = self._border(
            "attribution",
            partial(attribute, self._attribution, gpus, processes, self._rules.selection),
            (AttributionState(), UNEXPECTED[Source.NVML]),
        )
        return attributed

    def _judge_gate(self, snapshot: Snapshot, values: Values) -> tuple[Gate, tuple[Sample, ...]]:
        """Return the gate and its samples."""
        guardrail = None if self._rules.read_guardrail is None else self._rules.read_guardrail()
        return derive_gate(snapshot, values, self._rules.gate_ready_seconds, guardrail)

    def _judge_verdicts(
        self, snapshot: Snapshot, values: Values
    ) -> tuple[tuple[Verdict, ...], tuple[Sample, ...]]:
        """Return the verdicts and their samples; `values` must include the gate's samples."""
        leak: LeakMemory = self.states.get(LEAK.name, LEAK.initial)
        return derive_verdicts(snapshot, values, leak, self._rules.role)
