"""The format of a profile, which maps the series of an engine's page to fields."""

import re
from collections.abc import Mapping
from enum import Enum, auto
from functools import cached_property

from msgspec import Struct

from vllm_headroom.model import INPUTS


class Combine(Enum):
    """How several series of one engine combine if they differ in labels unknown to the profile."""

    SUM = auto()
    """Amounts of replicas."""
    MEAN = auto()
    """Ratios of replicas."""
    SAME = auto()
    """A setting: unknown unless they agree."""
    SHARE = auto()
    """The total of all engines on the page, repeated by each: divided by the number of engines."""
    TEXT = auto()
    """A setting that is a label's text: unknown unless all series agree, or where the label `exceptions` lists parts of
    the engine with another."""


class Fact(Struct, frozen=True):
    """The source of one field of EngineReading; of several facts of a field the first with a value counts.

    `families` are sample names without the profile's prefix, or full names if `prefixed` is False; the first with a
    value counts, so an old and a new name are never added up. Names joined by "+" are summed, and unknown unless all
    are present. With `label` the value is that label's, if above 0; `where` selects series by the values of a label (""
    for a total beside its parts). `factor` converts the unit. Values must be at least 0, and those of a `_ratio` field
    at most 1. The fields `kv_blocks` times `kv_block_tokens` replace an unknown `kv_capacity_tokens`, `kv_used_tokens`
    over the capacity an unknown `kv_used_ratio`, and over the ratio an unknown capacity.
    """

    field: str
    families: tuple[str, ...]
    combine: Combine = Combine.SUM
    label: str | None = None
    where: tuple[str, tuple[str, ...]] | None = None
    prefixed: bool = True
    factor: float = 1.0
    exceptions: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All families, one by one."""
        return tuple(name for families in self.families for name in families.split("+"))


class Profile(Struct, frozen=True, kw_only=True, dict=True):
    """How to read the page of one kind of engine.

    The first of `prefixes` found on the page counts. Among series that differ only in `repeat_labels` the highest value
    counts. For values in labels, only `replica_labels` distinguish replicas: the other labels are settings.
    `model_label` is "" where no series names a model. `product` is the engine's common name, `path` the page's path and
    `switch` the option that enables it. `reasons` are why inputs are missing, each with their names.
    """

    name: str
    prefixes: tuple[str, ...]
    facts: tuple[Fact, ...]
    model_label: str = "model_name"
    engine_label: str = "engine"
    repeat_labels: tuple[str, ...] = ()
    replica_labels: tuple[str, ...] = ()
    product: str
    path: str = "/metrics"
    switch: str
    reasons: Mapping[str, str] = {}

    @cached_property
    def absent(self) -> tuple[tuple[str, str], ...]:
        """Each missing input and why it is missing."""
        wanted = [(why, names.split()) for why, names in self.reasons.items()]
        return tuple(
            (given.name, why)
            for given in INPUTS.values()
            for why, names in wanted
            if given.name in names
        )

    @cached_property
    def plain_families(self) -> frozenset[str]:
        """The names that are read without a prefix."""
        return frozenset(
            family for fact in self.facts if not fact.prefixed for family in fact.names
        )

    @cached_property
    def names_pattern(self) -> str:
        """A regular expression of the names of all samples the profile reads."""
        prefixed = {family for fact in self.facts if fact.prefixed for family in fact.names}
        prefixes, families = (
            "|".join(map(re.escape, names)) for names in (self.prefixes, sorted(prefixed))
        )
        return "|".join(
            (f"(?:{prefixes})(?:{families})", *map(re.escape, sorted(self.plain_families)))
        )

    @cached_property
    def inputs(self) -> tuple[tuple[str, str], ...]:
        """The inputs that engines may offer, and their fields, including those this engine never offers."""
        # memory in bytes is optional: the budget and the probe replace it
        has_bytes = any(fact.field == "memory_bytes" for fact in self.facts)
        return tuple(
            (given.name, field)
            for field, given in INPUTS.items()
            if has_bytes or field != "memory_bytes"
        )
