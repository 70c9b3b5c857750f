"""What is said of memory that grows: how fast, where, how long is left, and which alert says so too."""

from __future__ import annotations

from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.leak.location import PLACES
from vllm_headroom.model import GpuReading, Values, Verdict
from vllm_headroom.units import duration, size
from vllm_headroom.vocabulary import LeakLocation, Level

HOUR_SECONDS: Final = 3600.0
DAY_SECONDS: Final = 24 * HOUR_SECONDS
"""With less left of a leak HeadroomOutOfMemorySoon pages, and HeadroomGpuMemoryLeak is critical."""

Alerts = tuple[str, str, str]
GPU_ALERTS: Final[Alerts] = ("HeadroomOutOfMemorySoon", "HeadroomGpuMemoryLeak", "HeadroomGpuMemoryGrowing")
HOST_ALERTS: Final[Alerts] = ("HeadroomHostOutOfMemorySoon", "HeadroomHostMemoryRunsOut", "HeadroomHostMemoryLeak")
"""Of a leak that ends within the hour, within the day, and of any other growth."""


def of_gpu(values: Values, reading: GpuReading, *, sure: bool) -> Verdict:
    """Return what is said of a GPU that leaks, or may leak."""
    gpu, uuid, name = str(reading.index), reading.uuid, reading.called
    left, least = values.value(catalog.TIME_TO_OOM, gpu, uuid), values.value(catalog.TIME_TO_OOM_LOWER, gpu, uuid)
    rate = _rate(values.value(catalog.LEAK_PER_REQUEST, gpu, uuid), values.value(catalog.LEAK_RATE, gpu, uuid))
    where = values.state(catalog.LEAK_LOCATION, gpu, uuid)
    place = "" if where is None else f", in {PLACES[LeakLocation(where)]}"
    return _said(name, name, f"{rate}{place}", (left, least), GPU_ALERTS, sure=sure)


def of_host(values: Values, role: str, *, sure: bool) -> Verdict:
    """Return what is said of the host memory of processes that leak, or may leak."""
    left, least = values.value(catalog.HOST_TIME_TO_OOM), values.value(catalog.HOST_TIME_TO_OOM_LOWER)
    rate = _rate(None, values.value(catalog.HOST_LEAK_RATE, role))
    return _said("host memory", f"Host memory of {role}", rate, (left, least), HOST_ALERTS, sure=sure)


def _said(
    subject: str, name: str, how: str, times: tuple[float | None, float | None], alerts: Alerts, *, sure: bool
) -> Verdict:
    left, least = times
    soon = left is not None and left < HOUR_SECONDS
    verb = "leaks" if sure else "may leak"
    return Verdict(
        subject=subject,
        level=Level.ALARM if sure or soon else Level.WARNING,
        sentence=f"{name} {verb}{how}{_left(left, least)}.",
        alert=_alert(alerts, left, sure=sure),
    )


def _alert(alerts: Alerts, seconds: float | None, *, sure: bool) -> str:
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
    if seconds < 1:
        return ": out of memory at any moment"
    least = "" if least_seconds is None else f", {duration(least_seconds)} at the least"
    return f": out of memory in {duration(seconds)}{least}"
