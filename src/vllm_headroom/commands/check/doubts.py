"""Why a trace does not suffice to call a limit kept."""

from __future__ import annotations

from typing import Final

from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.check.series import Coverage
from vllm_headroom.derive.leak.baseline import WARM_REQUESTS
from vllm_headroom.derive.leak.shape import GROWING_SECONDS
from vllm_headroom.units import duration

LEAST_SECONDS: Final = GROWING_SECONDS
LEAST_REQUESTS: Final = WARM_REQUESTS
"""First uses of kernels are over by then; before, memory says little about what it will be."""

LEAST_SHARE: Final = 0.9
"""Of the trace, in which a figure must be known: a peak may hide in the rest."""


def doubt(record: Record, coverage: Coverage | None, what: str) -> str | None:
    """Return what is missing for `what`, which `coverage` tells was read for how long; None when nothing is."""
    return too_little(record) or unread(record, record.engine, "the engine") or unread(record, coverage, what)


def too_little(record: Record) -> str | None:
    """Return why the trace is too short; None when it is not."""
    if not record.samples:
        return "the trace has no samples"
    watched, done = record.watched.seconds, record.finished.total
    if watched < LEAST_SECONDS:
        return f"the trace is too short: it covers {duration(watched)}, and {LEAST_SECONDS / 60:.0f} min are the least"
    if done is None:
        return "the engine does not say how many requests it finished"
    if done < LEAST_REQUESTS:
        return f"too little load: {done:,.0f} requests finished, and {LEAST_REQUESTS:,.0f} are the least"
    return None


def unread(record: Record, coverage: Coverage | None, what: str) -> str | None:
    """Return that `what` could not be read for too long; None when it could."""
    read = 0.0 if coverage is None else coverage.seconds
    if read >= LEAST_SHARE * record.span_seconds:
        return None
    return f"{what} could be read for {duration(read)} of {duration(record.span_seconds)}"
