"""A thousand sidecars with eight GPUs each, in a real Prometheus that evaluates the shipped rules."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.samples import Sample

from tests.assets.promql import RULES
from tests.dashboards.history import scrapes
from tests.dashboards.store import Prometheus, add, running
from vllm_headroom.model import GpuReadings
from vllm_headroom_tools.demo.run import SimulatedGpus
from vllm_headroom_tools.demo.world import TABLE

SIDECARS: Final = 1_000
GPUS: Final = 8
LEAKS_EVERY: Final = 100
NAMESPACES: Final = 40
OWN: Final = {"model_name": 25, "uuid": SIDECARS}
"""How many values a label of the page has over the fleet."""

HOURS: Final = 2.0
"""The leak is sure after 1.3 h."""

EVALUATED_SECONDS: Final = 300
LOOKBACK: Final = "12h"
"""One scrape of each is stored: it has to be seen for as long as is measured."""

RULES_FILE: Final = {"rule_files": ["headroom.yaml"], "global": {"evaluation_interval": "15s"}}


class EightGpus(SimulatedGpus):
    """Eight that are alike."""

    async def read(self, timeout_seconds: float) -> GpuReadings:
        """Return one reading of each."""
        readings = await super().read(timeout_seconds)
        devices = tuple(replace(readings.devices[0], index=index, uuid=f"GPU-{index}") for index in range(GPUS))
        return replace(readings, devices=devices)


@contextmanager
def fleet(folder: Path) -> Iterator[Prometheus]:
    """Give a Prometheus with the last page of every sidecar, and what the rules reported about them once."""
    now = time.time() - 5
    pages = {
        name: list(scrapes(TABLE[name], HOURS, ends_seconds=now, gpus=EightGpus))[-1][1] for name in ("healthy", "leak")
    }
    add(folder, "fleet", _lines(pages, now))
    shutil.copy(RULES / "headroom.yaml", folder)
    with running(folder, RULES_FILE, LOOKBACK) as prometheus:
        _evaluated(prometheus)
    with running(folder, {}, LOOKBACK) as prometheus:
        yield prometheus


def _evaluated(prometheus: Prometheus) -> None:
    """Wait until every rule was evaluated."""
    deadline = time.monotonic() + EVALUATED_SECONDS
    while any(rule["health"] == "unknown" for group in prometheus.groups() for rule in group["rules"]):
        assert time.monotonic() < deadline, "the rules are not evaluated"
        time.sleep(1)


def _lines(pages: Mapping[str, list[Metric]], now: float) -> Iterator[str]:
    """Yield the text, one family after the other."""
    up = [Sample("up", {}, 1.0)]
    for samples in (*_families(pages), {"healthy": up, "leak": up}):
        for number in range(SIDECARS):
            for sample in samples["leak" if number % LEAKS_EVERY == 0 else "healthy"]:
                own = _labels(number) | sample.labels
                own |= {
                    label: f"{own[label]}-{number % label_count}" for label, label_count in OWN.items() if label in own
                }
                written = ",".join(f'{label}="{value}"' for label, value in own.items())
                yield f"{sample.name}{{{written}}} {sample.value!r} {now:.3f}\n"
    yield "# EOF\n"


def _families(pages: Mapping[str, list[Metric]]) -> Iterator[Mapping[str, list[Sample]]]:
    """Yield the samples of each name, by the page they are on."""
    names: dict[str, dict[str, list[Sample]]] = {}
    for page, families in pages.items():
        for sample in (sample for family in families for sample in family.samples):
            names.setdefault(sample.name, {page: [] for page in pages})[page].append(sample)
    yield from names.values()


def _labels(number: int) -> dict[str, str]:
    team = f"team-{number % NAMESPACES}"
    return {
        "cluster": "eu",
        "namespace": team,
        "job": f"{team}/vllm-headroom",
        "pod": f"vllm-{number}",
        "instance": f"10.{number // 250}.0.{number % 250}:9839",
    }
