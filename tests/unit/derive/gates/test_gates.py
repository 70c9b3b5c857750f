"""Both gates together."""

from __future__ import annotations

from msgspec.structs import replace

from tests.samples import A_GPU, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive import answer
from vllm_headroom.derive.gates import Gates, Rules, build_gates
from vllm_headroom.model import EngineStatus, Sample, Values
from vllm_headroom.vocabulary import EngineState, GateName

OFF = Rules(ready_seconds=None, ready_most_seconds=900.0, live_seconds=None, name="vllm-1")
SOON = (Sample(catalog.TIME_TO_OOM_LOWER, A_GPU, 10.0),)


def after(rules: Rules, samples: tuple[Sample, ...] = SOON) -> tuple[Gates, dict[tuple[str, ...], float]]:
    question = build_gates(rules, Values(samples))
    state: Gates = question.initial
    found: tuple[Sample, ...] = ()
    for seconds in range(0, 60, 5):
        seen = replace(snapshot(at=float(seconds)), life=EngineStatus(state=EngineState.SERVING))
        state, found = answer(question, state, seen)
    return state, values(found, catalog.GATE_OPEN)


def test_a_gate_that_is_not_configured_is_open_and_has_no_series() -> None:
    state, shown = after(OFF)

    assert [state.reason(name) for name in GateName] == [None, None]
    assert shown == {}


def test_an_engine_that_is_to_be_begun_anew_gets_no_traffic_meanwhile() -> None:
    rules = replace(OFF, ready_seconds=600.0, live_seconds=3600.0)
    leaking = Sample(catalog.LEAK_STATE, (*A_GPU, "leaking"), 1.0)
    leaks = Values([leaking, Sample(catalog.TIME_TO_OOM_LOWER, A_GPU, 2000.0)])
    question = build_gates(rules, leaks)
    state: Gates = question.initial

    def goes_on(begin: int, end: int) -> set[tuple[bool, bool]]:
        nonlocal state
        told = set()
        for seconds in range(begin, end, 30):
            here = EngineStatus(state=EngineState.SERVING, began_seconds=1.0)
            state, _ = answer(question, state, replace(snapshot(at=float(seconds)), life=here))
            told.add((state.reason(GateName.READY) is None, state.reason(GateName.LIVE) is None))
        return told

    assert goes_on(0, 3600) == {(True, True)}
    assert goes_on(3600, 6000) == {(True, True), (False, False)}


def test_a_closed_gate_is_0() -> None:
    state, shown = after(replace(OFF, ready_seconds=600.0, live_seconds=3600.0))

    assert state.reason(GateName.READY) is not None
    assert shown == {("ready",): 0.0, ("live",): 1.0}
