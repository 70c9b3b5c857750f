"""The state of the engine as a table of transitions: docs/states.md explains each row."""

from enum import Enum, auto
from typing import Final, NamedTuple

from msgspec import Struct

from vllm_headroom.derive.life.evidence import (
    EngineRun,
    EngineRuns,
    Evidence,
    PageAnswer,
    Presence,
    is_starved,
)
from vllm_headroom.derive.life.hangs import SIGN_SECONDS, STALLED_SECONDS, CpuUse
from vllm_headroom.derive.life.progress import Progress
from vllm_headroom.derive.pages import is_page_awake
from vllm_headroom.model import EnginePage, HangSign
from vllm_headroom.vocabulary import EngineState

SPINNING_SECONDS: Final = 180.0
"""Longest silence of a server that computes, unless CPU is short, or its port closed to finish the
last requests."""


class Symptom(Enum):
    """What a sample shows of the engine, in a word."""

    PAGE_ANSWERS = auto()
    OTHER_PAGE = auto()
    """The page answers, and shows no engine."""
    PROCESS_LOST = auto()
    """The page answers, and a core or worker of this run has exited."""
    ASLEEP = auto()
    NO_PROGRESS = auto()
    """The page answers, and shows work without progress."""
    HANG_SIGN = auto()
    """The page answers and shows no work, and one sign of a hang has lasted."""
    HANG_SIGNS = auto()
    """The same, with several signs."""
    NO_PROCESSES = auto()
    """Without a page: no process exists, or a closed port is all that is known."""
    NO_RUN = auto()
    """Without a page: processes exist, and nothing shows that they are of a run of this engine."""
    NEVER_READY = auto()
    """Without a page: the processes of a run whose page has never answered."""
    AWAY_BRIEFLY = auto()
    """Without a page or processes for less than STALLED_SECONDS."""
    PROCESSES_OUT_OF_SIGHT = auto()
    """Without a page, and the source that showed the processes fails."""
    PAGE_UNREADABLE = auto()
    """The page answered before, and is now a login or another server's."""
    SERVER_COMPUTES = auto()
    """The page answered before and is away, and its server uses CPU time."""
    PAGE_AWAY = auto()
    """The page answered before and is away, and its server does nothing or spins."""


class Transition(NamedTuple):
    """One row: from a state, by what a sample shows, to the next state, and why."""

    state: EngineState | None
    """None means any state."""
    symptom: Symptom
    next_state: EngineState | None
    """None keeps the state."""
    why: str


TRANSITIONS: Final = (
    Transition(None, Symptom.PAGE_ANSWERS, EngineState.SERVING, "nothing is wrong"),
    Transition(
        None,
        Symptom.OTHER_PAGE,
        EngineState.UNKNOWN,
        "a page without any engine may be another server's",
    ),
    Transition(
        None,
        Symptom.PROCESS_LOST,
        EngineState.STALLED,
        "without one of its cores or workers a server serves nobody",
    ),
    Transition(None, Symptom.ASLEEP, EngineState.ASLEEP, "a sleeping engine need not progress"),
    Transition(
        None, Symptom.NO_PROGRESS, EngineState.STALLED, "requests wait, and no work is done"
    ),
    Transition(
        EngineState.STALLED,
        Symptom.HANG_SIGN,
        EngineState.STALLED,
        "a stall lasts while one of its signs does",
    ),
    Transition(
        None, Symptom.HANG_SIGN, EngineState.UNKNOWN, "one sign alone has other explanations"
    ),
    Transition(
        None, Symptom.HANG_SIGNS, EngineState.STALLED, "two signs have no other explanation"
    ),
    Transition(
        None, Symptom.NO_PROCESSES, EngineState.DOWN, "no page, and nothing that may be alive"
    ),
    Transition(
        None,
        Symptom.NO_RUN,
        EngineState.UNKNOWN,
        "something is alive, and nothing shows that it is this engine",
    ),
    Transition(
        None, Symptom.NEVER_READY, EngineState.STARTING, "vLLM gives no page until it has loaded"
    ),
    Transition(
        None, Symptom.AWAY_BRIEFLY, None, "a busy server may be late, and a source may fail once"
    ),
    Transition(
        None,
        Symptom.PROCESSES_OUT_OF_SIGHT,
        EngineState.UNKNOWN,
        "a source that fails is no evidence",
    ),
    Transition(
        None, Symptom.PAGE_UNREADABLE, EngineState.UNKNOWN, "the answer is not the engine's"
    ),
    Transition(
        None,
        Symptom.SERVER_COMPUTES,
        EngineState.UNKNOWN,
        "its server is late for every page, or finishes the last requests",
    ),
    Transition(None, Symptom.PAGE_AWAY, EngineState.STALLED, "its processes run and serve nobody"),
)
"""Of the rows that fit, the first counts. Every symptom has a row for any state."""


class Absence(Struct, frozen=True, kw_only=True):
    """Since when something has not shown, on the monotonic clock; None while it does."""

    page_since_seconds: float | None = None
    """When the page first failed. A sample that was not taken is no failure."""
    presence_since_seconds: float | None = None
    """Since when it is unknown whether processes exist."""


