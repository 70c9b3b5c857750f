"""What a profile says of one kind of engine: which series of its page fill which field."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto
from functools import cached_property

from msgspec import Struct

from vllm_headroom.model import INPUTS


class Combine(Enum):
    """What several series of one engine make together, when they differ in labels that no profile foresees."""

    SUM = auto()
    """Amounts of replicas."""
    MEAN = auto()
    """Ratios of replicas."""
    SAME = auto()
    """A setting: unknown unless they agree."""
    SHARE = auto()
    """The amount of all engines of the page together, repeated by each: divided by the number of engines."""


class Fact(Struct, frozen=True, kw_only=True):
    """Where one field of EngineReading comes from; of several facts of a field the first that has a value counts.

    `families` are names of samples without the profile's prefix, in full when `prefixed` is False; the first that has a
    value wins, so an old and a new name of one thing are never added up. Names joined by "+" are parts of one amount,
    unknown unless all are there. With `label` the value is this label's and above 0; `where` keeps the series with one
    of these label values; where parts stand beside their total, the total's is "". `factor` turns the page's unit into
    that of the field. No value is below 0, and none of a field in `_ratio` above 1. The fields `kv_blocks` and
    `kv_block_tokens` (tokens per block) stand in for an unknown `kv_capacity_tokens`, `kv_used_tokens` beside a
    capacity for an unknown `kv_used_ratio`.
    """

    field: str
    families: tuple[str, ...]
    combine: Combine = Combine.SUM
    label: str | None = None
    where: tuple[str, tuple[str, ...]] | None = None
    prefixed: bool = True
    factor: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Every family by itself."""
        return tuple(name for families in self.families for name in families.split("+"))


class TextFact(Struct, frozen=True, kw_only=True):
    """Where a field of EngineReading comes from that is a label's text: unknown unless all series agree on it.

    It is unknown, too, where the label `exceptions` names parts of the engine that it does not hold for.
    """

    field: str
    family: str
    label: str
    exceptions: str


class Profile(Struct, frozen=True, kw_only=True, dict=True):
    """How to read the page of one kind of engine.

    The first of `prefixes` that is on the page counts. Of series that differ only in `repeat_labels` the highest is
    true. Of values that stand in labels only `replica_labels` tell replicas apart: the labels beside them are settings.
    `model_label` is "" where no series names a model. `product` is what people call the engine, `path` where its page
    is and `switch` what makes it serve one. `absent` says of an input why this engine does not offer it.
    """

    name: str
    prefixes: tuple[str, ...]
    facts: tuple[Fact, ...]
    texts: tuple[TextFact, ...] = ()
    model_label: str = "model_name"
    engine_label: str = "engine"
    repeat_labels: tuple[str, ...] = ()
    replica_labels: tuple[str, ...] = ()
    product: str
    path: str = "/metrics"
    switch: str
    absent: tuple[tuple[str, str], ...] = ()

    @cached_property
    def plain_families(self) -> frozenset[str]:
        """The names that are read without a prefix."""
        return frozenset(family for fact in self.facts if not fact.prefixed for family in fact.names)

    @cached_property
    def names_pattern(self) -> str:
        """A regular expression of the names of all samples the profile reads."""
        prefixed = {family for fact in self.facts if fact.prefixed for family in fact.names}
        prefixed |= {fact.family for fact in self.texts}
        engines = f"(?:{_match_any(self.prefixes)})(?:{_match_any(sorted(prefixed))})"
        return "|".join((engines, *map(re.escape, sorted(self.plain_families))))

    @cached_property
    def inputs(self) -> tuple[tuple[str, str], ...]:
        """The inputs that engines may offer, and their fields: those, too, that this kind never does.

        For bytes of memory, where a page has none, the budget and the probe stand in.
        """
        has_bytes = any(fact.field == "memory_bytes" for fact in self.facts)
        return tuple((given.name, field) for field, given in INPUTS.items() if has_bytes or field != "memory_bytes")


def _match_any(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))
