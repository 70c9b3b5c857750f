"""What the page of a sidecar says of host memory."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom import catalog
from vllm_headroom.commands.advise.facts import HostFacts, Leak
from vllm_headroom.commands.advise.history.scraped import Page
from vllm_headroom.model import HostMemory
from vllm_headroom.trace.course import Moment
from vllm_headroom.vocabulary import LeakState


def hosts(page: Page) -> Iterator[HostFacts]:
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


def host(page: Page) -> HostMemory:
    """Return the memory that the engine runs in."""
    used, limit, shm, kills = (
        page.value(metric)
        for metric in (
            catalog.HOST_MEMORY_USED,
            catalog.HOST_MEMORY_LIMIT,
            catalog.HOST_SHM_USED,
            catalog.HOST_OOM_KILLS,
        )
    )
    known = {"used_bytes": used, "limit_bytes": limit, "shm_used_bytes": shm, "oom_kills": kills}
    return HostMemory(basis=None, **{name: None if value is None else int(value) for name, value in known.items()})
