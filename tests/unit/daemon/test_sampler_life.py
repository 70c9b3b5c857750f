"""The engine's run in the sampler: what is reported about it, once, and what a fault in following it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.logs import capture_logs
from tests.samples import engine, gpu, page, snapshot, values
from tests.unit.daemon.test_sampler import MEMORY, Processes, Said, parsed, ticked
from tests.unit.derive.life.watch import REFUSED, WHOLE
from vllm_headroom import catalog
from vllm_headroom.clock import Clock, SystemClock
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.daemon.transitions import Transitions
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.model import EnginePage, Failure, GpuReading, GpuReadings, ProcessReadings, Sample, Values
from vllm_headroom.vocabulary import Attribution, LeakState

ONE_GPU = GpuReadings(driver_version="580.00", devices=(GpuReading(index=0, uuid="GPU-0", name="H100", memory=MEMORY),))


def sampler(
    sources: Said,
    *,
    parse: Callable[[str], EnginePage | Failure] = parsed,
    clock: Clock = SystemClock(),  # noqa: B008
) -> Sampler:
    return Sampler(
        sources=Sources(engine=sources, gpus=sources, processes=Processes(sources).read),
        parse=parse,
        rules=TickRules(selection=Selection(), derivations=build_derivations()),
        clock=clock,
        gpu_timeout_seconds=2.0,
    )


def readings(**reading_fields: Any) -> ProcessReadings:
    facts = {"engine": WHOLE, "visible_pids": frozenset({1, 10, 11, 12}), "sees_host_pids": True, **reading_fields}
    return ProcessReadings(**facts)


def state(samples: tuple[Sample, ...]) -> str:
    (state_label,) = (labels[0] for labels, value in values(samples, catalog.ENGINE_STATE).items() if value == 1)
    return state_label


def list_events(lines: list[Any]) -> list[tuple[str, str]]:
    ours = ("engine is", "engine exited")
    return [(line["event"].split(":")[0], line["log_level"]) for line in lines if line["event"].startswith(ours)]


def test_every_change_of_state_is_reported_once() -> None:
    log_lines = Said(processes=readings())
    subject = sampler(log_lines)
    with capture_logs() as lines:
        for change in (
            {"engine": REFUSED},
            {"engine": "3"},
            {"processes": readings(engine=WHOLE[:1])},
            {"engine": REFUSED, "processes": readings(engine=())},
        ):
            for side, value in change.items():
                setattr(log_lines, side, value)
            ticked(subject)
            ticked(subject)

    assert list_events(lines) == [
        ("engine is starting", "info"),
        ("engine is serving", "info"),
        ("engine is stalled", "warning"),
        ("engine exited", "warning"),
        ("engine is down", "warning"),
    ]
    assert [line["reason"] for line in lines if line["event"] == "engine exited"] == ["gone"]


def leak(state: LeakState, *labels: str) -> Values:
    metric = catalog.LEAK_STATE if len(labels) > 1 else catalog.HOST_LEAK_STATE
    return Values(Sample(metric, (*labels, str(leak_state)), float(leak_state is state)) for leak_state in LeakState)


def test_every_change_of_a_verdict_is_reported_once() -> None:
    subject = Transitions(Selection())
    with capture_logs() as lines:
        for leak_state in (
            LeakState.STABLE,
            LeakState.GROWING,
            LeakState.GROWING,
            LeakState.LEAKING,
            LeakState.UNSETTLED,
        ):
            subject.report_leaks(leak(leak_state, "0", "GPU-a"))
        subject.report_leaks(leak(LeakState.LEAKING, "worker"))

    assert [(line["event"], line["of"], line.get("verdict")) for line in lines] == [
        ("leak suspected", "GPU 0", "growing"),
        ("leak suspected", "GPU 0", "leaking"),
        ("leak no longer suspected", "GPU 0", None),
        ("leak suspected", "host memory of worker", "leaking"),
    ]


def test_instances_of_one_gpu_are_distinguished() -> None:
    subject = Transitions(Selection())
    with capture_logs() as lines:
        for uuid in ("MIG-11111111-2222", "MIG-33333333-4444"):
            subject.report_leaks(leak(LeakState.LEAKING, "1", uuid))

    assert [line["of"] for line in lines] == ["GPU 1 MIG-11111111", "GPU 1 MIG-33333333"]


@pytest.mark.parametrize("blind", [LeakState.UNKNOWN, LeakState.ASLEEP, None])
def test_a_verdict_that_is_unknown_for_a_while_is_not_said_to_be_over(blind: LeakState | None) -> None:
    subject = Transitions(Selection())
    with capture_logs() as lines:
        for leak_state in (LeakState.LEAKING, blind, LeakState.LEAKING, LeakState.STABLE):
            subject.report_leaks(Values(()) if leak_state is None else leak(leak_state, "0", "GPU-a"))

    assert [line["event"] for line in lines] == [
        "leak suspected",
        "leak no longer suspected",
    ]


def test_a_list_of_gpus_that_leaves_out_one_of_the_engines_processes_is_reported_once() -> None:
    subject = Transitions(Selection(listed=("0",)))
    named, other_gpu = (
        gpu(engine=0, attribution=Attribution.UUID),
        gpu(index=1, uuid="GPU-b", engine=0, attribution=None),
    )
    with capture_logs() as lines:
        for held_bytes in (0, 500, 600):
            subject.report(snapshot(gpus=(named, replace(other_gpu, engine_bytes=held_bytes))))

    left_out = [line["left_out"] for line in lines if line["event"].startswith("HEADROOM_GPUS leaves out")]
    assert left_out == ["GPU-b"]


class Unfit(float):
    """A count that the following of runs fails at, and nothing else."""

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


def stepping(text: str) -> EnginePage:
    """Return the page of an engine that runs one request and has taken so many steps, or some that cannot be judged."""
    return page(engine(running=1.0, finished_total=1.0, steps_total=Unfit() if text == "unfit" else float(text)))


def test_a_run_that_cannot_be_followed_costs_its_own_series_and_every_verdict() -> None:
    log_lines = Said(engine="1", processes=readings(), gpus=ONE_GPU)
    subject = sampler(log_lines, parse=stepping)
    ticked(subject)
    log_lines.engine = "unfit"
    with capture_logs() as lines:
        samples = ticked(subject)

    assert not values(samples, catalog.ENGINE_STATE)
    assert values(samples, catalog.ENGINE_RUNNING)
    assert {labels[-1] for labels, value in values(samples, catalog.LEAK_STATE).items() if value} == {"unknown"}
    assert [line["event"] for line in lines if "derivation" in line] == ["derivation failed, its series are absent"]
    log_lines.engine = "2"
    assert state(ticked(subject)) == "serving"


def test_what_was_counted_of_runs_outlives_a_fault_in_following_them() -> None:
    log_lines = Said(processes=readings())
    subject = sampler(log_lines, parse=stepping)
    for engines, processes in (("3", WHOLE), (REFUSED, ()), ("3", WHOLE)):
        log_lines.engine, log_lines.processes = engines, readings(engine=processes)
        ticked(subject)
    log_lines.engine = "unfit"
    assert not values(ticked(subject), catalog.ENGINE_STATE)

    log_lines.engine = "4"
    samples = ticked(subject)

    assert values(samples, catalog.ENGINE_RESTARTS) == {(): 1.0}
    assert values(samples, catalog.ENGINE_EXITS)[("gone",)] == 1
