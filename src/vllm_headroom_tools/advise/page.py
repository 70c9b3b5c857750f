"""Collect facts from a sidecar's page: current values, and counters since the engine's start."""

import asyncio
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final
from urllib.parse import urljoin

import httpx
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from vllm_headroom import catalog
from vllm_headroom.derive.host_memory import HOST_FACTS
from vllm_headroom.derive.life.budget import USUAL_PEAK_RATIO
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.derive.verdicts import LOW_BYTES, OVER_BUDGET_SECONDS
from vllm_headroom.inputs import redact_url
from vllm_headroom.model import INPUTS, BudgetExcess, Failure, HostMemory, Metric, Sample, Values
from vllm_headroom.scrape.http.failures import strip_advice
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import LeakLocation, LeakState, Situation, Work
from vllm_headroom_tools.advise.facts import (
    PEAK_BYTES,
    EngineFacts,
    Extent,
    Facts,
    FactsSource,
    FullFacts,
    GpuFacts,
    HostFacts,
    Leak,
    PeakFacts,
    PrefixFacts,
    Shortage,
    Spell,
    StrandedFacts,
    measure_others,
)
from vllm_headroom_tools.advise.settings import FIELD_VERSIONS, EngineArgs, add_page_settings
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.engine_choice import add_engine, choose_engine, name_labels
from vllm_headroom_tools.full_cache import FULL_RATIO
from vllm_headroom_tools.history import STATE_VERDICTS, LeakVerdict, Moment
from vllm_headroom_tools.look import fetch_engines, fetch_once
from vllm_headroom_tools.openai import parse_server_version
from vllm_headroom_tools.terminal import NO_SIDECAR
from vllm_headroom_tools.versions import parse_version

KNOWN_INDICES: Final = frozenset(map(str, range(1024)))
"""The accepted GPU indices. A page with any other index does not come from a sidecar."""

GPU_LEAK_FIGURES: Final = {
    "bytes_per_second": catalog.LEAK_RATE,
    "bytes_per_request": catalog.LEAK_PER_REQUEST,
    "leaked_bytes": catalog.LEAKED,
    "time_to_oom_seconds": catalog.TIME_TO_OOM,
    "time_to_oom_seconds_lower": catalog.TIME_TO_OOM_LOWER,
}
"""The metric for each figure of an alarm on a GPU. The keys are fields of Moment."""

HOST_LEAK_FIGURES: Final = {
    "bytes_per_second": catalog.HOST_LEAK_RATE,
    "time_to_oom_seconds": catalog.HOST_TIME_TO_OOM,
    "time_to_oom_seconds_lower": catalog.HOST_TIME_TO_OOM_LOWER,
}
"""The metric for each figure of an alarm on a process role. The keys are fields of Moment."""


def parse_facts(text: str, settings: EngineArgs) -> Facts:
    """Return the facts from a sidecar's page.

    `settings` come from the operator. Settings that the operator did not give are read from the
    page. Raises BadInput unless the page comes from a sidecar that watches vLLM.
    """
    page = _parse_page(text)
    _check_page(page)
    engines = [(model_name, engine) for model_name, engine, _ in page.find_all(catalog.ENGINE_INFO)]
    running = sum_known(page.value(catalog.ENGINE_RUNNING, *engine) for engine in engines)
    return Facts(
        origin=FactsSource.PAGE,
        settings=_read_settings(page, settings),
        age_seconds=page.value(catalog.SAMPLE_AGE),
        gpus=tuple(
            _read_gpu(page, (index, uuid), running)
            for index, uuid, _, attribution in page.find_all(catalog.GPU_INFO)
            if attribution
        ),
        engines=tuple(_read_engine(page, model_name, engine) for model_name, engine in engines),
        hosts=tuple(
            HostFacts(
                process=role,
                leak=_read_leak(page, catalog.HOST_LEAK_STATE, (role,), HOST_LEAK_FIGURES),
                held_bytes=held_bytes,
            )
            for (role,), held_bytes in page.find_all(catalog.HOST_MEMORY).items()
        ),
        host=_read_host(page),
    )


def _parse_page(text: str) -> Values:
    """Return the page's finite values for the metrics in the catalogue.

    Raises BadInput for a page in another format.
    """
    samples = []
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # Samples of other metrics come from another version or another exporter.
                metric = catalog.BY_NAME.get(sample.name)
                if metric is not None and isfinite(sample.value):
                    labels = tuple(sample.labels.get(label, "") for label in metric.labels)
                    samples.append(Sample(metric, labels, sample.value))
        return Values(samples)
    except (ValueError, IndexError):
        raise BadInput(
            "the page is not in Prometheus's format:"
            " --headroom-url is the address of vllm-headroom, not of vLLM"
        ) from None


