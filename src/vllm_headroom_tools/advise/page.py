"""Facts from a sidecar's page: the present, and counters since the engine's start."""

import asyncio
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final
from urllib.parse import urljoin

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from vllm_headroom import catalog
from vllm_headroom.derive.host_memory import HOST_FACTS
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.inputs import redact_url
from vllm_headroom.model import INPUTS, Failure, HostMemory, Metric, Sample, Values
from vllm_headroom.scrape.http.failures import strip_advice
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import LeakLocation, LeakState
from vllm_headroom_tools.advise.facts import (
    FULL_RATIO,
    PEAK_BYTES,
    EngineFacts,
    Extent,
    Facts,
    FullFacts,
    GpuFacts,
    HostFacts,
    Leak,
    Origin,
    PrefixFacts,
    Shortage,
    Spell,
    StrandedFacts,
    measure_others,
)
from vllm_headroom_tools.advise.settings import FIELD_VERSIONS, EngineArgs, add_page_settings
from vllm_headroom_tools.history import Moment
from vllm_headroom_tools.look import fetch_engines, fetch_once
from vllm_headroom_tools.openai import parse_server_version
from vllm_headroom_tools.terminal import NO_SIDECAR
from vllm_headroom_tools.trace import BadInput
from vllm_headroom_tools.versions import parse_version

INDICES: Final = frozenset(map(str, range(1024)))
OF_A_GPU: Final = {
    "bytes_per_second": catalog.LEAK_RATE,
    "bytes_per_request": catalog.LEAK_PER_REQUEST,
    "leaked_bytes": catalog.LEAKED,
    "time_to_oom_seconds": catalog.TIME_TO_OOM,
    "time_to_oom_seconds_lower": catalog.TIME_TO_OOM_LOWER,
}
ON_THE_HOST: Final = {
    "bytes_per_second": catalog.HOST_LEAK_RATE,
    "time_to_oom_seconds": catalog.HOST_TIME_TO_OOM,
    "time_to_oom_seconds_lower": catalog.HOST_TIME_TO_OOM_LOWER,
}


