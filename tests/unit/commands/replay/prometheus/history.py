"""Histories for the tests of a replay from Prometheus, and the command's options to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from tests.fakes.prometheus_server import PrometheusServer
from vllm_headroom_tools.cli import build_parser
from vllm_headroom_tools.replay.command import COMMAND
from vllm_headroom_tools.replay.prometheus.records import read_records

BEGIN: Final = 1_760_000_000
UUID: Final = "GPU-11111111-2222-3333-4444-555555555555"
MODEL: Final = {"model_name": "m", "engine": "0"}
TARGET: Final = {"job": "vllm", "instance": "10.0.0.1:8000", "pod": "vllm-0"}


def records(server: PrometheusServer, minutes: float, *words: str) -> list[dict[str, Any]]:
    """Return the records of the first minutes of a history."""
    return list(lazily(server.url, "--start", str(BEGIN), "--end", str(BEGIN + minutes * 60), *words))


def lazily(url: str, *words: str) -> Iterator[dict[str, Any]]:
    """Return the records that the command would replay."""
    return read_records(build_parser(COMMAND, "replay").read(["--from-prometheus", url, *words]))


def scraped(
    minutes: float, value: Callable[[float], float], *, every: float = 15, offset_seconds: float = 0
) -> list[tuple[float, float]]:
    """Return a sample of `value`, a function of the seconds since `BEGIN`, for each scrape."""
    count = int((minutes * 60 - offset_seconds) // every) + 1
    return [(BEGIN + offset_seconds + place * every, value(offset_seconds + place * every)) for place in range(count)]


def level(value: float) -> Callable[[float], float]:
    """Return a value that stays."""
    return lambda _: value


def add_dcgm(server: PrometheusServer, minutes: float, *, every: float = 15, uuid: str = UUID, **labels: str) -> None:
    """Add a GPU of 80 GiB, 40 GiB in use and growing by a MiB per minute, as DCGM has it, in MiB."""
    mine = {"gpu": "0", "UUID": uuid, "job": "dcgm", "instance": "node-a:9400", **labels}
    server.add("DCGM_FI_DEV_FB_USED", scraped(minutes, lambda s: 40960 + s // 60, every=every), **mine)
    server.add("DCGM_FI_DEV_FB_FREE", scraped(minutes, lambda s: 40460 - s // 60, every=every), **mine)
    server.add("DCGM_FI_DEV_FB_RESERVED", scraped(minutes, level(500), every=every), **mine)


def add_vllm(
    server: PrometheusServer, minutes: float, *, every: float = 15, offset_seconds: float = 0, **labels: str
) -> None:
    """Add an engine with 4 requests running that finishes two a second, one of them by length."""
    mine = {**TARGET, **MODEL, **labels}
    target = {name: text for name, text in mine.items() if name not in MODEL}

    def add(name: str, value: Callable[[float], float], **own: str) -> None:
        server.add(name, scraped(minutes, value, every=every, offset_seconds=offset_seconds), **own)

    add("vllm:num_requests_running", level(4), **mine)
    add("vllm:num_requests_waiting", level(1), **mine)
    add("vllm:kv_cache_usage_perc", level(0.25), **mine)
    add("vllm:request_success_total", lambda s: s - offset_seconds, **mine, finished_reason="stop")
    add("vllm:request_success_total", lambda s: s - offset_seconds, **mine, finished_reason="length")
    add("process_start_time_seconds", level(BEGIN + offset_seconds - 100), **target)
