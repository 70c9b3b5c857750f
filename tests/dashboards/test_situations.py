"""Alerts and `headroom_situation` agree: by name, and over hours of the daemon's own output in every scenario."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final

import pytest
from msgspec.structs import astuple

from tests.assets.promql import written_rules
from tests.dashboards.rules import alerting
from tests.dashboards.store import SCRAPE_SECONDS, TARGETS, Prometheus
from vllm_headroom.derive.verdicts import ENGINE_SENTENCES, GPU_ALERTS, HOST_ALERTS
from vllm_headroom.vocabulary import Situation

ALERTS: Final[Mapping[Situation, str]] = {
    Situation.CRASH_LOOP: "EngineCrashLoop ModelCrashLoop",
    Situation.DOWN: "EngineDown EngineDied ModelDown ReplicasLost HostOomKill MemoryNotReleased",
    Situation.STALLED: "EngineStalled",
    Situation.LEAKING: "OutOfMemorySoon GpuMemoryLeak GpuMemoryGrowing",
    Situation.HOST_LEAK: "HostOutOfMemorySoon HostMemoryRunsOut HostMemoryLeak SharedMemoryGrowing",
    Situation.LOW_MEMORY: "GpuMemoryLow GpuMemoryPeak GpuMemoryTight HostMemoryLow UnifiedMemoryCached AllocatorRetries"
    " AllocatorOutOfMemory PeakDoesNotFit",
    Situation.OVER_BUDGET: "MemoryDiscrepancy MemoryDiscrepancyHigh OutsideTorchGrowing",
    Situation.NEIGHBOUR: "NeighbourGrowing NeighbourFillsGpu MemoryLeftBehind",
    Situation.GROWING: "GpuMemoryGrowing",
    Situation.STRANDED: "KvCacheStranded KvBlocksLeak KvBlocksLeakSuspected",
    Situation.BLIND: "SourceDown SidecarBlind SampleStale InputMissing Down Absent SidecarRestarts GpuLost"
    " EngineLostGpu",
    Situation.FILLING: "",
    Situation.STARTING: "EngineStuckStarting",
    Situation.ASLEEP: "SleepKeepsMemory SleepResidueGrowing",
    Situation.HEALTHY: "KvCacheThrashing QueueBacklog PrefixCacheNotPaying PrefixCacheCannotHit GpuXid GpuHot",
}
"""The alerts of each situation; in the last five it may hold without any."""

LASTING: Final = tuple(Situation)[: tuple(Situation).index(Situation.FILLING)]
WINDOW_SECONDS: Final = 600.0
"""The rules look back so far at most before `for` begins, to get over a missed scrape."""


def alerts(situation: Situation) -> set[str]:
    return {f"Headroom{alert}" for alert in ALERTS[situation].split()}


def test_every_shipped_alert_belongs_to_a_situation() -> None:
    shipped = {rule["alert"] for rule in written_rules() if "alert" in rule}

    assert set().union(*map(alerts, Situation)) == shipped
    assert all(alerts(situation) for situation in LASTING)


def test_the_alert_of_a_sentence_is_one_of_its_situation() -> None:
    situation_of = {row.alert: row.situation for row in ENGINE_SENTENCES.values() if row.alert}
    situation_of |= dict.fromkeys(astuple(GPU_ALERTS), Situation.LEAKING)
    situation_of |= dict.fromkeys(astuple(HOST_ALERTS), Situation.HOST_LEAK)

    assert [(alert, situation) for alert, situation in situation_of.items() if alert not in alerts(situation)] == []


def runs(prometheus: Prometheus, labels: Mapping[str, str]) -> Iterator[tuple[Situation, list[float]]]:
    """Yield the situations of a target one after another, each with its times."""
    chosen = ",".join(f'{name}="{value}"' for name, value in labels.items())
    situations_by_time = {
        float(at): Situation(series["metric"]["situation"])
        for series in prometheus.over_time(f"headroom_situation{{{chosen}}} == 1", SCRAPE_SECONDS)
        for at, _ in series["values"]
    }
    for situation, times in groupby(sorted(situations_by_time), key=situations_by_time.__getitem__):
        yield situation, list(times)


def test_leaks_neighbours_and_crash_loops_last_somewhere(prometheus: Prometheus) -> None:
    lasted = {
        situation
        for target in TARGETS.values()
        for situation, times in runs(prometheus, target.labels)
        if times[-1] - times[0] > 2 * WINDOW_SECONDS
    }

    assert lasted >= {Situation.LEAKING, Situation.NEIGHBOUR, Situation.CRASH_LOOP}


def test_a_situation_that_lasts_has_an_alert_that_fires(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for target in TARGETS:
        with subtests.test(target=target):
            labels = TARGETS[target].labels
            chosen = ",".join(f'{name}="{value}"' for name, value in labels.items())
            firing = [
                (series["metric"]["alertname"], float(at))
                for series in prometheus.over_time(f'ALERTS{{alertstate="firing",{chosen}}}', SCRAPE_SECONDS)
                for at, _ in series["values"]
            ]
            waits = {rule["alert"]: rule.get("for", "0s") for rule in alerting()}

            for situation, times in runs(prometheus, labels):
                longest = max((seconds(waits[alert]) for alert in alerts(situation)), default=0.0)
                if situation in LASTING and times[-1] - times[0] > WINDOW_SECONDS + longest:
                    assert any(name in alerts(situation) and times[0] <= at <= times[-1] for name, at in firing), (
                        situation
                    )


def seconds(duration: str) -> float:
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]
