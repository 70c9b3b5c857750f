"""All scenarios by name; a third of them is kept out of tuning."""

from __future__ import annotations

from typing import Final

from simulator.benign import BENIGN
from simulator.leaking import LEAKING
from simulator.recipe import Recipe
from simulator.world import Course, World

SCENARIOS: Final[dict[str, Recipe]] = {f"ok_{name}": recipe for name, recipe in BENIGN.items()} | {
    f"leak_{name}": recipe for name, recipe in LEAKING.items()
}
HELD_OUT: Final = frozenset(list(SCENARIOS)[2::3])
"""Every third in the order above: nobody chose them."""


def simulate(name: str, seed: int, *, probe: bool = False) -> Course:
    """Return the trace of a scenario, the same for the same seed; with `probe`, what one in the engine reads too."""
    return World(name, seed, SCENARIOS[name], probe=probe).run()
