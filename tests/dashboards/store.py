"""A real Prometheus over hours of the daemon's own output in every scenario, with its recording rules and alerts."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from msgspec.structs import replace

from tests.dashboards.cards import EightGpus, MigInstances, SmallCard, numbered_uuid
from tests.dashboards.history import BARE_METAL, Target, open_metrics
from tests.dashboards.rules import evaluated
from vllm_headroom import catalog
from vllm_headroom.model import Metric
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import Work
from vllm_headroom_tools.demo.run import SimulatedGpus
from vllm_headroom_tools.demo.world import TABLE, Scenario, Visits

END: Final = 1_767_225_600
"""The present, the same in every run: the first second of 2026."""

HOURS: Final = 2.5
"""The leak is sure after 1.3 h, the restart comes after 2 h."""

BEGIN: Final = END - int(HOURS * 3600)

SCRAPE_SECONDS: Final = 60
NOW: Final = END - 5
LOOKBACK: Final = "100s"
"""Less than two scrapes: what a scrape lacks is gone at the next, as with a scraping Prometheus."""

STARTS_SECONDS: Final = 60
BARE: Final = "leak on bare metal"
PEAKS: Final = "eight GPUs"
"""The target whose probe measures the peaks of steps."""

ROOM_BYTES: Final = (6 * GIB, 3 * GIB)
"""What a step may take on its GPUs 0 and 1."""

SAFE_PROMPT_TOKENS: Final = (8192, 4096)
"""The tokens of the largest prompt that fits on its GPUs 0 and 1."""

PEAK_BYTES: Final = {Work.PREFILL: (1 * GIB, 1 * GIB), Work.PROMPT_LOGPROBS: (5 * GIB, 2 * GIB)}
"""The peaks on its GPUs 0 and 1, by the kind of work."""

RESTART: Final = replace(TABLE["restart"], loading_seconds=2 * (2.0 * SCRAPE_SECONDS,))
"""As in the demo, but so long that two scrapes see a start."""

ENGINE_DOWN: Final = Scenario(
    name="down", restart_after_seconds=2 * (HOURS * 3600 - 2 * SCRAPE_SECONDS,), loading_seconds=RESTART.loading_seconds
)
"""The engine ends two scrapes before the present, and is not back."""


ASLEEP: Final = Scenario(
    name="asleep", sleeps=Visits(pause_seconds=2 * (HOURS * 3600 - 1_800,), stay_seconds=2 * (7_200,), size=(1.0, 1.0))
)
"""The engine sleeps for the last half hour."""


def _pod(
    scenario: Scenario,
    number: int,
    answers_hours: float = HOURS,
    gpus: type[SimulatedGpus] = SimulatedGpus,
    **extra_labels: str,
) -> Target:
    name = f"vllm-{scenario.name}-{number}"
    labels = {"namespace": f"team-{number}", "job": f"team-{number}/vllm-headroom", "pod": name}
    labels |= {"instance": f"10.1.0.{number}:9839", **extra_labels}
    return Target(scenario=scenario, labels=labels, answers_hours=answers_hours, gpus=gpus)


TARGETS: Final[Mapping[str, Target]] = {
    "healthy": _pod(TABLE["healthy"], 1, cluster="eu"),
    "leak": _pod(TABLE["leak"], 2),
    "neighbour": _pod(TABLE["neighbour"], 3),
    "restart": _pod(RESTART, 4),
    "burst": _pod(TABLE["burst"], 5),
    "engine down": _pod(ENGINE_DOWN, 6),
    "sidecar down": _pod(TABLE["healthy"], 7, answers_hours=HOURS - 0.25),
    "crash": _pod(TABLE["crash"], 8),
    "asleep": _pod(ASLEEP, 9),
    "eight GPUs": _pod(TABLE["leak"], 10, gpus=EightGpus),
    "MIG": _pod(TABLE["leak"], 12, gpus=MigInstances),
    "small card": _pod(TABLE["healthy"], 11, gpus=SmallCard),
    BARE: Target(scenario=TABLE["leak"], labels=BARE_METAL),
}
"""What is scraped, by name."""


class Prometheus:
    """Asks a Prometheus; what it refuses is an error."""

    def __init__(self, url: str, pid: int) -> None:
        self.pid = pid
        self.chosen: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[dict[str, list[str]], dict[str, str]]] = {}
        self._client = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def ask(self, path: str, **form: str) -> Any:
        answer = self._client.post(f"/api/v1/{path}", data=form)
        reply = answer.json()
        assert reply["status"] == "success", f"{form}: {reply.get('error')}"
        return reply["data"]

    def instant(self, expr: str) -> list[dict[str, Any]]:
        """Return the series that the expression has now, each with its one value."""
        answer = self.ask("query", query=expr, time=str(NOW))["result"]
        return [{"metric": series["metric"], "values": [series["value"]]} for series in answer]

    def over_time(self, expr: str, step_seconds: float) -> list[dict[str, Any]]:
        """Return the series that the expression has at any time."""
        answer = self.ask("query_range", query=expr, start=str(BEGIN), end=str(NOW), step=str(step_seconds))["result"]
        return list(answer)

    def label_values(self, series: str, label: str) -> list[str]:
        """Return the values that a label of these series has had."""
        form = {"match[]": series, "start": str(BEGIN), "end": str(NOW)}
        return sorted({found_series[label] for found_series in self.ask("series", **form) if found_series.get(label)})

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of rules, with how each fared."""
        return list(self._client.get("/api/v1/rules").json()["data"]["groups"])

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def missing() -> str:
    """Return the programs that are not there."""
    return " and ".join(name for name in ("prometheus", "promtool") if shutil.which(name) is None)


