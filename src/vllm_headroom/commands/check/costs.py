"""What memory is held at which load?"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_headroom.derive.leak.baseline import READINGS, load_band


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Memory while about as many requests ran: means over the readings."""

    held_bytes: float
    running: float

    @property
    def bytes_per_request(self) -> float:
        """Memory over running requests."""
        return self.held_bytes / self.running


class Costs:
    """Gathers readings by load, in the bands in which the daemon compares them."""

    def __init__(self) -> None:
        self._bands: dict[int, tuple[int, float, float]] = {}

    def step(self, held_bytes: float, running: float) -> None:
        """Add a reading; `running` is above 0."""
        band = load_band(running)
        count, held, ran = self._bands.get(band, (0, 0.0, 0.0))
        self._bands[band] = (count + 1, held + held_bytes, ran + running)

    @property
    def at_load(self) -> dict[int, Cost]:
        """The costs by band, from the idlest to the busiest; bands of too few readings are left out."""
        return {
            band: Cost(held_bytes=held / count, running=ran / count)
            for band, (count, held, ran) in sorted(self._bands.items())
            if count >= READINGS
        }

    @property
    def busiest(self) -> Cost | None:
        """The cost at the highest load with enough readings; None when no load has as many."""
        return next(reversed(self.at_load.values()), None)
