"""A day of an engine, as a recipe: its model, card, load, what takes memory, and what leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

from tests.card.corpus.parts import Part
from tests.card.corpus.traffic import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of a model in bfloat16."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    kv_width: int = 1024

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """The weights of a layer."""
        width = self.hidden + 2 * self.kv_width
        elements = (width * self.hidden, self.hidden**2, 2 * self.inner * self.hidden, self.inner * self.hidden)
        return tuple(2 * element for element in elements)

    @property
    def token_bytes(self) -> int:
        """The KV cache of a token in all layers."""
        return 2 * 2 * self.kv_width * self.layers


MODELS: Final = {
    "1b": Model(hidden=2048, inner=8192, layers=16, vocabulary=128_256, kv_width=512),
    "3b": Model(hidden=3072, inner=8192, layers=28, vocabulary=128_256),
    "8b": Model(hidden=4096, inner=14_336, layers=32, vocabulary=128_256),
    "14b": Model(hidden=5120, inner=17_408, layers=40, vocabulary=151_936),
    "32b": Model(hidden=5120, inner=25_600, layers=64, vocabulary=151_936),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Another process on the card: `kind` is steady, filling or sawtooth; it comes and goes at hours of the day."""

    kind: str
    gib: float
    minutes: float = 30.0
    comes: float = 0.0
    goes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """One trace.

    `room_mib` is what weights, KV cache, the profiled peak, context and neighbour leave. `allocator` is torch's
    setting, as in PYTORCH_CUDA_ALLOC_CONF; `limited` gives torch a share of the card as its limit. `leak` makes a Leak.
    `sleep` is hours awake and asleep, `restarts` are hours. `group` is its row in the table of the score; ambiguous
    days have a bounded fill that takes hours.
    """

    origin: str
    group: str
    model: str = "8b"
    card_gib: int = 80
    room_mib: int = 4096
    hours: float = 6.0
    interval: float = 5.0
    load: str = "level"
    rps: float = 4.0
    prompt: tuple[float, float] = (250.0, 0.7)
    lengthens: float = 1.0
    output: tuple[float, float] = (150.0, 0.7)
    batch_tokens: int = 8192
    max_seqs: int = 256
    abort_ratio: float = 0.02
    allocator: str = ""
    limited: bool = False
    parts: tuple[Callable[[Random], Part], ...] = ()
    leak: partial[Any] | None = None
    neighbour: Beside | None = None
    sleep: tuple[float, float] | None = None
    restarts: tuple[float, ...] = ()
    ambiguous: bool = False

    @property
    def shape(self) -> Shape:
        """The requests."""
        return Shape(
            rps=self.rps,
            load=self.load,
            hours=self.hours,
            prompt=self.prompt,
            lengthens=self.lengthens,
            output=self.output,
            batch_tokens=self.batch_tokens,
            max_seqs=self.max_seqs,
            abort_ratio=self.abort_ratio,
        )
