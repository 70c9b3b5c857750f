"""What the doctor calls absent is what the daemon's derivations leave out, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from tests.samples import engine, failure, gpu, page, snapshot
from vllm_headroom.catalog import METRICS
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.derive.tick import answer, build_derivations
from vllm_headroom.model import (
    INPUTS,
    EnginePage,
    EngineProcess,
    EngineReading,
    HostMemory,
    Pool,
    ReadingTime,
    Snapshot,
)
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.vocabulary import HostPart, Role, Source
from vllm_headroom_tools.doctor import engine as engine_findings
from vllm_headroom_tools.doctor import engine as offers
from vllm_headroom_tools.doctor import gpus
from vllm_headroom_tools.doctor import gpus as processes
from vllm_headroom_tools.doctor.engine import SERIES, list_lost_series

GIB = 2**30
STEP_SECONDS = 30
STEPS = 150
FIELDS = {page_input.name: field for field, page_input in INPUTS.items()}
AT_REST = {
    "headroom_engine_exit_requests",
    "headroom_engine_kv_cache_stranded_ratio",
    "headroom_sleep_residue_bytes",
}
"""What is there only while no request runs, after a sleep or after an exit: none of these tests has one."""

ELSEWHERE = (
    "headroom_gpu_",
    "headroom_host_leak_bytes",
    "headroom_host_time_to_oom",
    "headroom_role",
    "headroom_situation",
    "headroom_unified",
)
"""What begins so is not in this world: a GPU's other facts, a leak on the host, PSI, and what follows from verdicts."""

CONFIGURED = {
    "headroom_allocator_allocated_bytes",
    "headroom_allocator_ooms_total",
    "headroom_allocator_reserved_bytes",
    "headroom_allocator_retries_total",
    "headroom_engine_kv_cache_token_used_ratio",
    "headroom_engine_memory_bytes",
    "headroom_engine_peak_bytes",
    "headroom_engine_peak_ratio",
    "headroom_engine_peak_room_bytes",
    "headroom_engine_peak_spread_bytes",
    "headroom_engine_refused_bytes",
    "headroom_engine_safe_image_pixels",
    "headroom_engine_safe_prompt_logprobs_tokens",
    "headroom_engine_safe_prompt_tokens",
    "headroom_engine_startup_bytes",
    "headroom_engines",
    "headroom_eviction_requests_total",
    "headroom_gate_open",
    "headroom_last_incident_timestamp_seconds",
    "headroom_leak_location",
    "headroom_web_config_reload_success",
}
"""What is there only with a probe inside the engine, its log, gates, a folder for incidents or a web configuration."""

READING_TIMES = tuple(ReadingTime(source=source, seconds=0.1, ended_monotonic_seconds=1.0) for source in Source)


def reading(step: int) -> EngineReading:
    """Return an engine that offers everything and works at the same pace all the time."""
    done = 300.0 * step
    return engine(
        running=8.0,
        waiting=1.0,
        finished_total=done,
        preemptions_total=0.0,
        prompt_tokens_total=done,
        generation_tokens_total=done,
        kv_used_ratio=0.5,
        kv_capacity_tokens=1000.0,
        prefix_queries_total=done,
        prefix_hits_total=done / 2,
        awake=True,
        gpu_memory_utilization_ratio=0.9,
        started_at_seconds=1.0,
    )