def _check_page(page: Values) -> None:
    """Raise BadInput unless the page comes from a sidecar that watches vLLM."""
    indices = {index for index, *_ in page.find_all(catalog.GPU_INFO)}
    # A sidecar's page has exactly one build-info sample and plausible GPU indices. Any other page
    # comes from another exporter.
    if len(page.find_all(catalog.BUILD_INFO)) != 1 or not indices <= KNOWN_INDICES:
        raise BadInput(
            "the page is not vllm-headroom's:"
            " --headroom-url takes its address, port 9839 unless it is set otherwise"
        )
    profiles = {profile for *_, profile in page.find_all(catalog.ENGINE_INFO)}
    if not profiles <= {"vllm"}:
        raise BadInput(
            "the engine behind this page is not vLLM, and vLLM's options are all that is known here"
        )


def _read_host(page: Values) -> HostMemory:
    """Return the host memory; figures that the page lacks are unknown."""
    values = {fact: page.value(metric) for metric, fact in HOST_FACTS}
    known_values = {fact: int(value) for fact, value in values.items() if value is not None}
    return HostMemory(basis=None, **known_values)


def _read_settings(page: Values, settings: EngineArgs) -> EngineArgs:
    """Return the operator's settings, with missing settings filled in from the page."""
    offered_versions = [
        version
        for field, version in FIELD_VERSIONS.items()
        if page.value(catalog.INPUT_AVAILABLE, INPUTS[field].name)
    ]
    sizes_cache_in_bytes = bool(page.value(catalog.INPUT_AVAILABLE, "kv_cache_memory_bytes"))
    return replace(
        settings,
        # The page's series give a lower bound for the version. The lower bound is the oldest
        # version that exports all of these series.
        at_least=max((settings.at_least, *offered_versions)),
        sizes_cache_in_bytes=settings.sizes_cache_in_bytes or sizes_cache_in_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization or _read_utilization(page),
    )


def _read_utilization(page: Values) -> float | None:
    """Return the budget as a share of a GPU.

    Returns None if the share is unknown or differs between GPUs.
    """
    ratios = set()
    for (*gpu, basis), budget_bytes in page.find_all(catalog.MEMORY_REPORTED).items():
        total_bytes = page.value(catalog.GPU_MEMORY_TOTAL, *gpu)
        if basis == "budget" and total_bytes:
            ratios.add(round(budget_bytes / total_bytes, 4))
    return ratios.pop() if len(ratios) == 1 else None


def _read_gpu(page: Values, gpu: tuple[str, str], running: float | None) -> GpuFacts:
    """Return the facts about a GPU.

    If its memory is unknown, only the detector's verdict is returned.
    """
    index, uuid = gpu
    facts = GpuFacts(
        index=int(index),
        uuid=uuid,
        leak=_read_leak(page, catalog.LEAK_STATE, gpu, GPU_LEAK_FIGURES),
    )
    total_bytes = page.value(catalog.GPU_MEMORY_TOTAL, *gpu)
    used_bytes = page.value(catalog.GPU_MEMORY_USED, *gpu)
    if total_bytes is None or used_bytes is None:
        return facts
    # The driver's reserve is not usable.
    usable_bytes = total_bytes - (page.value(catalog.GPU_MEMORY_RESERVED, *gpu) or 0.0)
    peak_bytes = max(used_bytes, page.value(catalog.GPU_MEMORY_USED_PEAK, *gpu) or 0.0)
    engine_bytes = page.value(catalog.GPU_MEMORY_HELD, *gpu, "engine")
    others_bytes = measure_others(used_bytes, engine_bytes)
    others_memory = None
    if others_bytes is not None:
        others_memory = Extent(others_bytes, others_bytes, others_bytes)
    # Memory of other processes counts as free. The engine cannot be blamed for it.
    room_bytes = usable_bytes - used_bytes + (others_bytes or 0.0)
    room_at_peak_bytes = usable_bytes - peak_bytes + (others_bytes or 0.0)
    return replace(
        facts,
        usable_bytes=usable_bytes,
        least_room_bytes=max(0.0, usable_bytes - peak_bytes),
        others_memory=others_memory,
        is_holder_known=engine_bytes is not None or page.value(catalog.GPU_PROCESSES, *gpu) == 1,
        spells=_judge_room(room_bytes, room_at_peak_bytes, running),
        excess=_read_excess(page, gpu, total_bytes),
        peaks=_read_peaks(page, gpu),
        peak_room_bytes=page.value(catalog.ENGINE_PEAK_ROOM, *gpu),
        safe_prompt_tokens=page.value(catalog.ENGINE_SAFE_PROMPT_TOKENS, *gpu),
        safe_logprobs_tokens=page.value(catalog.ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS, *gpu),
        safe_image_pixels=page.value(catalog.ENGINE_SAFE_IMAGE_PIXELS, *gpu),
    )


