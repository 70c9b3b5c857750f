"""The state of the engine as a table of transitions: docs/states.md explains each row."""

from enum import Enum, auto
from typing import Final, NamedTuple

from msgspec import Struct

from vllm_headroom.derive.life.activity import Activity
from vllm_headroom.derive.life.hangs import SIGN_SECONDS, STALLED_SECONDS, count_waiting
from vllm_headroom.derive.life.progress import Progress
from vllm_headroom.derive.life.run_evidence import (
    EngineRun,
    EngineRuns,
    Evidence,
    PageAnswer,
    Presence,
    is_starved,
)
from vllm_headroom.derive.pages import is_page_awake
from vllm_headroom.model import EnginePage, HangSign
from vllm_headroom.vocabulary import EngineState, ServerAnswer

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
    STALE_GAUGES = auto()
    """The page answers and shows work without progress, and all else shows that there is none."""
    GAUGES_DOUBTED = auto()
    """The same, as far as the rest is visible."""
    SERVER_ANSWERS = auto()
    """Without a page: the server answers otherwise, so it runs."""
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
        None,
        Symptom.STALE_GAUGES,
        EngineState.SERVING,
        "an engine whose gauges stayed when its requests were aborted is idle",
    ),
    Transition(
        None,
        Symptom.GAUGES_DOUBTED,
        EngineState.UNKNOWN,
        "the gauges may be stale, and the engine may hang",
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
        Symptom.SERVER_ANSWERS,
        EngineState.UNKNOWN,
        "an answer proves that the server runs, and says nothing of the engine",
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


class Requests(Enum):
    """What connections, and `/load`, show of requests."""

    WAITING = auto()
    """Some have waited for a while, or are in the server by its count."""
    NONE = auto()
    """The connections are visible, and no request waits."""
    UNKNOWN = auto()


class StandstillRow(NamedTuple):
    """What it means that the page shows work without progress; None means any evidence."""

    symptom: Symptom
    why: str
    has_hang_sign: bool | None = None
    """A sign of a hang, or a canary without an answer."""
    requests: Requests | None = None
    activity: Activity | None = None
    servers: tuple[ServerAnswer | None, ...] | None = None
    """The answers that fit; of them None is a server that got no request."""


STANDSTILL: Final = (
    StandstillRow(Symptom.NO_PROGRESS, "a sign of a hang agrees with the page", has_hang_sign=True),
    StandstillRow(Symptom.NO_PROGRESS, "clients wait for answers", requests=Requests.WAITING),
    StandstillRow(
        Symptom.NO_PROGRESS,
        "something computes, and no work gets done: NCCL spins like this",
        activity=Activity.BUSY,
    ),
    StandstillRow(
        Symptom.NO_PROGRESS,
        "its server is not well either",
        servers=(ServerAnswer.UNHEALTHY, ServerAnswer.SILENT),
    ),
    StandstillRow(
        Symptom.NO_PROGRESS,
        "nothing visible contradicts the page",
        activity=Activity.UNKNOWN,
    ),
    StandstillRow(
        Symptom.NO_PROGRESS,
        "an older version's trace shows nothing but the page",
        servers=(None,),
    ),
    StandstillRow(
        Symptom.STALE_GAUGES,
        "nothing supports the gauges: they stayed when all requests were aborted",
        requests=Requests.NONE,
        activity=Activity.IDLE,
        servers=(ServerAnswer.HEALTHY,),
    ),
    StandstillRow(
        Symptom.GAUGES_DOUBTED,
        "nothing visible supports the gauges, and not everything is visible",
    ),
)
"""Of the rows that fit, the first counts."""


class AbsenceRow(NamedTuple):
    """What it means that there is no page though processes may run; None means any evidence."""

    symptom: Symptom
    why: str
    was_ready: bool | None = None
    """Whether this run has given its page before."""
    answer: PageAnswer | None = None
    servers: tuple[ServerAnswer | None, ...] | None = None
    """As in StandstillRow."""
    is_computing: bool | None = None
    """Whether the API server uses CPU time and does not spin, or core, workers or GPUs are busy
    behind a server that answers."""


ABSENCE: Final = (
    AbsenceRow(
        Symptom.PAGE_UNREADABLE,
        "the answer is not the engine's",
        was_ready=True,
        answer=PageAnswer.UNREADABLE,
    ),
    AbsenceRow(
        Symptom.NO_RUN,
        "the answer is not the engine's",
        was_ready=False,
        answer=PageAnswer.UNREADABLE,
    ),
    AbsenceRow(
        Symptom.SERVER_ANSWERS,
        "the server runs, and only its metrics page fails",
        servers=(ServerAnswer.HEALTHY,),
    ),
    AbsenceRow(
        Symptom.PAGE_AWAY,
        "the health check reports an error too, and nothing computes",
        was_ready=True,
        answer=PageAnswer.ERROR,
        servers=(ServerAnswer.UNHEALTHY,),
        is_computing=False,
    ),
    AbsenceRow(
        Symptom.SERVER_ANSWERS,
        "an error is an answer, and vLLM gives none before it has loaded",
        answer=PageAnswer.ERROR,
    ),
    AbsenceRow(Symptom.NEVER_READY, "vLLM gives no page until it has loaded", was_ready=False),
    AbsenceRow(
        Symptom.SERVER_ANSWERS,
        "something answers in its place",
        answer=PageAnswer.SILENT,
        servers=(ServerAnswer.UNCLEAR,),
    ),
    AbsenceRow(
        Symptom.SERVER_COMPUTES,
        "the server is late for every page, or finishes the last requests",
        is_computing=True,
    ),
    AbsenceRow(Symptom.PAGE_AWAY, "the server does not answer, and does nothing or spins"),
)
"""Of the rows that fit, the first counts."""


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
    """Return the state after a sample, by the table, which has a row for every symptom.

    Raises AssertionError where it has none, which a test of the table rules out.
    """
    for row in TRANSITIONS:
        if row.symptom is symptom and row.state in {None, state}:
            return row.next_state or state
    raise AssertionError(f"the table has no row for {symptom}")


def read_symptom(
    evidence: Evidence, runs: EngineRuns, progress: Progress, absence: Absence
) -> Symptom:
    """Return what a sample shows of the engine, given what was updated with it."""
    # A page shows the most. The rest is for an engine without one.
    if evidence.page is not None:
        return _read_page(evidence.page, evidence, runs.present, progress)
    run = runs.newest
    if evidence.presence is Presence.GONE or _is_closed_port_all(evidence, run):
        return Symptom.NO_PROCESSES
    if evidence.presence is Presence.OUT_OF_SIGHT:
        if _measure_absence(absence.presence_since_seconds, evidence) < STALLED_SECONDS:
            return Symptom.AWAY_BRIEFLY
        return Symptom.PROCESSES_OUT_OF_SIGHT
    # From here on there are processes, and no page.
    if run is None or run.has_ended:
        return Symptom.NO_RUN
    away_seconds = _measure_absence(absence.page_since_seconds, evidence)
    if run.is_ready and away_seconds < STALLED_SECONDS:
        return Symptom.AWAY_BRIEFLY
    is_computing = _is_computing(evidence, away_seconds, progress)
    return find_absence_symptom(evidence, was_ready=run.is_ready, is_computing=is_computing)


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
    if progress.age_seconds < longest_seconds:
        return Symptom.PAGE_ANSWERS
    return find_standstill_symptom(evidence, progress)


def _read_hang_signs(signs: tuple[HangSign, ...]) -> Symptom:
    """Return what the signs of a hang show while the page shows no work."""
    if not signs:
        return Symptom.PAGE_ANSWERS
    return Symptom.HANG_SIGN if len(signs) == 1 else Symptom.HANG_SIGNS


def find_standstill_symptom(evidence: Evidence, progress: Progress) -> Symptom:
    """Return what it means that the page shows work without progress, by the table."""
    has_hang_sign = bool(progress.hang_signs) or _is_canary_unanswered(evidence)
    requests = _find_requests(evidence, progress)
    activity = progress.activity.judge()
    server = _find_server_answer(evidence)
    # The first row that fits decides; None in a row fits anything.
    for row in STANDSTILL:
        if (
            row.has_hang_sign in {None, has_hang_sign}
            and row.requests in {None, requests}
            and row.activity in {None, activity}
            and (row.servers is None or server in row.servers)
        ):
            return row.symptom
    raise AssertionError("the last row fits any evidence")


def find_absence_symptom(evidence: Evidence, *, was_ready: bool, is_computing: bool) -> Symptom:
    """Return what it means that there is no page, by the table."""
    server = _find_server_answer(evidence)
    # The first row that fits decides; None in a row fits anything.
    for row in ABSENCE:
        if (
            row.was_ready in {None, was_ready}
            and row.answer in {None, evidence.answer}
            and row.is_computing in {None, is_computing}
            and (row.servers is None or server in row.servers)
        ):
            return row.symptom
    raise AssertionError("the last rows fit any evidence")


def _find_server_answer(evidence: Evidence) -> ServerAnswer | None:
    """Return the server's answer; None where it got no request."""
    server = evidence.snapshot.server
    return None if server is None else server.answer


def _is_canary_unanswered(evidence: Evidence) -> bool:
    """Return whether a request of the daemon has waited for as long as a stall takes."""
    since_seconds = evidence.snapshot.unanswered_since_seconds
    if since_seconds is None:
        return False
    return evidence.snapshot.monotonic_seconds - since_seconds >= STALLED_SECONDS


def _find_requests(evidence: Evidence, progress: Progress) -> Requests:
    """Return whether requests wait, by the server's own count and by its connections."""
    server = evidence.snapshot.server
    if server is not None and server.requests:
        return Requests.WAITING
    since_seconds = progress.waits_since_seconds
    if since_seconds is not None:
        waited_seconds = evidence.snapshot.monotonic_seconds - since_seconds
        # One that has just come may be answered at once.
        return Requests.WAITING if waited_seconds >= SIGN_SECONDS else Requests.UNKNOWN
    return Requests.UNKNOWN if count_waiting(evidence) is None else Requests.NONE


def _is_computing(evidence: Evidence, away_seconds: float, progress: Progress) -> bool:
    """Return whether the API server uses CPU time and may still come to answer.

    Behind a server that answers, what core, workers and GPUs do counts too. Behind a silent one
    they may hang: NCCL spins while it does.
    """
    if evidence.answer is PageAnswer.ERROR and progress.activity.judge() is Activity.BUSY:
        return True
    now = evidence.snapshot.monotonic_seconds
    cpu_use = progress.cpu_use
    if cpu_use is None or now - cpu_use.monotonic_seconds >= STALLED_SECONDS:
        return False
    # A server that is short of CPU may be late for every page, and one that closed its port may be
    # finishing the last requests. So a server spins only if it could answer and does not.
    is_spinning = (
        evidence.answer is PageAnswer.SILENT
        and away_seconds >= SPINNING_SECONDS
        and not is_starved(evidence.snapshot.processes)
    )
    return not is_spinning
