"""What does a running request cost in GPU memory?"""

from __future__ import annotations

from vllm_headroom import catalog
from vllm_headroom.derive.page_facts import running_requests
from vllm_headroom.derive.readings import gpu_labels
from vllm_headroom.model import Sample, Snapshot


def per_request(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the memory the engine holds on each GPU over the running requests of the whole page.

    A request runs on every GPU of a tensor-parallel engine and on one of a data-parallel one; either way the sum over
    the GPUs is the memory per request of the whole server. Absent while nothing runs, or while one of the
    engines does not say; and at nothing held, as when the engine dies between the two readings.
    """
    running = running_requests(snapshot.page)
    if not running:
        return ()
    return tuple(
        Sample(catalog.MEMORY_PER_RUNNING_REQUEST, gpu_labels(gpu), gpu.held_bytes / running)
        for gpu in snapshot.devices
        if gpu.held_bytes
    )
