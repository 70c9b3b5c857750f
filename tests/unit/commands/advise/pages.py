"""Pages of a sidecar made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_headroom import catalog
from vllm_headroom.model import Metric

MIB: Final = 2**20
GPU: Final = {"gpu": "0", "uuid": "GPU-a"}
ENGINE: Final = {"model_name": "m", "engine": "0"}
Lines = dict[tuple[Metric, tuple[tuple[str, str], ...]], float]


def line(metric: Metric, labels: Mapping[str, str]) -> tuple[Metric, tuple[tuple[str, str], ...]]:
    return metric, tuple(sorted(labels.items()))


def of_gpu(metric: Metric, **labels: str) -> tuple[Metric, tuple[tuple[str, str], ...]]:
    return line(metric, GPU | labels)


def of_engine(metric: Metric, **labels: str) -> tuple[Metric, tuple[tuple[str, str], ...]]:
    return line(metric, ENGINE | labels)


def healthy(*, engine_mib: int = 75_000, other_mib: int = 0, peak_mib: int | None = None) -> Lines:
    """Return the lines of an 81,559 MiB GPU with 559 MiB reserved, whose engine was instructed to use 0.92 of it."""
    used = engine_mib + other_mib + 20
    lines: Lines = {
        line(catalog.BUILD_INFO, {"version": "1", "revision": "", "python_version": "3"}): 1,
        line(catalog.SAMPLE_AGE, {}): 2,
        line(catalog.INPUT_AVAILABLE, {"input": "sleep_state"}): 1,
        line(catalog.INPUT_AVAILABLE, {"input": "kv_cache_memory_bytes"}): 0,
        of_gpu(catalog.GPU_INFO, name="H100", attribution="process"): 1,
        of_gpu(catalog.GPU_MEMORY_TOTAL): 81_559 * MIB,
        of_gpu(catalog.GPU_MEMORY_RESERVED): 559 * MIB,
        of_gpu(catalog.GPU_MEMORY_USED): used * MIB,
        of_gpu(catalog.GPU_MEMORY_USED_PEAK): (used if peak_mib is None else peak_mib) * MIB,
        of_gpu(catalog.GPU_MEMORY_HELD, holder="engine"): engine_mib * MIB,
        of_gpu(catalog.GPU_MEMORY_HELD, holder="other"): other_mib * MIB,
        of_gpu(catalog.GPU_MEMORY_HELD, holder="unattributed"): 20 * MIB,
        of_gpu(catalog.MEMORY_REPORTED, basis="budget"): 0.92 * 81_559 * MIB,
        of_engine(catalog.ENGINE_INFO, profile="vllm"): 1,
        line(catalog.HOST_MEMORY, {"process": "worker"}): 5_000 * MIB,
    }
    readings = {
        catalog.ENGINE_AWAKE: 1,
        catalog.ENGINE_RUNNING: 80,
        catalog.ENGINE_WAITING: 0,
        catalog.ENGINE_FINISHED: 50_000,
        catalog.ENGINE_PREEMPTIONS: 0,
        catalog.ENGINE_KV_USED: 0.4,
        catalog.ENGINE_KV_CAPACITY_TOKENS: 400_000,
        catalog.ENGINE_KV_TOKENS_PER_REQUEST: 2_000,
        catalog.ENGINE_PREFIX_QUERIES: 75_000_000,
        catalog.ENGINE_PREFIX_HITS: 30_000_000,
        catalog.ENGINE_PREFIX_HIT_RATIO: 0.4,
    }
    lines |= {of_engine(metric): value for metric, value in readings.items()}
    return lines | state("stable") | host_state("stable")


def state(name: str) -> Lines:
    states = ("unknown", "warming_up", "unsettled", "stable", "growing", "leaking", "asleep")
    return {of_gpu(catalog.LEAK_STATE, state=state): float(state == name) for state in states}


def host_state(name: str) -> Lines:
    states = ("stable", "growing", "leaking")
    labels = ({"process": "worker", "state": state} for state in states)
    return {line(catalog.HOST_LEAK_STATE, label): float(label["state"] == name) for label in labels}


def text(lines: Mapping[Any, float]) -> str:
    """Return the page."""
    return "".join(f"{metric.name}{_braced(labels)} {value}\n" for (metric, labels), value in lines.items())


def _braced(labels: tuple[tuple[str, str], ...]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}"
