"""The exporter that one writes in an afternoon: each scrape reads everything again, and parses the whole page.

Arguments: the engine's URL and the port to serve on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import httpx
import pynvml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

GPU = ("gpu", "uuid")


class Naive(Collector):
    """NVML and the engine's page, read at the scrape."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.Client()
        pynvml.nvmlInit()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from _gpus()
        for family in text_string_to_metric_families(self._client.get(self._url).text):
            if family.name.startswith("vllm:"):
                for sample in family.samples:
                    metric = GaugeMetricFamily(
                        f"naive_{sample.name.replace(':', '_')}", "It.", labels=list(sample.labels)
                    )
                    metric.add_metric(list(sample.labels.values()), sample.value)
                    if not sample.name.endswith("_bucket"):
                        yield metric


def _gpus() -> Iterator[GaugeMetricFamily]:
    used = GaugeMetricFamily("naive_gpu_memory_used_bytes", "Used.", labels=GPU)
    busy = GaugeMetricFamily("naive_gpu_utilization_ratio", "Busy.", labels=GPU)
    held_gauge = GaugeMetricFamily("naive_gpu_process_bytes", "Held.", labels=(*GPU, "pid"))
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        labels = [str(index), str(pynvml.nvmlDeviceGetUUID(handle))]
        used.add_metric(labels, pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        busy.add_metric(labels, pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            held_gauge.add_metric([*labels, str(process.pid)], process.usedGpuMemory or 0)
    return iter((used, busy, held_gauge))


if __name__ == "__main__":
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Naive(sys.argv[1]))
    start_http_server(int(sys.argv[2]), addr="127.0.0.1", registry=registry)
    threading.Event().wait()
