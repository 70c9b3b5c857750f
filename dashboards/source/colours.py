"""What each colour means, on every dashboard."""

from __future__ import annotations

from typing import Final

ENGINE_COLOUR: Final = "#56b4e9"
OTHER_COLOUR: Final = "#e69f00"
UNATTRIBUTED_COLOUR: Final = "#8e8e8e"
RESERVED_COLOUR: Final = "#4f4f4f"
FREE_COLOUR: Final = "dark-green"
PEAK_COLOUR: Final = "text"
REPORTED_COLOUR: Final = "text"
RUNNING_COLOUR: Final = "#f0e442"
WAITING_COLOUR: Final = "#d55e00"
FINISHED_COLOUR: Final = "#56b4e9"

GOOD: Final = "green"
WARNING: Final = "orange"
BAD: Final = "red"
NEUTRAL: Final = "text"
UNKNOWN_COLOUR: Final = "#8e8e8e"

PALETTE: Final = {"mode": "palette-classic"}
GPU_COLOURS: Final = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#b0b0b0")
"""Of GPU 0 to 7: Okabe and Ito's, which people who see few colours can distinguish as well."""

STATES: Final = (
    ("unknown", UNKNOWN_COLOUR),
    ("warming_up", "light-blue"),
    ("unsettled", "#a0a0a0"),
    ("stable", GOOD),
    ("asleep", "dark-purple"),
    ("growing", WARNING),
    ("leaking", BAD),
)
"""The detector's states and their colours; their place is the number a state timeline draws."""


def state_words(state: str) -> str:
    """Return what a reader sees of a state; a healthy GPU is mostly unsettled, which sounds like trouble."""
    return "no leak seen" if state == "unsettled" else state.replace("_", " ")


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