def _read_peaks(page: Values, gpu: tuple[str, str]) -> tuple[PeakFacts, ...]:
    """Return the last minute's peak for each kind of work that occurred often enough."""
    peaks = []
    for work in Work:
        transient_bytes = page.value(catalog.ENGINE_PEAK, *gpu, work)
        spread_bytes = page.value(catalog.ENGINE_PEAK_SPREAD, *gpu, work)
        if transient_bytes is not None and spread_bytes is not None:
            peaks.append(
                PeakFacts(work=work, transient_bytes=transient_bytes, spread_bytes=spread_bytes)
            )
    return tuple(peaks)


def _read_excess(page: Values, gpu: tuple[str, str], total_bytes: float) -> BudgetExcess | None:
    """Return the engine's excess over its budget, or None if none is reported."""
    if not page.value(catalog.SITUATION, Situation.OVER_BUDGET):
        return None
    # An option can only change a budget with one of these bases.
    for basis in ("budget", "configured"):
        budget_bytes = page.value(catalog.MEMORY_REPORTED, *gpu, basis)
        excess_bytes = page.value(catalog.MEMORY_DISCREPANCY, *gpu, basis)
        if budget_bytes and excess_bytes is not None and excess_bytes > 0:
            return BudgetExcess(
                budget_bytes=int(budget_bytes),
                excess_bytes=int(excess_bytes),
                first_excess_bytes=int(excess_bytes),
                total_bytes=int(total_bytes),
                seconds=OVER_BUDGET_SECONDS,
                is_from_start=True,
                needed_bytes=int(USUAL_PEAK_RATIO * total_bytes),
            )
    return None


def _judge_room(
    room_bytes: float, room_at_peak_bytes: float, running: float | None
) -> tuple[Spell, ...]:
    """Return the current shortage.

    Without one, a shortage at the last minute's peak is returned.
    """
    lowest_room_bytes = max(0.0, room_at_peak_bytes)
    if room_bytes < LOW_BYTES:
        level = Spell(kind=Shortage.LEVEL, lowest_room_bytes=lowest_room_bytes, running=running)
        return (level,)
    if room_at_peak_bytes < PEAK_BYTES:
        return (Spell(kind=Shortage.PEAK, lowest_room_bytes=lowest_room_bytes),)
    return ()


def _read_leak(
    page: Values, state_metric: Metric, labels: tuple[str, ...], figures: Mapping[str, Metric]
) -> Leak:
    """Return the detector's verdict on a series; figures are only given during an alarm."""
    state_name = page.state(state_metric, *labels)
    # A newer sidecar may report a state that this version does not know.
    state = LeakState(state_name) if state_name in set(LeakState) else LeakState.UNKNOWN
    verdict = STATE_VERDICTS.get(state, LeakVerdict.CANNOT_TELL)
    if state is not LeakState.LEAKING:
        return Leak(state=state, verdict=verdict)
    location_name = page.state(catalog.LEAK_LOCATION, *labels)
    location = LeakLocation(location_name) if location_name in set(LeakLocation) else None
    # A figure that several series share has only some of their labels, or none.
    values: dict[str, Any] = {
        field: page.value(metric, *labels[: len(metric.labels)])
        for field, metric in figures.items()
    }
    alarm = Moment(seconds=0.0, location=location, **values)
    return Leak(state=state, verdict=verdict, alarm=alarm)


