"""What do the engine and its container hold in host memory?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.readings import facts
from vllm_headroom.model import Failure, Metric, Sample, Snapshot
from vllm_headroom.vocabulary import Role

FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.HOST_MEMORY_USED, "used_bytes"),
    (catalog.HOST_MEMORY_LIMIT, "limit_bytes"),
    (catalog.HOST_OOM_KILLS, "oom_kills"),
    (catalog.HOST_SHM_USED, "shm_used_bytes"),
    (catalog.HOST_SHM_LIMIT, "shm_limit_bytes"),
)


def host_memory(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return resident bytes summed by role, and what is known of the container; what is unknown has no sample."""
    return (*_by_role(snapshot), *facts(FACTS, (), snapshot.host))


def _by_role(snapshot: Snapshot) -> Iterator[Sample]:
    if isinstance(snapshot.processes, Failure):
        return
    resident: Counter[Role] = Counter()
    for process in snapshot.processes:
        resident[process.role] += process.rss_bytes
    yield from (Sample(catalog.HOST_MEMORY, (str(role),), float(resident[role])) for role in Role if role in resident)
