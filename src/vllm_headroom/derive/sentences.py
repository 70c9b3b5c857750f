"""The sentences on each state of the engine and of the leak detector."""

from __future__ import annotations

from typing import Final

from vllm_headroom.vocabulary import EngineState, LeakState, Level, Situation

ENGINE_SENTENCES: Final[dict[EngineState, tuple[Level, str, str | None]]] = {
    EngineState.DOWN: (
        Level.ALARM,
        "is down: its metrics page does not answer and no engine process is running",
        "HeadroomEngineDown",
    ),
    EngineState.STARTING: (Level.UNKNOWN, "is starting: leak detection begins when it serves", None),
    EngineState.STALLED: (Level.ALARM, "is stalled: it should make progress and makes none", "HeadroomEngineStalled"),
    EngineState.ASLEEP: (Level.GOOD, "is asleep", None),
    EngineState.SERVING: (Level.GOOD, "serves", None),
    EngineState.UNKNOWN: (Level.UNKNOWN, "may be up or down: that is not known", "HeadroomSidecarBlind"),
}

SITUATIONS: Final = {
    EngineState.DOWN: Situation.DOWN,
    EngineState.STARTING: Situation.STARTING,
    EngineState.STALLED: Situation.STALLED,
    EngineState.ASLEEP: Situation.ASLEEP,
    EngineState.SERVING: Situation.HEALTHY,
    EngineState.UNKNOWN: Situation.BLIND,
}

LAST_SEEN: Final = {EngineState.SERVING: "served when last seen", EngineState.ASLEEP: "was asleep when last seen"}
"""Used without a page while the state is still assumed from the last one."""

NEVER_SEEN: Final = (
    Level.UNKNOWN,
    "has not been seen yet: its metrics page does not answer and no engine process is running",
    None,
)
"""HeadroomEngineDown also waits until an engine has been seen."""

QUIET: Final[dict[str | None, tuple[Level, str]]] = {
    LeakState.STABLE: (Level.GOOD, "no leak seen"),
    LeakState.UNSETTLED: (Level.GOOD, "no leak seen under a load that changes"),
    LeakState.ASLEEP: (Level.GOOD, "the engine sleeps"),
    LeakState.WARMING_UP: (Level.UNKNOWN, "too early to tell whether it leaks"),
}
"""The sentence where nothing grows; the most informative state comes first."""

NOT_KNOWN: Final = (Level.UNKNOWN, "whether it leaks is not known")
