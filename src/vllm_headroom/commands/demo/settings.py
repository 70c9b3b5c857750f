"""What an operator can set of the demo."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator

from vllm_headroom.commands.demo.scenario import TABLE
from vllm_headroom.config.fields import setting
from vllm_headroom.config.settings import Settings

SCENARIOS: Final = tuple(TABLE)
FASTEST: Final = 1000


def _known(scenario: str) -> str:
    if scenario not in SCENARIOS:
        raise ValueError
    return scenario


class DemoSettings(Settings):
    """The daemon's settings and the demo's own; how to reach an engine is none of them, for the demo brings its own."""

    no_options: ClassVar = frozenset(name for name in Settings.model_fields if name.startswith(("engine_", "canary_")))

    scenario: Annotated[str, AfterValidator(_known)] = setting(
        SCENARIOS[0],
        "What happens in the simulation.",
        accepts=f"{', '.join(SCENARIOS[:-1])} or {SCENARIOS[-1]}",
        word="NAME",
    )
    speed: float = setting(
        60,
        "How many times as fast as the clock the simulation's time runs.",
        accepts=f"a number above 0, at most {FASTEST}",
        word="NUMBER",
        gt=0,
        le=FASTEST,
    )
