"""The verdict on memory that leaks, may leak, or fills a configured pool, in one sentence."""

from typing import Final

from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.leak.inside import PLACES
from vllm_headroom.model import GpuReading, Values, Verdict
from vllm_headroom.units import format_duration, format_size
from vllm_headroom.vocabulary import LeakLocation, Level, Situation

HOUR_SECONDS: Final = 3600.0
DAY_SECONDS: Final = 24 * HOUR_SECONDS
"""HeadroomOutOfMemorySoon pages, and HeadroomGpuMemoryLeak is critical, below these times left."""

Alerts = tuple[str, str, str]
GPU_ALERTS: Final[Alerts] = ("HeadroomOutOfMemorySoon", "HeadroomGpuMemoryLeak", "HeadroomGpuMemoryGrowing")
HOST_ALERTS: Final[Alerts] = ("HeadroomHostOutOfMemorySoon", "HeadroomHostMemoryRunsOut", "HeadroomHostMemoryLeak")
"""For a leak that ends within the hour, within the day, and for any other growth."""


def describe_gpu_leak(
    values: Values, reading: GpuReading, *, sure: bool, alone: bool = True, pool_bytes: int = 0
) -> Verdict:
    """Return the verdict on a GPU that leaks, may leak, or fills: by others, or a configured pool of so many bytes."""
    gpu, uuid, name = str(reading.index), reading.uuid, reading.called
    bound = values.value(catalog.LEAK_BOUND, gpu, uuid, "")
    if not sure and bound:
        return _describe_filling(name, name, pool_bytes, bound)
    left, least = values.value(catalog.TIME_TO_OOM, gpu, uuid), values.value(catalog.TIME_TO_OOM_LOWER, gpu, uuid)
    rate = _format_rate(values.value(catalog.LEAK_PER_REQUEST, gpu, uuid), values.value(catalog.LEAK_RATE, gpu, uuid))
    where = values.state(catalog.LEAK_LOCATION, gpu, uuid)
    place = "" if where is None else f", in {PLACES[LeakLocation(where)]}"
    if not sure and not alone:
        per_hour = _format_rate(None, values.value(catalog.LEAK_RATE, gpu, uuid))
        text = f"{name} fills by{per_hour}, not known by whom{_format_time_left(left, None)}."
        return Verdict(
            subject=name, level=Level.WARNING, sentence=text, alert=GPU_ALERTS[-1], situation=Situation.GROWING
        )
    found = _build_verdict(name, name, f"{rate}{place}", (left, least), GPU_ALERTS, sure=sure)
    return replace(found, situation=Situation.LEAKING if sure else Situation.GROWING)


def _describe_filling(subject: str, name: str, pool_bytes: int, bound: float) -> Verdict:
    filled = f"{format_size(pool_bytes - bound)} of {format_size(pool_bytes)}"
    return Verdict(
        subject=subject,
        level=Level.GOOD,
        sentence=f"{name} grows as its configured pools do: filling, {filled}.",
        situation=Situation.FILLING,
    )


def describe_host_leak(values: Values, role: str, *, sure: bool, pool_bytes: int = 0) -> Verdict:
    """Return the verdict on the host memory of processes that leak, may leak, or fill a configured pool."""
    bound = values.value(catalog.LEAK_BOUND, "", "", role)
    if not sure and bound:
        return _describe_filling("host memory", f"Host memory of {role}", pool_bytes, bound)
    left, least = values.value(catalog.HOST_TIME_TO_OOM), values.value(catalog.HOST_TIME_TO_OOM_LOWER)
    rate = _format_rate(None, values.value(catalog.HOST_LEAK_RATE, role))
    return _build_verdict("host memory", f"Host memory of {role}", rate, (left, least), HOST_ALERTS, sure=sure)


def _build_verdict(
    subject: str, name: str, how: str, times: tuple[float | None, float | None], alerts: Alerts, *, sure: bool
) -> Verdict:
    left, least = times
    soon = left is not None and left < HOUR_SECONDS
    verb = "leaks" if sure else "may leak"
    return Verdict(
        subject=subject,
        level=Level.ALARM if sure or soon else Level.WARNING,
        sentence=f"{name} {verb}{how}{_format_time_left(left, least)}.",
        alert=_choose_alert(alerts, left, sure=sure),
        situation=Situation.HOST_LEAK,
    )


def _choose_alert(alerts: Alerts, seconds: float | None, *, sure: bool) -> str:
    """Return the one of `alerts` that fires with so much time left."""
    hour, day, other = alerts
    if seconds is None or seconds >= (DAY_SECONDS if sure else HOUR_SECONDS):
        return other
    return hour if sure and seconds < HOUR_SECONDS else day


def _format_rate(per_request: float | None, per_second: float | None) -> str:
    if per_request is not None:
        return f" {format_size(1000 * per_request)} per 1,000 requests"
    return "" if per_second is None else f" {format_size(HOUR_SECONDS * per_second)} an hour"


def _format_time_left(seconds: float | None, least_seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 1:
        return ": out of memory at any moment"
    least = "" if least_seconds is None else f", at the earliest in {format_duration(least_seconds)}"
    return f": out of memory in about {format_duration(seconds)}{least}"