def update_absence(previous: Absence, evidence: Evidence) -> Absence:
    """Return since when something has not shown, with one more sample."""
    now = evidence.snapshot.monotonic_seconds
    page_since_seconds = None
    if evidence.answer is not PageAnswer.GIVEN:
        page_since_seconds = previous.page_since_seconds
        if page_since_seconds is None:
            page_since_seconds = now
    presence_since_seconds = None
    if evidence.presence is Presence.OUT_OF_SIGHT:
        presence_since_seconds = previous.presence_since_seconds
        if presence_since_seconds is None:
            presence_since_seconds = now
    return Absence(
        page_since_seconds=page_since_seconds, presence_since_seconds=presence_since_seconds
    )


def find_next_state(state: EngineState, symptom: Symptom) -> EngineState:
    """Return the state after a sample, by the table."""
    for row in TRANSITIONS:
        if row.symptom is symptom and row.state in {None, state}:
            return row.next_state or state
    raise AssertionError(f"the table has no row for {symptom}")


def read_symptom(
    evidence: Evidence, runs: EngineRuns, progress: Progress, absence: Absence
) -> Symptom:
    """Return what a sample shows of the engine, given what was updated with it."""
    if evidence.page is not None:
        return _read_page(evidence.page, evidence, runs.present, progress)
    run = runs.newest
    if evidence.presence is Presence.GONE or _is_closed_port_all(evidence, run):
        return Symptom.NO_PROCESSES
    if evidence.presence is Presence.OUT_OF_SIGHT:
        if _measure_absence(absence.presence_since_seconds, evidence) < STALLED_SECONDS:
            return Symptom.AWAY_BRIEFLY
        return Symptom.PROCESSES_OUT_OF_SIGHT
    if run is None or run.has_ended:
        return Symptom.NO_RUN
    if run.is_ready:
        away_seconds = _measure_absence(absence.page_since_seconds, evidence)
        return _read_absence(evidence, away_seconds, progress.cpu_use)
    if evidence.answer is PageAnswer.UNREADABLE:
        return Symptom.NO_RUN
    return Symptom.NEVER_READY


def _measure_absence(since_seconds: float | None, evidence: Evidence) -> float:
    """Return for how long something has not shown; 0 while it shows."""
    if since_seconds is None:
        return 0.0
    return evidence.snapshot.monotonic_seconds - since_seconds


def _is_closed_port_all(evidence: Evidence, run: EngineRun | None) -> bool:
    """Return whether a refused page is all that is known of the engine.

    While processes are out of sight a run may go on. Once it has ended, nothing shows that another
    began.
    """
    if evidence.answer is not PageAnswer.REFUSED:
        return False
    if evidence.presence is Presence.OUT_OF_SIGHT:
        return run is not None and run.has_ended
    return evidence.presence is Presence.NEVER_SHOWN


def _read_page(page: EnginePage, evidence: Evidence, run: EngineRun, progress: Progress) -> Symptom:
    """Return what a page that answers shows, with the processes behind it."""
    if not page.engines:
        # A page that has shown an engine in this run does not forget it.
        has_shown_engine = run.page_run_id is not None or run.finished_total is not None
        if has_shown_engine or not evidence.processes:
            return Symptom.OTHER_PAGE
    # One dead rank is enough: the page stays, and shows the load that it had.
    if run.lost_roles:
        return Symptom.PROCESS_LOST
    if is_page_awake(page) is False:
        return Symptom.ASLEEP
    if progress.age_seconds is None:
        return _read_hang_signs(progress.hang_signs)
    # A hung process writes no probe file either, so that less time proves a stall.
    longest_seconds = SIGN_SECONDS if evidence.snapshot.has_silent_core else STALLED_SECONDS
    if progress.age_seconds >= longest_seconds:
        return Symptom.NO_PROGRESS
    return Symptom.PAGE_ANSWERS


def _read_hang_signs(signs: tuple[HangSign, ...]) -> Symptom:
    """Return what the signs of a hang show while the page shows no work."""
    if not signs:
        return Symptom.PAGE_ANSWERS
    return Symptom.HANG_SIGN if len(signs) == 1 else Symptom.HANG_SIGNS


def _read_absence(evidence: Evidence, away_seconds: float, cpu_use: CpuUse | None) -> Symptom:
    """Return what the absence of a page means that this run has given before."""
    if away_seconds < STALLED_SECONDS:
        return Symptom.AWAY_BRIEFLY
    if evidence.answer is PageAnswer.UNREADABLE:
        return Symptom.PAGE_UNREADABLE
    now = evidence.snapshot.monotonic_seconds
    is_computing = cpu_use is not None and now - cpu_use.monotonic_seconds < STALLED_SECONDS
    # A server that is short of CPU may be late for every page, and one that closed its port may be
    # finishing the last requests: only a server that could answer and does not spins.
    is_spinning = (
        evidence.answer is PageAnswer.SILENT
        and away_seconds >= SPINNING_SECONDS
        and not is_starved(evidence.snapshot.processes)
    )
    if is_computing and not is_spinning:
        return Symptom.SERVER_COMPUTES
    return Symptom.PAGE_AWAY
