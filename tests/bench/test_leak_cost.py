"""What the leak detector costs: time per sample, state per GPU, a day replayed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import generate
import pytest
from msgspec import Struct
from msgspec.structs import fields, replace

from tests.bench.results import Results
from vllm_headroom.daemon.state.file import STATE
from vllm_headroom.daemon.state.saved import DerivationStates, Identity, SavedState, identify_engine
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.tick import answer, build_derivations
from vllm_headroom.model import EngineStatus, Snapshot
from vllm_headroom.vocabulary import EngineState
from vllm_headroom_tools.trace import parse_trace

pytestmark = pytest.mark.bench

HOURS: Final = 24.0
INTERVAL_SECONDS: Final = 5.0
STRETCH: Final = 500
"""Samples timed together: the clock costs nothing beside them."""

TRACES: Final = ("leak_req_12.8", "flat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A day of one GPU, stepped through."""

    seconds_per_sample: float
    memory: LeakMemory
    last: Snapshot


@pytest.mark.parametrize("name", TRACES)
def test_the_cost_of_a_sample_and_the_size_of_the_state(name: str, results: Results) -> None:
    day = stepped(list(parse_trace(lines(name))))
    written = len(STATE.encode(make_state(day.memory, day.last))) - len(
        STATE.encode(make_state(without_gpus(day.memory), day.last))
    )
    state_bytes = size(day.memory.gpus) - size({})

    results.at_most(60, f"leak detector, per sample and GPU: {name}, 24 h", 1e6 * day.seconds_per_sample, " µs")
    results.at_most(64, f"its state per GPU in the file: {name}, 24 h", written / 1024, " KiB")
    results.at_most(64, f"its state per GPU in memory: {name}, 24 h", state_bytes / 1024, " KiB")


@pytest.mark.parametrize("name", TRACES)
def test_a_day_is_replayed_in_seconds(name: str, results: Results, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(lines(name)) + b"\n")
    replay = [str(Path(sys.executable).with_name("vllm-headroom")), "replay", str(trace), "--json"]

    seconds = min(elapsed(lambda: subprocess.run(replay, check=True, capture_output=True)) for _ in range(2))

    results.at_most(2, f"`replay` of 24 h at 5 s: {name}", seconds, " s")


def lines(name: str) -> list[bytes]:
    return [line.encode() for line in generate.lines(generate.make(name, 0, HOURS, INTERVAL_SECONDS))]


def stepped(past: Sequence[Snapshot]) -> Day:
    """Return the fastest of three passes: what it takes when nothing else runs."""
    past = [replace(day_snapshot, engine_status=EngineStatus(state=EngineState.SERVING)) for day_snapshot in past]
    detector = next(derivation for derivation in build_derivations() if derivation.name == "leak")
    best = float("inf")
    for _ in range(3):
        state, seconds = detector.initial, 0.0
        for begin in range(0, len(past), STRETCH):
            began = time.process_time()
            for day_snapshot in past[begin : begin + STRETCH]:
                state, _samples = answer(detector, state, day_snapshot)
            seconds += time.process_time() - began
        best = min(best, seconds)
    return Day(seconds_per_sample=best / len(past), memory=state, last=past[-1])


def make_state(memory: LeakMemory, snapshot: Snapshot) -> SavedState:
    whose = identify_engine(snapshot.engines)
    assert isinstance(whose, Identity)
    return SavedState(
        version="0",
        saved_at_seconds=snapshot.time_seconds,
        monotonic_seconds=snapshot.monotonic_seconds,
        identity=whose,
        memory=DerivationStates(leak=memory),
    )


def without_gpus(memory: LeakMemory) -> LeakMemory:
    return replace(memory, gpus={})


def size(target: Any, seen_ids: set[int] | None = None) -> int:
    """Return the bytes of an object and of everything it alone refers to, each counted once."""
    seen_ids = set() if seen_ids is None else seen_ids
    if id(target) in seen_ids:
        return 0
    seen_ids.add(id(target))
    return sys.getsizeof(target) + sum(size(part, seen_ids) for part in parts(target))


def parts(target: Any) -> list[Any]:
    if isinstance(target, Struct):
        return [getattr(target, field.name) for field in fields(target)]
    if isinstance(target, Mapping):
        return [*target.keys(), *target.values()]
    return list(target) if isinstance(target, list | tuple | set | frozenset) else []


def elapsed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
