"""What each colour means, on every dashboard."""

from __future__ import annotations

from typing import Final

from vllm_headroom.vocabulary import Situation, Work

ENGINE_COLOUR: Final = "#56b4e9"
OTHER_COLOUR: Final = "#e69f00"
UNATTRIBUTED_COLOUR: Final = "#8e8e8e"
RESERVED_COLOUR: Final = "#4f4f4f"
FREE_COLOUR: Final = "dark-green"
PEAK_COLOUR: Final = "text"
RUNNING_COLOUR: Final = "#787878"
"""Quiet: the load explains a curve, it is never the news."""
WAITING_COLOUR: Final = "#d55e00"
FINISHED_COLOUR: Final = "#56b4e9"

GOOD: Final = "green"
WARNING: Final = "orange"
BAD: Final = "red"
NEUTRAL: Final = "text"
UNKNOWN_COLOUR: Final = "#8e8e8e"

PALETTE: Final = {"mode": "palette-classic-by-name"}
"""By name: the ninth GPU, or an instance of a card, has one colour in all panels of a board."""
GPU_COLOURS: Final = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#b0b0b0")
"""Of GPU 0 to 7: Okabe and Ito's, which people who see few colours can distinguish as well."""

GONE: Final = "sidecar_gone"
"""The one situation that the sidecar cannot export: Prometheus gets nothing from it."""

SITUATIONS: Final = (
    (Situation.CRASH_LOOP, BAD),
    (Situation.DOWN, BAD),
    (Situation.STALLED, BAD),
    (GONE, BAD),
    (Situation.LEAKING, BAD),
    (Situation.HOST_LEAK, BAD),
    (Situation.LOW_MEMORY, WARNING),
    (Situation.OVER_BUDGET, WARNING),
    (Situation.NEIGHBOUR, WARNING),
    (Situation.GROWING, WARNING),
    (Situation.STRANDED, WARNING),
    (Situation.BLIND, WARNING),
    (Situation.FILLING, "blue"),
    (Situation.STARTING, "light-blue"),
    (Situation.ASLEEP, "dark-purple"),
    (Situation.HEALTHY, GOOD),
)
"""The situations of an engine, worst first, and their colours; their place is the number that panels ask for."""

FIRST_ACTIONS: Final[dict[str, str]] = {
    **{str(each): each.action for each in Situation},
    GONE: "Nothing is known about this engine: look at the sidecar's container and its target in Prometheus.",
}

STATES: Final = (
    ("unknown", UNKNOWN_COLOUR),
    ("warming_up", "light-blue"),
    ("unsettled", GOOD),
    ("stable", GOOD),
    ("asleep", "dark-purple"),
    ("growing", WARNING),
    ("leaking", BAD),
)
"""The detector's states and their colours; their place is the number a state timeline draws."""


def state_words(state: str) -> str:
    """Return what a reader sees of a state: a healthy GPU goes to and fro between stable and unsettled."""
    return "no leak seen" if state in {"stable", "unsettled"} else state.replace("_", " ")


ROLES: Final = (
    ("worker", ENGINE_COLOUR),
    ("engine_core", "#e69f00"),
    ("api_server", "#cc79a7"),
    ("other", RESERVED_COLOUR),
)
"""What the engine's processes do on the host, and their colours."""

PARTS: Final = (
    ("weights", "#0072b2"),
    ("kv_cache", "#56b4e9"),
    ("cuda_graphs", "#009e73"),
    ("other_tensors", "#f0e442"),
    ("fragmented", "#e69f00"),
    ("cached", "#b0b0b0"),
    ("outside_torch", "#cc79a7"),
)
"""The parts of the engine's own ledger, and their colours."""

WORKS: Final = (
    (Work.PREFILL, "#0072b2"),
    (Work.DECODE, "#56b4e9"),
    (Work.PROMPT_LOGPROBS, "#e69f00"),
    (Work.ENCODER, "#cc79a7"),
    (Work.SAMPLING, "#009e73"),
    (Work.ADAPTER, "#f0e442"),
    (Work.OTHER, "#b0b0b0"),
)
"""The kinds of work of the engine's steps, and their colours."""
