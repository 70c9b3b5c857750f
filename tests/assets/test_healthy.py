"""Ten hours of healthy engines of all sizes and habits: nobody is told anything; of four that are not, somebody is."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.assets.alerts import series_faults
from tests.assets.healthy import Engine, Phase
from tests.assets.promql import RULES

HOURS: Final = 10

H100, SLICE, L4 = 79.65, 9.75, 22.5

level: Final = partial(Phase, minutes=HOURS * 60, running=20, finished=60, kv=0.4)
"""An engine that serves as on any day, but for what is said."""


def asleep(minutes: int, held: float, host: float = 30.0) -> Phase:
    return Phase(minutes=minutes, state="asleep", held=held, host=host)


HEALTHY: Final = (
    Engine(name="h100-2.6-outside", card=H100, share=0.92, phases=(level(outside=2.6),)),
    Engine(
        name="h100-3.6-outside",
        card=H100,
        share=0.92,
        phases=(
            level(minutes=240, outside=3.6),
            level(minutes=120, outside=4.1, running=180, kv=0.9, host=58),
            level(minutes=240, outside=4.1),
        ),
    ),
    Engine(
        name="slice-1g.10gb",
        card=SLICE,
        share=0.92,
        phases=(level(minutes=60, outside=0.55), level(minutes=540, outside=0.62)),
    ),
    Engine(
        name="slice-12gb",
        card=11.75,
        share=0.92,
        phases=(level(minutes=60, outside=0.6), level(minutes=540, outside=0.68)),
    ),
    Engine(
        name="l4-0.95", card=L4, share=0.95, phases=(level(minutes=30, outside=0.7), level(minutes=570, outside=0.85))
    ),
    Engine(name="v0-before-its-first-request", card=22.0, share=0.85, phases=(Phase(minutes=600),), was_asked=False),
    Engine(
        name="slice-that-sleeps",
        card=SLICE,
        share=0.92,
        phases=(level(minutes=180, outside=0.5), asleep(300, 2.6), level(minutes=120, outside=0.5)),
    ),
    Engine(
        name="sleeps-every-8-minutes",
        card=H100,
        share=0.8,
        phases=tuple(each for _ in range(60) for each in (level(minutes=6, outside=3), asleep(4, 3.5, host=60))),
    ),
    Engine(
        name="preempts-every-4-minutes",
        card=H100,
        share=0.92,
        phases=(level(outside=1, kv=0.97, running=200, preempted=0.25, finished=30),),
    ),
    Engine(
        name="full-kv-cache-short-queue",
        card=H100,
        share=0.92,
        phases=(level(outside=1, kv=1, running=256, waiting=8, finished=120, host=62.5),),
    ),
    Engine(
        name="loads-for-40-minutes",
        card=H100,
        share=0.92,
        phases=(Phase(minutes=40, state="starting", held=40, host=61), level(minutes=560, outside=2)),
    ),
    Engine(
        name="restarted-with-more-outside",
        card=H100,
        share=0.92,
        phases=(
            level(minutes=295, outside=0.7),
            Phase(minutes=5, outside=0.7),
            Phase(minutes=2, state="down", ended=1),
            Phase(minutes=12, state="starting"),
            level(minutes=286, outside=3.6),
        ),
    ),
    Engine(
        name="prefill-of-18-minutes",
        card=H100,
        share=0.92,
        phases=tuple(
            each
            for _ in range(20)
            for each in (level(minutes=12), level(minutes=18, running=1, waiting=2, finished=0, kv=0.9))
        ),
    ),
    Engine(
        name="scaled-to-zero",
        card=H100,
        share=0.92,
        phases=(level(minutes=240), Phase(minutes=1, state="down", ended=1), Phase(minutes=359, state=None)),
    ),
    Engine(
        name="rolled-out",
        card=H100,
        share=0.92,
        phases=(
            Phase(minutes=200, state=None),
            Phase(minutes=8, state="down", ended=7),
            Phase(minutes=25, state="starting"),
            level(minutes=367, outside=2),
        ),
    ),
    Engine(
        name="prometheus-was-away",
        card=H100,
        share=0.92,
        phases=(
            level(minutes=200, outside=3.6),
            Phase(minutes=10, missed=True),
            level(minutes=200, outside=3.6),
            Phase(minutes=10, missed=True, state="starting", ended=1),
            Phase(minutes=10, state="starting"),
            level(minutes=170, outside=3),
        ),
    ),
)

ILL: Final = {
    "dies": (
        Engine(
            name="dies",
            card=H100,
            share=0.92,
            phases=(level(minutes=300, outside=2), Phase(minutes=300, state="down", ended=1)),
        ),
        {"HeadroomEngineDied", "HeadroomEngineDown"},
    ),
    "grows": (
        Engine(
            name="grows", card=H100, share=0.9, phases=(level(minutes=300, outside=2), level(minutes=300, outside=6))
        ),
        {"HeadroomMemoryDiscrepancy", "HeadroomMemoryDiscrepancyHigh"},
    ),
    "fills-its-host": (
        Engine(name="fills-its-host", card=H100, share=0.92, phases=(level(minutes=300), level(minutes=300, host=62))),
        {"HeadroomHostMemoryLow"},
    ),
    "hangs": (
        Engine(name="hangs", card=H100, share=0.92, phases=(level(minutes=300), Phase(minutes=300, state="stalled"))),
        {"HeadroomEngineStalled"},
    ),
}


def test_sixteen_situations_are_simulated_for_ten_hours() -> None:
    everybody = (*HEALTHY, *(engine for engine, _ in ILL.values()))

    assert len({engine.name for engine in HEALTHY}) == 16
    assert {sum(phase.minutes for phase in engine.phases) for engine in everybody} == {HOURS * 60}
    names = {series for engine in everybody for series, _ in engine.series()}
    assert [fault for series in sorted(names) for fault in series_faults(series)] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_none_of_the_healthy_is_told_and_each_that_is_ill_is(tmp_path: Path) -> None:
    told = [(name, alert) for name, (_, alerts) in ILL.items() for alert in alerts]
    samples = [{"labels": f'{{alertname="{alert}",pod="{name}"}}', "value": 1} for name, alert in told]
    engines = (*HEALTHY, *(engine for engine, _ in ILL.values()))
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for engine in engines for name, values in engine.series()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, pod) (count_over_time(ALERTS{alertstate="firing"}[11h]))',
                "eval_time": f"{HOURS * 60 - 1}m",
                "exp_samples": samples,
            }
        ],
    }
    file = tmp_path / "healthy.yaml"
    rules = {"rule_files": [str(RULES / "headroom.yaml")], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(yaml.safe_dump(rules, width=1_000_000), encoding="utf-8")

    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