def _read_engine(page: Values, model_name: str, engine: str) -> EngineFacts:
    """Return the facts about an engine.

    The engine's cache counts as full only if the cache is full now.
    """

    def read(metric: Metric) -> float | None:
        """Return this engine's value of a metric, or None if the page lacks it."""
        return page.value(metric, model_name, engine)

    kv_used_ratio = read(catalog.ENGINE_KV_USED)
    preemptions = read(catalog.ENGINE_PREEMPTIONS)
    running = read(catalog.ENGINE_RUNNING)
    finished = read(catalog.ENGINE_FINISHED)
    full = None
    if kv_used_ratio is not None and kv_used_ratio > FULL_RATIO and running:
        full = FullFacts(
            seconds=None,
            finished=finished or 0.0,
            preemptions=preemptions or 0.0,
            running=running,
            tokens=read(catalog.ENGINE_KV_TOKENS_PER_REQUEST),
        )
    queries = read(catalog.ENGINE_PREFIX_QUERIES)
    hits = read(catalog.ENGINE_PREFIX_HITS)
    prefix = None
    if queries is not None and hits is not None:
        # A page does not show how long requests waited. If any requests are waiting now, or if
        # there has ever been a preemption, requests are assumed to wait all the time.
        has_waited = bool(read(catalog.ENGINE_WAITING) or preemptions)
        prefix = PrefixFacts(
            queries=queries,
            hits=hits,
            seconds=None,
            blocked_ratio=float(has_waited),
            recent_ratio=read(catalog.ENGINE_PREFIX_HIT_RATIO),
        )
    stranded_ratio = read(catalog.ENGINE_KV_STRANDED)
    stranded = None
    if stranded_ratio is not None:
        # A page has no history. Whether the ratio has risen is not known.
        stranded = StrandedFacts(ratio=stranded_ratio, first_ratio=stranded_ratio, rises=0)
    return EngineFacts(
        model_name=model_name,
        engine=engine,
        capacity_tokens=read(catalog.ENGINE_KV_CAPACITY_TOKENS),
        capacity_bytes=read(catalog.ENGINE_KV_CAPACITY_BYTES),
        has_kv_usage=kv_used_ratio is not None,
        has_preemptions=preemptions is not None,
        highest_running=running,
        finished=finished,
        full=full,
        prefix=prefix,
        stranded=stranded,
    )


LIVE_TIMEOUT_SECONDS: Final = 20.0
"""This is longer than the daemon's timeout. There is only one attempt, and a busy engine responds
slowly.
"""


async def fetch_facts(
    url: str, settings: EngineArgs, advice: str = NO_SIDECAR, *, engine_name: str | None = None
) -> Facts:
    """Fetch a sidecar's page and return its facts.

    If the sidecar watches several engines, the facts are those of `engine_name`. Raises BadInput if
    the facts cannot be obtained. The message includes `advice` if the sidecar does not respond.
    """
    page = await _fetch_page(url, advice)
    names = list_node_engines(page)
    if names is not None:
        name = choose_engine(names, engine_name)
        page = await _fetch_page(str(add_engine(httpx.URL(url), name)), advice)
    return parse_facts(page, settings)


async def _fetch_page(url: str, advice: str) -> str:
    """Fetch and return a sidecar's page.

    Raises BadInput with `advice` if there is no response.
    """
    page = await fetch_once(_build_reader(url))
    if isinstance(page, Failure):
        raise BadInput(f"{strip_advice(page)}: {advice}")
    return page


def list_node_engines(text: str) -> list[str] | None:
    """Return the names of a page's engines, if its sidecar watches several engines.

    Returns None for any other page, which lacks the metric with the number of engines.
    """
    lines = text.splitlines()
    # Only a page with several engines has this metric.
    if not any(line.startswith(f"{catalog.ENGINES.name}{{") for line in lines):
        return None
    states = [line for line in lines if line.startswith(f"{catalog.ENGINE_STATE.name}{{")]
    names: dict[str, None] = {}
    try:
        for family in text_string_to_metric_families("\n".join((*states, ""))):
            for sample in family.samples:
                names[name_labels(sample.labels)] = None
    except (ValueError, IndexError):
        return None
    return list(names)


async def add_engine_settings(settings: EngineArgs, url: str) -> EngineArgs:
    """Return the settings, with unknown settings filled in from the engine's page at `url`.

    The operator's settings take precedence. The version comes from vLLM's /version endpoint, which
    needs no API key. The version is None if this endpoint does not respond or returns no release.
    Raises BadInput if the page cannot be fetched or has no engine.
    """
    # Fetch the page and the version concurrently, because the operator is waiting.
    page, about = await asyncio.gather(
        fetch_engines(_build_reader(url)), fetch_once(_build_reader(urljoin(url, "version")))
    )
    if isinstance(page, Failure):
        raise BadInput(f"--engine-url: {strip_advice(page)}: check that vLLM serves there")
    if not page.engines:
        raise BadInput(f"--engine-url: the page at {redact_url(url)} is not vLLM's")
    version = settings.version
    if version is None and not isinstance(about, Failure):
        version_text = parse_server_version(about)
        version = parse_version(version_text) if version_text else None
    return replace(add_page_settings(settings, page), version=version)


def _build_reader(url: str) -> PageReader:
    return PageReader(url=url, timeout_seconds=LIVE_TIMEOUT_SECONDS)
