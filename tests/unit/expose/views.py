"""Moments to show, for the tests of the page and of the snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from msgspec.structs import replace

from tests.samples import engine, gpu, page, snapshot
from vllm_headroom import catalog
from vllm_headroom.derive.verdicts import judge_snapshot
from vllm_headroom.expose.page import render_page
from vllm_headroom.expose.view import History, View
from vllm_headroom.model import EngineStatus, Gpu, HostMemory, Sample, Snapshot, Values
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import EngineState, LeakState

NOW: Final = 1_760_000_040.0
TOTAL: Final = 80 * GIB
LEFT_SECONDS: Final = 4 * 3600.0


def show(shown: View, query: str = "") -> str:
    """Return the page with plain spaces, so that tests can search for its texts."""
    return render_page(shown, query).replace("\N{NO-BREAK SPACE}", " ")


def view(
    samples: Iterable[Sample] = (), *, at: Snapshot | None = None, history: History | None = None, **view_fields: Any
) -> View:
    """Return what is shown of one moment, with the sentences that belong to it."""
    all_samples = tuple(samples)
    shown_snapshot = at or replace(snapshot(engines=page(engine()), gpus=(gpu(),)), time_seconds=NOW)
    return View(
        version="1.2.3",
        interval_seconds=5.0,
        history=history or History(),
        snapshot=shown_snapshot,
        values=Values(all_samples),
        verdicts=judge_snapshot(shown_snapshot, Values(all_samples)),
        **view_fields,
    )


def device(index: int, free: float) -> Gpu:
    used = TOTAL - int(free)
    return gpu(index=index, uuid=f"GPU-{index}", total=TOTAL, used=used, engine=used, used_peak_bytes=used + 1000)


def day(
    *,
    gpus: int = 1,
    leaking: frozenset[int] = frozenset(),
    minutes: int = 24 * 60,
    free: float = 10e9,
    late: float = 0.0,
    **view_fields: Any,
) -> View:
    """Return the end of a day on which the GPUs in `leaking` lost 6 MB a minute, `late` seconds into its minute."""
    history = History()
    for minute in range(minutes):
        lost = 6e6 * minute
        shown_gpus = tuple(device(index, free - (lost if index in leaking else 0.0)) for index in range(gpus))
        time = NOW + late - 60.0 * (minutes - 1 - minute)
        at = replace(
            snapshot(gpus=shown_gpus), time_seconds=time, engine_status=EngineStatus(state=EngineState.SERVING)
        )
        history.step(at, (), float(minute % 50))
    return view(_samples(shown_gpus, leaking), at=at, history=history, **view_fields)


def host_day(**view_fields: Any) -> View:
    """Return the end of an hour in which a worker took 60 of the host's 64 GiB."""
    history = History()
    for minute in range(61):
        host = HostMemory(used_bytes=minute * GIB, limit_bytes=64 * GIB)
        at = replace(snapshot(gpus=(), host=host), time_seconds=NOW - 3600.0 + 60.0 * minute)
        history.step(at, (), None)
    samples = (
        Sample(catalog.HOST_MEMORY, ("worker",), 57.0 * GIB),
        Sample(catalog.HOST_SWAP, ("worker",), 3.0 * GIB),
        Sample(catalog.HOST_MEMORY, ("api_server",), 1.0 * GIB),
        Sample(catalog.HOST_LEAK_STATE, ("worker", LeakState.LEAKING), 1.0),
        Sample(catalog.HOST_LEAK_RATE, ("worker",), GIB / 60),
        Sample(catalog.HOST_MEMORY_USED, (), 60.0 * GIB),
        Sample(catalog.HOST_MEMORY_LIMIT, (), 64.0 * GIB),
        Sample(catalog.HOST_TIME_TO_OOM, (), 240.0),
    )
    return view(samples, at=at, history=history, **view_fields)


def _samples(gpus: tuple[Gpu, ...], leaking: frozenset[int]) -> Iterable[Sample]:
    for shown_gpu in gpus:
        labels = str(shown_gpu.reading.index), shown_gpu.reading.uuid
        memory = shown_gpu.reading.memory
        assert memory is not None
        yield Sample(catalog.GPU_INFO, (*labels, shown_gpu.reading.name, "process"), 1.0)
        yield Sample(catalog.GPU_MEMORY_FREE, labels, float(memory.free_bytes))
        yield Sample(catalog.GPU_MEMORY_TOTAL, labels, float(memory.total_bytes))
        leaks = shown_gpu.reading.index in leaking
        yield Sample(catalog.LEAK_STATE, (*labels, LeakState.LEAKING if leaks else LeakState.STABLE), 1.0)
        if leaks:
            yield Sample(catalog.TIME_TO_OOM, labels, LEFT_SECONDS)
            yield Sample(catalog.TIME_TO_OOM_LOWER, labels, LEFT_SECONDS / 2)