def store(folder: Path) -> None:
    """Store what a Prometheus has that scraped every target for HOURS, and evaluated the rules."""
    scraped = open_metrics(list(TARGETS.values()), HOURS, ends_seconds=END, scrape_seconds=SCRAPE_SECONDS)
    add(folder, "scraped", [scraped])
    add(folder, "engine", _own_page(TARGETS["leak"]))
    add(folder, "peaks", _peaks(TARGETS[PEAKS]))
    with running(folder) as prometheus:
        text = evaluated(lambda expr: prometheus.over_time(expr, SCRAPE_SECONDS), range(BEGIN, END, SCRAPE_SECONDS))
    add(folder, "rules", [text])  # blocks that are added to a running Prometheus are seen only after a minute


def _own_page(target: Target) -> Iterator[str]:
    """Yield what Prometheus has of the page of vLLM beside a sidecar: first tokens within 0.1 to 1 s, and failures."""
    labels = ",".join(
        f'{name}="{value}"'
        for name, value in {
            **target.labels,
            "job": f"{target.labels['namespace']}/vllm",
            "instance": target.labels["instance"].replace("9839", "8000"),
        }.items()
    )
    counted = {
        f'vllm:time_to_first_token_seconds_bucket{{model_name="simulated-8b",engine="0",le="0.1",{labels}}}': 100,
        f'vllm:time_to_first_token_seconds_bucket{{model_name="simulated-8b",engine="0",le="0.5",{labels}}}': 180,
        f'vllm:time_to_first_token_seconds_bucket{{model_name="simulated-8b",engine="0",le="1.0",{labels}}}': 200,
        f'vllm:time_to_first_token_seconds_bucket{{model_name="simulated-8b",engine="0",le="+Inf",{labels}}}': 200,
        f'vllm:request_success_total{{model_name="simulated-8b",engine="0",finished_reason="error",{labels}}}': 2,
        f'http_requests_total{{handler="/v1/completions",method="POST",status="5xx",{labels}}}': 3,
    }
    for series, each_scrape in counted.items():
        for number, at in enumerate(range(BEGIN, END, SCRAPE_SECONDS)):
            yield f"{series} {number * each_scrape} {at}\n"
    yield "# EOF\n"


def _peaks(target: Target) -> Iterator[str]:
    """Yield what Prometheus has of the peaks of steps on two GPUs of a target."""
    values: list[tuple[Metric, tuple[str, ...], float]] = []
    for number, room_bytes in enumerate(ROOM_BYTES):
        gpu = (str(number), numbered_uuid(number))
        values.append((catalog.ENGINE_PEAK_ROOM, gpu, room_bytes))
        values.append((catalog.ENGINE_SAFE_PROMPT_TOKENS, gpu, SAFE_PROMPT_TOKENS[number]))
        values.append((catalog.ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS, gpu, 1024))
        values.append((catalog.ENGINE_SAFE_IMAGE_PIXELS, gpu, 1_000_000))
        for work, peaks_bytes in PEAK_BYTES.items():
            values.append((catalog.ENGINE_PEAK, (*gpu, work), peaks_bytes[number]))
            values.append((catalog.ENGINE_PEAK_RATIO, (*gpu, work), peaks_bytes[number] / room_bytes))
    for metric, label_values, value in values:
        labels = {**target.labels, **dict(zip(metric.labels, label_values, strict=True))}
        series = ",".join(f'{name}="{text}"' for name, text in labels.items())
        for at in range(BEGIN, END, SCRAPE_SECONDS):
            yield f"{metric.name}{{{series}}} {value} {at}\n"
    yield "# EOF\n"


def add(folder: Path, name: str, text: Iterable[str]) -> None:
    """Store an OpenMetrics text, or its lines, in `data` of this folder."""
    file = folder / f"{name}.txt"
    with file.open("w", encoding="utf-8") as out:
        out.writelines(text)
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(file), str(folder / "data")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file.unlink()


@contextmanager
def running(folder: Path, config: Mapping[str, Any] = {}, lookback: str = LOOKBACK) -> Iterator[Prometheus]:
    """Give a Prometheus over what is stored in `data` of this folder."""
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--storage.tsdb.retention.time=100y",
        f"--query.lookback-delta={lookback}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        prometheus = Prometheus(f"http://{address}", process.pid)
        try:
            deadline = time.monotonic() + STARTS_SECONDS
            while not prometheus.ready():
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, "Prometheus does not start"
                time.sleep(0.05)
            yield prometheus
        finally:
            prometheus.close()
            process.terminate()
