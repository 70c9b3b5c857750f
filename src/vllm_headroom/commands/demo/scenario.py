"""What can happen in the demo, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm_headroom.units import GIB

Span = tuple[float, float]
"""The least and the most; what happens is drawn evenly between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Something that comes, stays and goes, again and again; `size` is what it brings."""

    pause_seconds: Span
    stay_seconds: Span
    size: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens besides healthy serving; the size of a burst is a factor on the load, of a neighbour bytes.

    With `cold` the engine starts with the demo, else it has served for an hour. While it hangs it takes no step, and
    its page goes on saying what it said last.
    """

    name: str
    leak_bytes_per_request: float = 0.0
    bursts: Visits | None = None
    neighbours: Visits | None = None
    restart_after_seconds: Span | None = None
    loading_seconds: Span = (40.0, 70.0)
    cold: bool = False
    hangs: Visits | None = None
    sleeps: Visits | None = None


_ALL: Final = (
    Scenario(name="healthy"),
    # 12.8 MB per 1,000 requests: the rate in the post-mortem this project began with.
    Scenario(name="leak", leak_bytes_per_request=12_800.0),
    Scenario(
        name="burst",
        bursts=Visits(pause_seconds=(1_200.0, 2_400.0), stay_seconds=(20.0, 45.0), size=(4.0, 6.0)),
    ),
    Scenario(
        name="neighbour",
        neighbours=Visits(pause_seconds=(300.0, 1_500.0), stay_seconds=(1_200.0, 3_600.0), size=(1.0 * GIB, 3.0 * GIB)),
    ),
    Scenario(name="restart", restart_after_seconds=(6_300.0, 8_100.0)),
    Scenario(name="crash", restart_after_seconds=(600.0, 1_800.0)),
    Scenario(
        name="hang",
        hangs=Visits(pause_seconds=(900.0, 1_500.0), stay_seconds=(300.0, 600.0), size=(1.0, 1.0)),
    ),
    Scenario(name="slow-start", cold=True, loading_seconds=(720.0, 1_800.0), restart_after_seconds=(7_200.0, 10_800.0)),
    Scenario(
        name="sleep",
        sleeps=Visits(pause_seconds=(900.0, 1_500.0), stay_seconds=(600.0, 1_200.0), size=(1.0, 1.0)),
    ),
)
TABLE: Final[dict[str, Scenario]] = {scenario.name: scenario for scenario in _ALL}
