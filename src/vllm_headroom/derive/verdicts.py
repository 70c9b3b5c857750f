"""What is to be said of each GPU, of the engine and of its host memory, in a sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.leak.inside import PLACES
from vllm_headroom.derive.leftovers import described
from vllm_headroom.model import Failure, GpuReading, Snapshot, Values, Verdict
from vllm_headroom.units import duration, size
from vllm_headroom.vocabulary import EngineState, LeakLocation, LeakState, Level

HOUR_SECONDS: Final = 3600.0
DAY_SECONDS: Final = 24 * HOUR_SECONDS
"""With less left of a leak HeadroomOutOfMemorySoon pages, and HeadroomGpuMemoryLeak is critical."""

GPU_ALERTS: Final = ("HeadroomOutOfMemorySoon", "HeadroomGpuMemoryLeak", "HeadroomGpuMemoryGrowing")
HOST_ALERTS: Final = ("HeadroomHostOutOfMemorySoon", "HeadroomHostMemoryRunsOut", "HeadroomHostMemoryLeak")
"""Of a leak that ends within the hour, within the day, and of any other growth."""

NEIGHBOUR_BYTES: Final = 2**30
"""What others hold is worth a word from here on, as HeadroomNeighbourGrowing has it; contexts alone are smaller."""

STRANDED: Final = 0.05
"""As HeadroomKvCacheStranded."""

LOOP: Final = 3
"""Ends in 90 minutes: as the alert HeadroomEngineCrashLoop counts."""

ENGINE_SAYS: Final = {
    EngineState.DOWN: (Level.ALARM, "is down: there is no page and no process of it", "HeadroomEngineDown"),
    EngineState.STARTING: (Level.UNKNOWN, "is starting: nothing is judged before it has served", None),
    EngineState.STALLED: (Level.ALARM, "is stalled: it has work and makes no progress", "HeadroomEngineStalled"),
    EngineState.ASLEEP: (Level.GOOD, "is asleep", None),
    EngineState.SERVING: (Level.GOOD, "serves", None),
    EngineState.UNKNOWN: (Level.UNKNOWN, "may be up or down: that is not known", "HeadroomSidecarBlind"),
}

QUIET: Final[dict[str | None, tuple[Level, str]]] = {
    LeakState.STABLE: (Level.GOOD, " shows no leak"),
    LeakState.UNSETTLED: (Level.GOOD, " shows no leak so far, under a load that changes"),
    LeakState.ASLEEP: (Level.GOOD, ": the engine sleeps"),
    LeakState.WARMING_UP: (Level.UNKNOWN, ": too early to tell whether it leaks"),
}
"""What to say where nothing is found to grow; the state that tells most comes first."""

NOT_TOLD: Final = (Level.UNKNOWN, ": whether it leaks is not known")


def verdicts(snapshot: Snapshot, values: Values) -> tuple[Verdict, ...]:
    """Return what is to be said of what a tick saw and derived, the worst first, else GPUs, engine and host."""
    said = (*_gpus(snapshot, values), *_engine(snapshot, values), *_host(values))
    return tuple(sorted(said, key=lambda verdict: -tuple(Level).index(verdict.level)))


def _gpus(snapshot: Snapshot, values: Values) -> Iterator[Verdict]:
    if isinstance(snapshot.gpus, Failure):
        text = f"The GPUs cannot be read: {snapshot.gpus.message}"
        yield Verdict(subject="GPUs", level=Level.UNKNOWN, sentence=_ended(text), alert="HeadroomSourceDown")
        return
    owned = [gpu for gpu in snapshot.gpus if gpu.attribution is not None]
    if not owned:
        text = "No GPU is known to be the engine's: no GPU memory is judged."
        yield Verdict(subject="GPUs", level=Level.UNKNOWN, sentence=text, alert="HeadroomSidecarBlind")
    for gpu in sorted(owned, key=lambda each: each.reading.index):
        to_wake = {} if snapshot.life is None else dict(snapshot.life.to_wake)
        yield _gpu(values, gpu.reading, to_wake.get(gpu.reading.uuid))
        for leftover in gpu.leftovers:
            yield Verdict(
                subject=f"GPU {gpu.reading.index}",
                level=Level.WARNING,
                sentence=f"GPU {gpu.reading.index}: {described(leftover)}.",
                alert="HeadroomMemoryLeftBehind",
            )


def _gpu(values: Values, reading: GpuReading, to_wake: int | None) -> Verdict:
    gpu, uuid = str(reading.index), reading.uuid
    name = f"GPU {gpu}"
    said = partial(Verdict, subject=name)
    if reading.failure is not None:
        text = _ended(f"{name} cannot be read: {reading.failure.message}")
        return said(level=Level.ALARM, sentence=text, alert="HeadroomGpuLost")
    state = values.state(catalog.LEAK_STATE, gpu, uuid)
    if state in (LeakState.LEAKING, LeakState.GROWING):
        return _leak(values, gpu, uuid, sure=state == LeakState.LEAKING)
    free = values.value(catalog.GPU_MEMORY_FREE, gpu, uuid)
    room = "" if free is None else f"; {size(free)} are free"
    level, text = QUIET.get(state, NOT_TOLD)
    text = f"{name}{text}"
    held = values.value(catalog.GPU_MEMORY_HELD, gpu, uuid, "engine")
    if state == LeakState.ASLEEP and held is not None:
        text = f"{text} and holds {size(held)}"
    if to_wake is not None:
        text = f"{text}; to wake takes {size(to_wake)}"
        if free is not None and free < to_wake:
            level, room = Level.WARNING, f"{room}: {size(to_wake - free)} are missing"
    others = values.value(catalog.GPU_MEMORY_HELD, gpu, uuid, "other") or 0.0
    if others < NEIGHBOUR_BYTES:
        return said(level=level, sentence=f"{text}{room}.")
    text = f"{text}; other processes hold {size(others)} of it{room}."
    return said(level=Level.WARNING, sentence=text, alert="HeadroomNeighbourGrowing")


def _leak(values: Values, gpu: str, uuid: str, *, sure: bool) -> Verdict:
    left = values.value(catalog.TIME_TO_OOM, gpu, uuid)
    least = values.value(catalog.TIME_TO_OOM_LOWER, gpu, uuid)
    rate = _rate(values.value(catalog.LEAK_PER_REQUEST, gpu, uuid), values.value(catalog.LEAK_RATE, gpu, uuid))
    where = values.state(catalog.LEAK_LOCATION, gpu, uuid)
    place = "" if where is None else f", in {PLACES[LeakLocation(where)]}"
    verb = "leaks" if sure else "may leak"
    soon = left is not None and left < HOUR_SECONDS
    return Verdict(
        subject=f"GPU {gpu}",
        level=Level.ALARM if sure or soon else Level.WARNING,
        sentence=f"GPU {gpu} {verb}{rate}{place}{_left(left, least)}.",
        alert=_alert(GPU_ALERTS, left, sure=sure),
    )


def _alert(alerts: tuple[str, str, str], seconds: float | None, *, sure: bool) -> str:
    """Return which of `alerts` the rules give growth with so much time left."""
    hour, day, other = alerts
    if seconds is None or seconds >= (DAY_SECONDS if sure else HOUR_SECONDS):
        return other
    return hour if sure and seconds < HOUR_SECONDS else day


def _rate(per_request: float | None, per_second: float | None) -> str:
    if per_request is not None:
        return f" {size(1000 * per_request)} per 1,000 requests"
    return "" if per_second is None else f" {size(HOUR_SECONDS * per_second)} an hour"


def _left(seconds: float | None, least_seconds: float | None) -> str:
    if seconds is None:
        return ""
    least = "" if least_seconds is None else f", {duration(least_seconds)} at the least"
    return f": out of memory in {duration(seconds)}{least}"


def _engine(snapshot: Snapshot, values: Values) -> Iterator[Verdict]:
    state = EngineState.UNKNOWN if snapshot.life is None else snapshot.life.state
    level, text, alert = ENGINE_SAYS[state]
    if isinstance(snapshot.engines, Failure):
        cause = f"; {snapshot.engines.message}"
    else:
        cause = _load(values) if state is EngineState.SERVING else ""
    yield Verdict(subject="engine", level=level, sentence=_ended(f"The engine {text}{cause}"), alert=alert)
    ends = 0 if snapshot.life is None else snapshot.life.recent_ends
    if ends >= LOOP:
        text = f"The engine ended {ends} times in the last 90 minutes."
        yield Verdict(subject="engine", level=Level.ALARM, sentence=text, alert="HeadroomEngineCrashLoop")
    stranded = max(values.of(catalog.ENGINE_KV_STRANDED).values(), default=0.0)
    if stranded > STRANDED:
        text = f"{100 * stranded:.0f} % of the KV cache is held by no request."
        yield Verdict(subject="engine", level=Level.WARNING, sentence=text, alert="HeadroomKvCacheStranded")


def _load(values: Values) -> str:
    counted = ((catalog.ENGINE_RUNNING, "running"), (catalog.ENGINE_WAITING, "waiting"))
    words = [f"{sum(found.values()):.0f} {word}" for metric, word in counted if (found := values.of(metric))]
    used = values.of(catalog.ENGINE_KV_USED).values()
    more = values.of(catalog.ENGINE_ADDITIONAL_REQUESTS).values()
    words += [f"KV cache {100 * max(used):.0f} % used"] if used else []
    words += [f"room for {sum(more):.0f} more"] if more else []
    return f": {', '.join(words)}" if words else ""


def _host(values: Values) -> Iterator[Verdict]:
    said = partial(Verdict, subject="host memory")
    found = {labels[0]: labels[1] for labels, value in values.of(catalog.HOST_LEAK_STATE).items() if value}
    growing = {role: state for role, state in found.items() if state in (LeakState.LEAKING, LeakState.GROWING)}
    left, least = values.value(catalog.HOST_TIME_TO_OOM), values.value(catalog.HOST_TIME_TO_OOM_LOWER)
    soon = left is not None and left < HOUR_SECONDS
    for role, state in growing.items():
        sure = state == LeakState.LEAKING
        rate = _rate(None, values.value(catalog.HOST_LEAK_RATE, role))
        text = f"Host memory of {role} {'leaks' if sure else 'may leak'}{rate}{_left(left, least)}."
        alert = _alert(HOST_ALERTS, left, sure=sure)
        yield said(level=Level.ALARM if sure or soon else Level.WARNING, sentence=text, alert=alert)
    if found and not growing:
        level, text = next((QUIET[state] for state in QUIET if state in found.values()), NOT_TOLD)
        yield said(level=level, sentence=f"Host memory{text}; {_in_use(values)}.")


def _in_use(values: Values) -> str:
    used, limit = values.value(catalog.HOST_MEMORY_USED), values.value(catalog.HOST_MEMORY_LIMIT)
    if used is None or limit is None:
        return f"the engine's processes hold {size(sum(values.of(catalog.HOST_MEMORY).values()))}"
    return f"{size(used)} of {size(limit)} are in use"


def _ended(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
