"""From the engine's memory to the phone: the daemon, Prometheus, Alertmanager and what PagerDuty is notified of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.incidents import closed, find_events, first, mutes
from tests.e2e.paging import KEYS, MISSING, Alertmanager, Target, paging
from tests.fakes.engine_server import Answer, EngineServer, page
from tests.fakes.pagerduty import PagerDuty
from tests.process import daemon

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: apt-get install {' '.join(MISSING)}")

DEMO: Final = ("demo", "--speed", "500", "--sample-interval-seconds", "60")
"""The leak is sure after nine seconds, memory lasts for seventy, and a busy machine can take eight samples a second."""

GPU: Final = 'gpu="0",uuid="GPU-0"'
HEALTHY: Final = (
    f'headroom_gpu_info{{{GPU},name="H200",attribution="process"}} 1',
    f"headroom_gpu_memory_free_bytes{{{GPU}}} {4 << 30}",
    f"headroom_leak_bytes_per_second{{{GPU}}} {2 << 20}",
    'headroom_engine_info{model_name="llama",engine="0",profile="vllm"} 1',
)


def serve(*lines: str) -> Answer:
    return page("\n".join((*HEALTHY, *lines, "")), headers=("Content-Type: text/plain; version=0.0.4",))


def leak(state: str, seconds: int) -> tuple[str, ...]:
    return (
        f'headroom_leak_state{{{GPU},state="{state}"}} 1',
        f"headroom_time_to_oom_seconds{{{GPU}}} {seconds}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Engines whose pages the test writes, as pods of the namespace `prod`."""

    alertmanager: Alertmanager
    pagerduty: PagerDuty
    engines: dict[str, EngineServer]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    names = ("llama-0", "llama-1", "qwen-0")
    engines = {name: EngineServer(serve()) for name in names}
    targets = [
        Target(address=f"127.0.0.1:{engine.port}", labels={"namespace": "prod", "pod": name})
        for name, engine in engines.items()
    ]
    folder = tmp_path_factory.mktemp("paging")
    with PagerDuty(KEYS.values()) as pagerduty, paging(folder, pagerduty.url, targets) as alertmanager:
        yield Bench(alertmanager=alertmanager, pagerduty=pagerduty, engines=engines)
    for engine in engines.values():
        engine.close()
    assert not pagerduty.refused


def test_a_leak_opens_an_incident_and_its_end_closes_it(tmp_path: Path) -> None:
    with PagerDuty(KEYS.values()) as pagerduty, daemon(*DEMO, "--scenario", "leak") as leaking:
        pagerduty.throttled = 2
        address = leaking.url.removeprefix("http://")
        with paging(tmp_path, pagerduty.url, [Target(address=address)]) as alertmanager:
            opened = first(pagerduty, source=address, told="critical")
            mutes(alertmanager, "HeadroomGpuMemoryLeak", alertname="HeadroomGpuMemoryGrowing")
            leaking.stop()
            with daemon(*DEMO, "--scenario", "healthy", LISTEN_PORT=address.rpartition(":")[2]):
                closed(pagerduty, opened)

    assert [status for status, _ in pagerduty.refused] == [429, 429]
    assert opened.routing_key == KEYS["ml-platform"]
    assert opened.payload["source"] == address
    assert re.fullmatch(
        r"\S+ runs out of GPU memory in about \d+[dhms]( \d+[hms])?: it grows without load to explain it\. "
        rf"{re.escape(address)}, GPU 0",
        opened.payload["summary"],
    )
    assert opened.payload["severity"] == "warning", "it rings when less than an hour is left, and not twice"
    assert opened.payload["custom_details"]["num_firing"] in {1, "1"}


def test_a_page_notifies_though_the_warning_is_open_and_mutes_what_is_less(bench: Bench) -> None:
    pagerduty, engine, other_engine = bench.pagerduty, bench.engines["llama-0"], bench.engines["llama-1"]

    engine.answer = serve(*leak("growing", 80_000))
    warning = first(pagerduty, source="prod/llama-0", told="warning")
    engine.answer = serve(*leak("leaking", 1_800))
    other_engine.answer = serve(*leak("leaking", 36_000))
    paged = first(pagerduty, source="prod/llama-0", severity="critical")
    compared = first(pagerduty, source="prod/llama-1", told="critical")
    for name in ("HeadroomGpuMemoryLeak", "HeadroomGpuMemoryGrowing"):
        mutes(bench.alertmanager, "HeadroomOutOfMemorySoon", alertname=name, pod="llama-0")
    engine.answer = other_engine.answer = serve()
    closed(pagerduty, paged)
    closed(pagerduty, compared)

    assert warning.notifies
    assert paged.notifies
    assert warning.routing_key == paged.routing_key == KEYS["ml-platform"]
    assert not find_events(pagerduty, source="prod/llama-0", told="critical"), "a muted alert is not sent"
    assert paged.payload["summary"] == "llama runs out of GPU memory in about 30m: it leaks. prod/llama-0, GPU 0"
    assert "GPU 0 of prod/llama-0: out of memory in about 30m" in paged.payload["custom_details"]["firing"]
    assert "2MiB per second" in paged.payload["custom_details"]["firing"]
    assert "4GiB are free" in paged.payload["custom_details"]["firing"]
    assert paged.body["links"] == [
        {"text": "Runbook", "href": "https://runbooks.example/HeadroomOutOfMemorySoon"},
        {
            "text": "Dashboard",
            "href": "https://grafana.example/d/headroom?var-namespace=prod&var-pod=llama-0"
            f"&var-instance=127.0.0.1:{engine.port}&var-uuid=GPU-0",
        },
    ]


def test_each_kind_of_problem_reaches_its_team(bench: Bench) -> None:
    bench.engines["qwen-0"].answer = serve(
        *leak("leaking", 36_000),
        'headroom_engine_requests_waiting{model_name="qwen",engine="0"} 50',
        'headroom_engine_requests_running{model_name="qwen",engine="0"} 4',
        f"headroom_gpu_temperature_celsius{{{GPU}}} 95",
        'headroom_source_up{source="nvml"} 0',
    )

    events_by_area = {
        area: first(bench.pagerduty, source="prod/qwen-0", **{"class": area})
        for area in ("memory", "engine", "gpu", "sidecar")
    }

    assert {area: event.routing_key for area, event in events_by_area.items()} == {
        "memory": KEYS["ml-platform"],
        "engine": KEYS["ml-platform"],
        "gpu": KEYS["infrastructure"],
        "sidecar": KEYS["observability"],
    }
    assert len({event.dedup_key for event in events_by_area.values()}) == 4


def test_an_alert_with_few_labels_and_no_annotations_is_reported_too(bench: Bench) -> None:
    bench.alertmanager.post({"alertname": "HeadroomDown", "severity": "warning", "area": "sidecar"})

    event = first(bench.pagerduty, source="vllm-headroom", severity="warning")

    assert event.routing_key == KEYS["observability"]
    assert event.payload["summary"] == "HeadroomDown"
    assert not event.body.get("links")
    assert "<no value>" not in str(event.body)


def test_an_information_reaches_nobody(bench: Bench) -> None:
    labels = {"area": "engine", "pod": "llama-2"}
    bench.alertmanager.post({"alertname": "HeadroomPrefixCacheNotPaying", "severity": "info", **labels})
    bench.alertmanager.post({"alertname": "HeadroomQueueBacklog", "severity": "warning", **labels})

    first(bench.pagerduty, source="llama-2")

    assert [event.payload["severity"] for event in find_events(bench.pagerduty, source="llama-2")] == ["warning"]
