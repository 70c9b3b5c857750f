"""The page of a sidecar to facts: the present, and what counters say of the time since the engine's start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_headroom import catalog
from vllm_headroom.commands.advise.engine_facts import EngineFacts, FullFacts, PrefixFacts, StrandedFacts
from vllm_headroom.commands.advise.facts import Extent, Facts, GpuFacts, HostFacts, Leak, Origin, Shortage, Spell
from vllm_headroom.commands.advise.history.scraped import Labels, Page
from vllm_headroom.commands.advise.limits import FULL_RATIO, PEAK_BYTES, SOMEBODY_BYTES
from vllm_headroom.commands.advise.settings import COUNTS_PREFIXES, OLDEST, SIZES_CACHE_IN_BYTES, TELLS_SLEEP, Settings
from vllm_headroom.derive.host_memory import FACTS
from vllm_headroom.derive.page_facts import together
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.model import HostMemory
from vllm_headroom.trace.course import Moment
from vllm_headroom.vocabulary import LeakLocation, LeakState


def facts_of(text: str, settings: Settings) -> Facts | str:
    """Return the facts of a page, of an engine started with these settings; or why it cannot be used, in one line."""
    try:
        page = Page(text)
    except (ValueError, IndexError):
        return "the page is not in Prometheus's format: --headroom-url is vllm-headroom's, not that of what it watches"
    if page.value(catalog.BUILD_INFO) is None:
        return "the page is not vllm-headroom's: --headroom-url takes its address, port 9839 unless it is set otherwise"
    if {labels.get("profile") for labels, _ in page.each(catalog.ENGINE_INFO)} - {"vllm"}:
        return "the engine behind this page is not vLLM, and vLLM's options are all that is known here"
    return Facts(
        origin=Origin.PAGE,
        settings=_settings(page, settings),
        age_seconds=page.value(catalog.SAMPLE_AGE),
        gpus=tuple(_gpus(page)),
        engines=tuple(_engine(page, labels) for labels, _ in page.each(catalog.ENGINE_INFO)),
        hosts=tuple(_hosts(page)),
        host=_host(page),
    )


def _settings(page: Page, told: Settings) -> Settings:
    """Return the settings with what the page shows; what the operator told is believed."""
    shown = OLDEST
    for name, version in (
        ("prefix_cache_queries", COUNTS_PREFIXES),
        ("kv_cache_memory_bytes", SIZES_CACHE_IN_BYTES),
        ("sleep_state", TELLS_SLEEP),
    ):
        shown = max(shown, version) if page.value(catalog.INPUT_AVAILABLE, input=name) else shown
    sized = bool(page.value(catalog.INPUT_AVAILABLE, input="kv_cache_memory_bytes"))
    return replace(
        told,
        at_least=max(shown, told.at_least),
        sizes_cache_in_bytes=told.sizes_cache_in_bytes or sized,
        gpu_memory_utilization=told.gpu_memory_utilization or _utilization(page),
    )


def _utilization(page: Page) -> float | None:
    """Return what the budget is of the GPU's total (derive/discrepancy.py); None where there is none."""
    ratios = set()
    for labels, budget in page.each(catalog.MEMORY_REPORTED, basis="budget"):
        total = page.value(catalog.GPU_MEMORY_TOTAL, uuid=labels["uuid"])
        if total:
            ratios.add(round(budget / total, 4))
    return ratios.pop() if len(ratios) == 1 else None


def _gpus(page: Page) -> Iterator[GpuFacts]:
    engines = (labels for labels, _ in page.each(catalog.ENGINE_INFO))
    running = together(page.value(catalog.ENGINE_RUNNING, **_names(engine)) for engine in engines)
    for labels, _ in page.each(catalog.GPU_INFO):
        if labels.get("attribution"):
            yield _gpu(page, int(labels["gpu"]), labels["uuid"], running)


def _gpu(page: Page, index: int, uuid: str, running: float | None) -> GpuFacts:
    total, used = page.value(catalog.GPU_MEMORY_TOTAL, uuid=uuid), page.value(catalog.GPU_MEMORY_USED, uuid=uuid)
    leak = _leak(page, uuid)
    if total is None or used is None:
        return GpuFacts(index=index, uuid=uuid, leak=leak)
    usable = total - (page.value(catalog.GPU_MEMORY_RESERVED, uuid=uuid) or 0.0)
    peak = max(used, page.value(catalog.GPU_MEMORY_USED_PEAK, uuid=uuid) or 0.0)
    others = _others(page, uuid, used)
    return GpuFacts(
        index=index,
        uuid=uuid,
        leak=leak,
        usable_bytes=usable,
        least_room_bytes=max(0.0, usable - peak),
        others=None if others is None else Extent(others, others, others),
        spells=tuple(_spells(usable - used + (others or 0.0), usable - peak + (others or 0.0), running)),
    )


def _others(page: Page, uuid: str, used: float) -> float | None:
    engine = page.value(catalog.GPU_MEMORY_HELD, uuid=uuid, holder="engine")
    if engine is None:
        return None
    return used - engine if used - engine > SOMEBODY_BYTES else 0.0


