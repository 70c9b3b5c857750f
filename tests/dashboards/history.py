"""Hours of the daemon's own output over a demo scenario, as a Prometheus scrapes it: OpenMetrics with timestamps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from prometheus_client import Metric, ProcessCollector

from tests.played import SAMPLE_SECONDS, play
from vllm_headroom.daemon.app import read_build
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.expose.metrics import HeadroomCollector
from vllm_headroom_tools.demo.run import SimulatedGpus
from vllm_headroom_tools.demo.world import TABLE, Scenario

Scrape = tuple[float, list[Metric]]
"""When, and what the page had."""

Series = dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]]
"""The points of each series, by its name and its own labels."""

BARE_METAL: Final = {"job": "vllm-headroom", "instance": "10.0.0.7:9839"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is scraped: the sidecar of a simulated engine, until it stops answering; `labels` are the scrape's.

    With `page` the engine shows this recorded one.
    """

    scenario: Scenario
    labels: Mapping[str, str]
    answers_hours: float = inf
    gpus: type[SimulatedGpus] = SimulatedGpus
    page: str | None = None

    @property
    def played(self) -> tuple[Scenario, type[SimulatedGpus], str | None]:
        """What is the same for targets that differ in labels alone."""
        return self.scenario, self.gpus, self.page


def scrapes(
    scenario: Scenario,
    hours: float,
    *,
    ends_seconds: float,
    scrape_seconds: int = SAMPLE_SECONDS,
    seed: int = 0,
    gpus: type[SimulatedGpus] = SimulatedGpus,
    page: str | None = None,
) -> Iterator[Scrape]:
    """Yield each scrape of a daemon that samples `scenario` from its start on."""
    began = ends_seconds - hours * 3600
    process, seconds = ProcessCollector(registry=None), began
    for sampler in play(scenario, hours, began=began, seed=seed, gpus=gpus, page=page):
        if (seconds - began) % scrape_seconds == 0:
            yield seconds, [*_collect(sampler, seconds), *process.collect()]
        seconds += SAMPLE_SECONDS


def _collect(sampler: Sampler, seconds: float) -> Iterator[Metric]:
    return HeadroomCollector(lambda: sampler.published, lambda: seconds, read_build()).collect()


def open_metrics(
    targets: Sequence[Target], hours: float, *, ends_seconds: float, scrape_seconds: int = SAMPLE_SECONDS
) -> str:
    """Return the scrapes of `targets` as one OpenMetrics text, with `up`.

    The format knows no staleness markers: let Prometheus look back for less than two scrapes (--query.lookback-delta).
    """
    families: dict[str, list[str]] = {}
    for scenario, gpus, page in {played_target.played: None for played_target in targets}:
        played = scrapes(
            scenario, hours, ends_seconds=ends_seconds, scrape_seconds=scrape_seconds, gpus=gpus, page=page
        )
        scraped = list(played)
        for target in (target for target in targets if target.played == (scenario, gpus, page)):
            answered = int(min(hours, target.answers_hours) * 3600 / scrape_seconds)
            series = _series(scraped[:answered])
            series["up", ()] = [(at, float(place < answered)) for place, (at, _) in enumerate(scraped)]
            for (family, own), points in series.items():
                head = f"{family}{{{_written({**dict(own), **target.labels})}}}"
                families.setdefault(family, []).extend(f"{head} {value!r} {at:.3f}\n" for at, value in points)
    return "".join(line for lines in families.values() for line in lines) + "# EOF\n"


def _series(scraped: Iterable[Scrape]) -> Series:
    series: Series = {}
    for at, families in scraped:
        for sample in (sample for family in families for sample in family.samples):
            series.setdefault((sample.name, tuple(sample.labels.items())), []).append((at, sample.value))
    return series


def _written(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


if __name__ == "__main__":  # a picture by hand: SCENARIO HOURS FILE
    import time

    chosen = Target(scenario=TABLE[sys.argv[1]], labels=BARE_METAL)
    text = open_metrics([chosen], float(sys.argv[2]), ends_seconds=time.time())
    Path(sys.argv[3]).write_text(text, encoding="utf-8")
