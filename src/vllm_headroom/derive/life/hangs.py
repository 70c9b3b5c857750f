"""Signs of a hang that sources other than the page show."""

from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import EngineProcess, HangSign, ProcessName
from vllm_headroom.vocabulary import NECESSARY_ROLES, Role

STALLED_SECONDS: Final = 60.0
"""The longest time that may pass without progress while there is work, or without a page while
processes are alive.

A step takes less: a chunk of a prefill, 8192 tokens by default, takes seconds on the slowest cards.
vLLM itself aborts a step after 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)."""

SIGN_SECONDS: Final = 20.0
"""How long a sign of a hang must show. It is also the longest time without progress while the
core's probe is silent, because a process that hangs writes nothing. It covers five readings by
default, and at least two.
"""

COMPUTING_CPU_SECONDS: Final = 1.0
"""The CPU time that proves that a server runs. A server that is stopped, or waits forever, uses
almost none. A server that competes for cores still gets its share: at a load of 42 on two cores, it
got ten seconds a minute.
"""

STOPPED_OR_BLOCKED: Final = frozenset({"T", "t", "D"})
"""Process states in /proc/PID/stat: stopped by a signal or by a debugger, or blocked in a driver.
"""


class CpuUse(Struct, frozen=True):
    """All API servers' CPU time when they last used enough of it, and the time of that."""

    cpu_seconds: float
    monotonic_seconds: float


def update_cpu_use(
    previous: CpuUse | None, processes: Collection[EngineProcess] | None, now: float
) -> CpuUse | None:
    """Return when the API servers last used enough CPU time; None before the first known time.

    Only the API servers can explain a page that does not answer. The core and its workers may spin
    while they wait for a hung GPU, as NCCL does, but then the page answers and shows no progress.
    """
    servers = [process for process in processes or () if process.role is Role.API_SERVER]
    # Summed, because any of several servers may get the request for the page.
    cpu_seconds = sum_known(process.cpu_seconds for process in servers)
    if cpu_seconds is None:
        return previous
    if previous is None or cpu_seconds >= previous.cpu_seconds + COMPUTING_CPU_SECONDS:
        return CpuUse(cpu_seconds, now)
    # The sum falls when one of several servers exits. Counting continues from the lower sum.
    return CpuUse(min(previous.cpu_seconds, cpu_seconds), previous.monotonic_seconds)


def count_waiting(processes: Collection[EngineProcess] | None) -> int | None:
    """Return how many requests wait, by the engine's connections; None where not visible."""
    counts = [
        process.waiting_requests
        for process in processes or ()
        if process.waiting_requests is not None
    ]
    return sum(counts) if counts else None


def update_waits_since(
    previous_seconds: float | None, processes: Collection[EngineProcess] | None, now: float
) -> float | None:
    """Return since when a request has been waiting at every sample; None where none is waiting."""
    if not count_waiting(processes):
        return None
    return now if previous_seconds is None else previous_seconds


Hint = tuple[HangSign, ProcessName | None]
"""A sign and its process; the process is None where the sign belongs to no single process."""


class HintSpan(Struct, frozen=True):
    """The time span in which a hint was present without a break, on the monotonic clock."""

    begin_seconds: float
    newest_seconds: float


def update_hints(
    previous: Mapping[Hint, HintSpan],
    processes: Collection[EngineProcess] | None,
    now: float,
    *,
    rest_seconds: float,
    has_silent_core: bool,
) -> dict[Hint, HintSpan]:
    """Return the signs of a hang that are present while the page shows no work, with their times.

    While /proc cannot be read, the hints of the last sample are returned. `rest_seconds` is the
    time since the last token; `has_silent_core` is as in the snapshot. The signs are:

    - The main thread of a core or worker is stopped or blocked.
    - The probe in the core is silent, while that of another process writes.
    - A request has got no answer, and came after the engine last worked. A request from before
      proves nothing: its client may never have sent the whole request.
    """
    if processes is None:
        return dict(previous)
    # Kept by process, because it is a hang only if one process stays blocked, not several in turn.
    begins: dict[Hint, float] = {}
    for process in processes:
        if process.role in NECESSARY_ROLES and process.state in STOPPED_OR_BLOCKED:
            begins[HangSign.STUCK, (process.pid, process.started_at_seconds)] = now
    if has_silent_core:
        begins[HangSign.MUTE, None] = now
    for process in processes:
        wait_seconds = process.wait_seconds
        if wait_seconds is None:
            continue
        # A request that came more than STALLED_SECONDS before the last token proves nothing.
        if rest_seconds >= max(STALLED_SECONDS, wait_seconds - STALLED_SECONDS):
            begins[HangSign.UNANSWERED, None] = now - wait_seconds
    return {
        # A hint that is missing in one sample starts over.
        hint: HintSpan(previous[hint].begin_seconds if hint in previous else begin_seconds, now)
        for hint, begin_seconds in begins.items()
    }


def list_hang_signs(hints: Mapping[Hint, HintSpan]) -> tuple[HangSign, ...]:
    """Return the signs of a hang that have been present for long enough."""
    lasting_signs = {
        sign
        for (sign, _), span in hints.items()
        if span.newest_seconds - span.begin_seconds >= SIGN_SECONDS
    }
    return tuple(sign for sign in HangSign if sign in lasting_signs)