def _spells(room: float, room_at_peak: float, running: float | None) -> Iterator[Spell]:
    if room < LOW_BYTES:
        yield Spell(kind=Shortage.LEVEL, least_bytes=max(0.0, room_at_peak), running=running)
    elif room_at_peak < PEAK_BYTES:
        yield Spell(kind=Shortage.PEAK, least_bytes=max(0.0, room_at_peak))


def _leak(page: Page, uuid: str) -> Leak:
    state = page.state(catalog.LEAK_STATE, uuid=uuid)
    said = Moment(
        seconds=0.0,
        bytes_per_second=page.value(catalog.LEAK_RATE, uuid=uuid),
        bytes_per_request=page.value(catalog.LEAK_PER_REQUEST, uuid=uuid),
        leaked_bytes=page.value(catalog.LEAKED, uuid=uuid),
        time_to_oom_seconds=page.value(catalog.TIME_TO_OOM, uuid=uuid),
        time_to_oom_seconds_lower=page.value(catalog.TIME_TO_OOM_LOWER, uuid=uuid),
        location=_location(page, uuid),
    )
    return Leak(state=state, alarm=said if state is LeakState.LEAKING else None)


def _location(page: Page, uuid: str) -> LeakLocation | None:
    names = {has.get("location") for has, value in page.each(catalog.LEAK_LOCATION, uuid=uuid) if value}
    return next((place for place in LeakLocation if names == {place}), None)


def _hosts(page: Page) -> Iterator[HostFacts]:
    """Yield each role of the engine's processes."""
    for labels, held in page.each(catalog.HOST_MEMORY):
        process = labels["process"]
        state = page.state(catalog.HOST_LEAK_STATE, process=process)
        said = Moment(
            seconds=0.0,
            bytes_per_second=page.value(catalog.HOST_LEAK_RATE, process=process),
            time_to_oom_seconds=page.value(catalog.HOST_TIME_TO_OOM),
            time_to_oom_seconds_lower=page.value(catalog.HOST_TIME_TO_OOM_LOWER),
        )
        leak = Leak(state=state, alarm=said if state is LeakState.LEAKING else None)
        yield HostFacts(process=process, leak=leak, held_bytes=held)


def _host(page: Page) -> HostMemory:
    """Return the memory that the engine runs in."""
    known = ((fact, page.value(metric)) for metric, fact in FACTS)
    return HostMemory(basis=None, **{fact: int(value) for fact, value in known if value is not None})


def _stranded(page: Page, names: Labels) -> StrandedFacts | None:
    ratio = page.value(catalog.ENGINE_KV_STRANDED, **names)
    return None if ratio is None else StrandedFacts(ratio=ratio, first_ratio=ratio, rises=0)


def _names(info: Labels) -> Labels:
    return {name: info[name] for name in catalog.ENGINE}


def _engine(page: Page, info: Labels) -> EngineFacts:
    names = _names(info)
    used = page.value(catalog.ENGINE_KV_USED, **names)
    running = page.value(catalog.ENGINE_RUNNING, **names)
    return EngineFacts(
        model_name=info["model_name"],
        engine=info["engine"],
        capacity_tokens=page.value(catalog.ENGINE_KV_CAPACITY_TOKENS, **names),
        capacity_bytes=page.value(catalog.ENGINE_KV_CAPACITY_BYTES, **names),
        kv_known=used is not None,
        preemptions_known=page.value(catalog.ENGINE_PREEMPTIONS, **names) is not None,
        most_running=running,
        finished=page.value(catalog.ENGINE_FINISHED, **names),
        full=_full(page, names) if used is not None and used > FULL_RATIO and running else None,
        prefix=_prefix(page, names),
        stranded=_stranded(page, names),
    )


def _full(page: Page, names: Labels) -> FullFacts:
    return FullFacts(
        seconds=None,
        finished=page.value(catalog.ENGINE_FINISHED, **names) or 0.0,
        preemptions=page.value(catalog.ENGINE_PREEMPTIONS, **names) or 0.0,
        running=page.value(catalog.ENGINE_RUNNING, **names) or 0.0,
        tokens=page.value(catalog.ENGINE_KV_TOKENS_PER_REQUEST, **names),
    )


def _prefix(page: Page, names: Labels) -> PrefixFacts | None:
    queries, hits = page.value(catalog.ENGINE_PREFIX_QUERIES, **names), page.value(catalog.ENGINE_PREFIX_HITS, **names)
    recent = page.value(catalog.ENGINE_PREFIX_HIT_RATIO, **names)
    if queries is None or hits is None:
        return None
    blocked = bool(page.value(catalog.ENGINE_WAITING, **names) or page.value(catalog.ENGINE_PREEMPTIONS, **names))
    return PrefixFacts(queries=queries, hits=hits, seconds=None, blocked_ratio=float(blocked), recent_ratio=recent)
