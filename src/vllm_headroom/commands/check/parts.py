"""The limit on growth, part by part: where two versions differ in what they use a GPU for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from vllm_headroom.commands.check.judgement import PART_GROWTH, Judgement, Unit, compared
from vllm_headroom.model import Inside
from vllm_headroom.units import size
from vllm_headroom.vocabulary import MemoryPart

if TYPE_CHECKING:
    from vllm_headroom.commands.check.record import Record

COMPARED: Final = (MemoryPart.WEIGHTS, MemoryPart.CUDA_GRAPHS, MemoryPart.OTHER_TENSORS, MemoryPart.OUTSIDE_TORCH)
"""The KV cache takes what these leave, and has its own limit; what is cached or fragmented comes and goes with load."""


class Parts:
    """The mean of each part of one GPU over a trace, while the engine served."""

    def __init__(self) -> None:
        self._sums: dict[MemoryPart, float] = {}
        self._counts: dict[MemoryPart, int] = {}

    def step(self, inside: Inside) -> None:
        """Add one sample."""
        for part, part_bytes in inside.parts:
            self._sums[part] = self._sums.get(part, 0.0) + part_bytes
            self._counts[part] = self._counts.get(part, 0) + 1

    @property
    def means(self) -> dict[MemoryPart, float]:
        """The parts that were known at all."""
        return {part: total / self._counts[part] for part, total in self._sums.items()}


def part_growths(
    record: Record, before: Record, pairs: Iterator[tuple[str, str | None]], ratio: float
) -> Iterator[Judgement]:
    """Yield the growth of each part that both traces know, by a share of what the parts of the baseline are together.

    A part alone may be small: twice as much of little is nothing.
    """
    for uuid, old in pairs:
        here = record.parts[uuid].means if uuid in record.parts else {}
        there = before.parts[old].means if old in before.parts else {}
        for part in COMPARED:
            if part in here and part in there:
                yield _growth(f"{record.gpus[uuid].name}, {part}", here[part], there, part, ratio)


def _growth(name: str, now: float, there: Mapping[MemoryPart, float], part: MemoryPart, ratio: float) -> Judgement:
    then = there[part]
    most = then + ratio * sum(there.values())
    return Judgement(
        limit=PART_GROWTH,
        of=name,
        verdict=compared(now, most, None),
        unit=Unit.BYTES,
        value=now,
        most=most,
        baseline=then,
        found=f"{size(now)}, {now - then:+,.0f} bytes",
        allowed=size(most),
        before=size(then),
        why="by the probe inside the engine, the mean while it served",
    )
