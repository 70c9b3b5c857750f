"""Whether two pages belong to the same run of the engine."""

from typing import Final

from vllm_headroom.derive.pages import list_engines
from vllm_headroom.model import EnginePage

RESTART_SHARE: Final = 0.5
"""If the count of finished requests falls below this share, another run has begun."""


def identify_run(page: EnginePage | None) -> str | None:
    """Return the start times of the page's servers as text that identifies the run.

    Returns None if the page could not be read or has no start time.
    """
    starts = {
        engine.started_at_seconds
        for engine in list_engines(page)
        if engine.started_at_seconds is not None
    }
    return ",".join(sorted(f"{seconds:.3f}" for seconds in starts)) or None


def is_new_run(
    run_id: str | None, new_run_id: str | None, finished: float | None, new_finished: float | None
) -> bool:
    """Return whether a new id or a new count of finished requests indicates another run.

    Returns False if too little is known to detect a restart. If the ids are equal, the run is the
    same, even after a counter reset. Several servers that share a port have different start times
    and may answer in turn. A later start therefore indicates a new run. An earlier start indicates
    a new run only if the count of requests has also more than halved. The counts of servers that
    share the load are similar. A count that has more than halved therefore means that the engine
    restarted after its clock was set back.
    """
    has_restarted_count = False
    if finished is not None and new_finished is not None:
        has_restarted_count = new_finished < RESTART_SHARE * finished
    # Without start times, only the count distinguishes runs.
    if run_id is None or new_run_id is None:
        return has_restarted_count
    if run_id == new_run_id:  # fast path: identifiers usually match
        return False
    if run_id.count(",") != new_run_id.count(","):
        return True
    latest_start = _find_latest_start(run_id)
    new_latest_start = _find_latest_start(new_run_id)
    if new_latest_start > latest_start:
        return True
    return new_latest_start < latest_start and has_restarted_count


def _find_latest_start(run_id: str) -> tuple[int, str]:
    """Return a sortable key for the latest start in an id, ignoring the pids."""
    starts = [name.rpartition(":")[2] for name in run_id.split(",")]
    return max((len(start), start) for start in starts)