def parse_facts(text: str, settings: EngineArgs) -> Facts:
    """Parse the facts of an engine with these settings; raises BadInput where the page cannot be used."""
    try:
        page = Values(
            Sample(
                metric, tuple(sample.labels.get(label, "") for label in metric.labels), sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if (metric := catalog.BY_NAME.get(sample.name)) is not None and isfinite(sample.value)
        )
    except (ValueError, IndexError):
        wrong = "the page is not in Prometheus's format: --headroom-url is the address of vllm-headroom, not of vLLM"
        raise BadInput(wrong) from None
    if (
        len(page.find_all(catalog.BUILD_INFO)) != 1
        or {index for index, *_ in page.find_all(catalog.GPU_INFO)} - INDICES
    ):
        ours = "--headroom-url takes its address, port 9839 unless it is set otherwise"
        raise BadInput(f"the page is not vllm-headroom's: {ours}")
    engines = tuple(page.find_all(catalog.ENGINE_INFO))
    if {profile for *_, profile in engines} - {"vllm"}:
        raise BadInput(
            "the engine behind this page is not vLLM, and vLLM's options are all that is known here"
        )
    running = sum_known(page.value(catalog.ENGINE_RUNNING, *engine) for *engine, _ in engines)
    host = ((fact, page.value(metric)) for metric, fact in HOST_FACTS)
    return Facts(
        origin=Origin.PAGE,
        settings=_read_settings(page, settings),
        age_seconds=page.value(catalog.SAMPLE_AGE),
        gpus=tuple(
            _read_gpu(page, (index, uuid), running)
            for index, uuid, _, attribution in page.find_all(catalog.GPU_INFO)
            if attribution
        ),
        engines=tuple(_read_engine(page, model_name, engine) for model_name, engine, _ in engines),
        hosts=tuple(
            HostFacts(
                process=role,
                leak=_read_leak(page, catalog.HOST_LEAK_STATE, (role,), ON_THE_HOST),
                held_bytes=held,
            )
            for (role,), held in page.find_all(catalog.HOST_MEMORY).items()
        ),
        host=HostMemory(
            basis=None, **{fact: int(value) for fact, value in host if value is not None}
        ),
    )


def _read_settings(page: Values, given: EngineArgs) -> EngineArgs:
    """Fill in settings from the page; the operator's stay. The budget's share is of the GPU's total."""
    offered = (
        field for field in FIELD_VERSIONS if page.value(catalog.INPUT_AVAILABLE, INPUTS[field].name)
    )
    sized = bool(page.value(catalog.INPUT_AVAILABLE, "kv_cache_memory_bytes"))
    ratios = {
        round(budget / total, 4)
        for (*gpu, basis), budget in page.find_all(catalog.MEMORY_REPORTED).items()
        if basis == "budget" and (total := page.value(catalog.GPU_MEMORY_TOTAL, *gpu))
    }
    return replace(
        given,
        at_least=max((given.at_least, *(FIELD_VERSIONS[field] for field in offered))),
        sizes_cache_in_bytes=given.sizes_cache_in_bytes or sized,
        gpu_memory_utilization=given.gpu_memory_utilization
        or (ratios.pop() if len(ratios) == 1 else None),
    )


def _read_gpu(page: Values, gpu: tuple[str, str], running: float | None) -> GpuFacts:
    total, used = (
        page.value(catalog.GPU_MEMORY_TOTAL, *gpu),
        page.value(catalog.GPU_MEMORY_USED, *gpu),
    )
    facts = GpuFacts(
        index=int(gpu[0]), uuid=gpu[1], leak=_read_leak(page, catalog.LEAK_STATE, gpu, OF_A_GPU)
    )
    if total is None or used is None:
        return facts
    usable = total - (page.value(catalog.GPU_MEMORY_RESERVED, *gpu) or 0.0)
    peak = max(used, page.value(catalog.GPU_MEMORY_USED_PEAK, *gpu) or 0.0)
    others = measure_others(used, page.value(catalog.GPU_MEMORY_HELD, *gpu, "engine"))
    room, room_at_peak = usable - used + (others or 0.0), usable - peak + (others or 0.0)
    spells: tuple[Spell, ...] = ()
    if room < LOW_BYTES:
        spells = (Spell(kind=Shortage.LEVEL, least_bytes=max(0.0, room_at_peak), running=running),)
    elif room_at_peak < PEAK_BYTES:
        spells = (Spell(kind=Shortage.PEAK, least_bytes=max(0.0, room_at_peak)),)
    return replace(
        facts,
        usable_bytes=usable,
        least_room_bytes=max(0.0, usable - peak),
        others=None if others is None else Extent(others, others, others),
        spells=spells,
    )


def _read_leak(
    page: Values, state: Metric, labels: tuple[str, ...], figures: Mapping[str, Metric]
) -> Leak:
    """Read the leak verdict of a series; a figure that all series share has no labels."""
    read: dict[str, Any] = {
        name: page.value(metric, *labels[: len(metric.labels)]) for name, metric in figures.items()
    }
    where = next(
        (each for each in LeakLocation if each == page.state(catalog.LEAK_LOCATION, *labels)), None
    )
    is_in = next(
        (each for each in LeakState if each == page.state(state, *labels)), LeakState.UNKNOWN
    )
    return Leak(
        state=is_in,
        alarm=Moment(seconds=0.0, location=where, **read) if is_in is LeakState.LEAKING else None,
    )


def _read_engine(page: Values, model_name: str, engine: str) -> EngineFacts:
    def read(metric: Metric) -> float | None:
        return page.value(metric, model_name, engine)

    used, running, lost = (
        read(catalog.ENGINE_KV_USED),
        read(catalog.ENGINE_RUNNING),
        read(catalog.ENGINE_KV_STRANDED),
    )
    finished, preemptions = read(catalog.ENGINE_FINISHED), read(catalog.ENGINE_PREEMPTIONS)
    queries, hits = read(catalog.ENGINE_PREFIX_QUERIES), read(catalog.ENGINE_PREFIX_HITS)
    full, prefix = None, None
    if used is not None and used > FULL_RATIO and running:
        full = FullFacts(
            seconds=None,
            finished=finished or 0.0,
            preemptions=preemptions or 0.0,
            running=running,
            tokens=read(catalog.ENGINE_KV_TOKENS_PER_REQUEST),
        )
    if queries is not None and hits is not None:
        blocked = bool(read(catalog.ENGINE_WAITING) or preemptions)
        recent = read(catalog.ENGINE_PREFIX_HIT_RATIO)
        prefix = PrefixFacts(
            queries=queries, hits=hits, seconds=None, blocked_ratio=blocked, recent_ratio=recent
        )
    return EngineFacts(
        model_name=model_name,
        engine=engine,
        capacity_tokens=read(catalog.ENGINE_KV_CAPACITY_TOKENS),
        capacity_bytes=read(catalog.ENGINE_KV_CAPACITY_BYTES),
        kv_known=used is not None,
        preemptions_known=preemptions is not None,
        most_running=running,
        finished=finished,
        full=full,
        prefix=prefix,
        stranded=None if lost is None else StrandedFacts(ratio=lost, first_ratio=lost, rises=0),
    )


TIMEOUT_SECONDS: Final = 20.0
"""Longer than the daemon's: there is one attempt, and a busy engine answers late."""


async def fetch_facts(url: str, settings: EngineArgs) -> Facts:
    """Fetch the facts on a sidecar's page; raises BadInput."""
    page = await fetch_once(_build_reader(url))
    if isinstance(page, Failure):
        raise BadInput(f"{strip_advice(page)}: {NO_SIDECAR}")
    return parse_facts(page, settings)


async def add_engine_settings(settings: EngineArgs, url: str) -> EngineArgs:
    """Fill in settings from the engine whose page is at `url`; the operator's stay. Raises BadInput.

    The version comes from /version beside the page, which vLLM answers without a key.
    """
    page, about = await asyncio.gather(
        fetch_engines(_build_reader(url)), fetch_once(_build_reader(urljoin(url, "version")))
    )
    if isinstance(page, Failure):
        raise BadInput(f"--engine-url: {strip_advice(page)}: check that vLLM serves there")
    if not page.engines:
        raise BadInput(f"--engine-url: the page at {redact_url(url)} is not vLLM's")
    found = None if isinstance(about, Failure) else parse_server_version(about)
    version = settings.version or (parse_version(found) if found else None)
    return replace(add_page_settings(settings, page), version=version)


def _build_reader(url: str) -> PageReader:
    return PageReader(url=url, timeout_seconds=TIMEOUT_SECONDS)
