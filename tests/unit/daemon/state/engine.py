"""An engine that leaks 2 MiB per 16 requests, seen every 5 seconds, and the states that come of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from tests.logs import capture_logs
from tests.samples import engine, gpu, page, snapshot
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.daemon.state.saved import DerivationStates, Identity, SavedState, identify_engine
from vllm_headroom.daemon.state.store import StateKeeper
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.per_request import Baselines
from vllm_headroom.derive.tick import answer, build_derivations
from vllm_headroom.model import EngineProcess, EngineReading, EngineStatus, Failure, Gpu, Sample, Snapshot
from vllm_headroom.vocabulary import EngineState, Role

GIB: Final = 2**30
MIB: Final = 2**20
STEP_SECONDS: Final = 5.0
REQUESTS_PER_STEP: Final = 50
ALARM_STEPS: Final = 1800
"""Two and a half hours, in which half of the room leaks away: far more than the alarm needs."""

DERIVATIONS: Final = tuple(derivation for derivation in build_derivations() if derivation.name in {"leak", "baseline"})


def count_held_bytes(step: int) -> int:
    return 40 * GIB + step * REQUESTS_PER_STEP // 16 * 2 * MIB


def reading(step: int, **engine_fields: Any) -> EngineReading:
    facts = {"finished_total": float(step * REQUESTS_PER_STEP), "started_at_seconds": 1_760_000_000.0, **engine_fields}
    return engine(running=20.0, **facts)


def device(step: int, uuid: str = "GPU-a") -> Gpu:
    return replace(gpu(uuid=uuid, total=60 * GIB, used=count_held_bytes(step)), process_count=1)


def make_snapshot(
    step: int,
    *,
    shift: float = 0.0,
    engines: tuple[EngineReading, ...] | Failure | None = None,
    gpus: tuple[Gpu, ...] | Failure | None = None,
) -> Snapshot:
    """Return what is seen at a step; `shift` is how much further the monotonic clock of this process is."""
    worker = EngineProcess(
        pid=7, role=Role.WORKER, rss_bytes=count_held_bytes(step) // 8, started_at_seconds=1_760_000_001.0
    )
    if not isinstance(engines, Failure):
        engines_seen = page(*((reading(step),) if engines is None else engines))
    at = snapshot(
        at=step * STEP_SECONDS,
        engines=engines if isinstance(engines, Failure) else engines_seen,
        gpus=(device(step),) if gpus is None else gpus,
        processes=(worker,),
    )
    return replace(
        at, monotonic_seconds=at.monotonic_seconds + shift, engine_status=EngineStatus(state=EngineState.SERVING)
    )


def followed(
    memory: DerivationStates, snapshots: Iterable[Snapshot]
) -> Iterator[tuple[DerivationStates, tuple[Sample, ...]]]:
    states: dict[str, Any] = {"leak": memory.leak, "baseline": memory.baseline}
    for tick_snapshot in snapshots:
        samples: tuple[Sample, ...] = ()
        for derivation in DERIVATIONS:
            states[derivation.name], new_samples = answer(derivation, states[derivation.name], tick_snapshot)
            samples += new_samples
        yield DerivationStates(**states), samples


def after(snapshots: Iterable[Snapshot], memory: DerivationStates | None = None) -> DerivationStates:
    *_, (last_memory, _) = followed(memory or DerivationStates(), snapshots)
    return last_memory


def make_state(memory: DerivationStates, sample: Snapshot, **changes: Any) -> SavedState:
    whose = identify_engine(sample.engines)
    assert isinstance(whose, Identity)
    facts = {"version": "0", "saved_at_seconds": sample.time_seconds, "monotonic_seconds": sample.monotonic_seconds}
    return SavedState(**{**facts, "identity": whose, "memory": memory, **changes})


@dataclass
class FixedClock:
    """Shows the time of a snapshot."""

    now: Snapshot

    def time(self) -> float:
        return self.now.time_seconds

    def monotonic(self) -> float:
        return self.now.monotonic_seconds

    async def sleep_until(self, monotonic_seconds: float) -> None:
        raise AssertionError(monotonic_seconds)


def keeper(folder: Path, now: Snapshot) -> StateKeeper:
    return StateKeeper(folder=folder, clock=FixedClock(now), version="0", lock=free())


def free() -> FolderLock:
    """Return a lock that never refuses: several keepers of a test have one folder."""
    lock = FolderLock()
    lock.is_ours = True
    return lock


async def recalled(folder: Path, *snapshots: Snapshot) -> tuple[dict[str, Any], list[str]]:
    """Return what a new process takes up as it sees these, and the events it logs."""
    subject, states = keeper(folder, snapshots[-1]), dict[str, Any]()
    with capture_logs() as lines:
        for tick_snapshot in snapshots:
            states.update(await subject.recall(tick_snapshot))
    return states, [f"{line['event']}: {line.get('problem', '')}" for line in lines]


def states(memory: DerivationStates) -> dict[str, LeakMemory | Baselines]:
    return {"leak": memory.leak, "baseline": memory.baseline}
