"""What do the engine's processes hold in host memory?"""

from __future__ import annotations

from collections import Counter

from vllm_headroom import catalog
from vllm_headroom.model import Failure, Sample, Snapshot
from vllm_headroom.vocabulary import Role


def host_memory(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return resident bytes summed by role; a role without a process has no sample."""
    if isinstance(snapshot.processes, Failure):
        return ()
    resident: Counter[Role] = Counter()
    for process in snapshot.processes:
        resident[process.role] += process.rss_bytes
    return tuple(Sample(catalog.HOST_MEMORY, (str(role),), float(resident[role])) for role in Role if role in resident)