def names(change: Callable[[Snapshot], Snapshot] = lambda tick_snapshot: tick_snapshot, **settings: Any) -> set[str]:
    """Return the series that the last of many samples gives, of an engine that leaks 4 MiB in half a minute."""
    questions = build_derivations(**{"kv_bytes_per_token": 2.0, **settings})
    states: dict[str, Any] = {question.name: question.initial for question in questions}
    life, last_names = EngineMemory(), set[str]()
    for step in range(STEPS):
        held_bytes = 40 * GIB + step * 4 * 2**20
        process = EngineProcess(
            pid=1, role=Role.ENGINE_CORE, rss_bytes=GIB, anonymous_bytes=GIB, swap_bytes=0, started_at_seconds=1.0
        )
        tick_snapshot = snapshot(
            at=float(step * STEP_SECONDS),
            engines=page(reading(step), inputs=tuple((name, True) for name in FIELDS)),
            gpus=(gpu(total=80 * GIB, used=held_bytes + GIB, engine=held_bytes, other=GIB),),
            processes=(process,),
            reading_times=READING_TIMES,
            host=HostMemory(
                used_bytes=1, limit_bytes=2, shm_used_bytes=0, shm_limit_bytes=1, oom_kills=0, pressure_ratio=0.0
            ),
        )
        tick_snapshot = replace(
            tick_snapshot, pools=(Pool(part=HostPart.KV_OFFLOAD, role=Role.ENGINE_CORE, size_bytes=1),)
        )
        life, tick_snapshot = update_engine(life, change(tick_snapshot))
        last_names = set()
        for question in questions:
            states[question.name], samples = answer(question, states[question.name], tick_snapshot)
            last_names |= {sample.metric.name for sample in samples}
    return last_names


@cache
def everything() -> frozenset[str]:
    return frozenset(names())


def without_inputs(*inputs: str) -> Callable[[Snapshot], Snapshot]:
    def change(sample: Snapshot) -> Snapshot:
        assert isinstance(sample.engines, EnginePage)
        poorer = replace(sample.engines.engines[0], **dict.fromkeys(FIELDS[name] for name in inputs))
        return replace(sample, engines=replace(sample.engines, engines=(poorer,)))

    return change


def covered(patterns: tuple[str, ...]) -> set[str]:
    return {name for name in everything() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def test_the_world_of_these_tests_has_nearly_everything() -> None:
    absent = {metric.name for metric in METRICS} - everything()

    assert {name for name in absent if not name.startswith(ELSEWHERE)} == {
        "headroom_build_info",
        "headroom_sample_age_seconds",
        *AT_REST,
        *CONFIGURED,
    }


@pytest.mark.parametrize("name", SERIES)
def test_the_series_made_of_an_input_are_absent_without_it(name: str) -> None:
    assert set(list_lost_series([name], page(inputs=()))) - AT_REST == everything() - names(without_inputs(name))


@pytest.mark.parametrize("name", sorted({name for name, _ in PROFILES[0].inputs} - SERIES.keys()))
def test_nothing_but_the_report_is_absent_without_another_input(name: str) -> None:
    report = set(offers.WITHOUT_A_REPORT) if name == "gpu_memory_utilization" else set()

    assert everything() - names(without_inputs(name)) == report


@pytest.mark.parametrize(
    ("patterns", "change"),
    [
        (
            engine_findings.WITHOUT_AN_ANSWER,
            lambda tick_snapshot: replace(tick_snapshot, engines=failure(Source.ENGINE)),
        ),
        (gpus.WITHOUT_NVML, lambda tick_snapshot: replace(tick_snapshot, gpus=failure(Source.NVML))),
        (
            gpus.OWNED_GPU_SERIES,
            lambda tick_snapshot: replace(
                tick_snapshot, gpus=(replace(tick_snapshot.gpus[0], attribution=None, held_bytes=None),)
            ),
        ),
        (processes.WITHOUT_PROC[:3], lambda tick_snapshot: replace(tick_snapshot, processes=(), host=None, pools=())),
        (
            processes.WITHOUT_PROCESSES[:2],
            lambda tick_snapshot: replace(tick_snapshot, processes=(), host=HostMemory(pressure_ratio=0.0), pools=()),
        ),
    ],
    ids=["page", "nvml", "owner", "proc", "processes"],
)
def test_what_is_absent_without_a_source_is_reported(
    patterns: tuple[str, ...], change: Callable[[Snapshot], Snapshot]
) -> None:
    assert everything() - names(change) == covered(patterns)


def test_what_is_absent_without_bytes_per_token_is_reported() -> None:
    assert everything() - names(kv_bytes_per_token=None) == set(offers.WITHOUT_BYTES)
