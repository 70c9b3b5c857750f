"""The format of a profile, which maps the series of an engine's page to fields."""

import re
from collections.abc import Iterable, Mapping
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
    """A setting that is a label's text.

    Unknown unless all series agree, or where the label `exceptions` lists parts of the engine with
    another.
    """


class Fact(Struct, frozen=True):
    """The source of one field of EngineReading.

    Of several facts of a field the first with a value counts. Values must be at least 0, and those
    of a `_ratio` field at most 1. Three fields are no field of EngineReading: `kv_blocks` times
    `kv_block_tokens` replace an unknown `kv_capacity_tokens`; `kv_used_tokens` over the capacity
    replaces an unknown `kv_used_ratio`, and over the ratio an unknown capacity.
    """

    field: str
    families: tuple[str, ...]
    """Sample names without the profile's prefix.

    The first with a value counts, so an old and a new name are never added up. Names joined by "+"
    are summed, and unknown unless all are present.
    """
    combine: Combine = Combine.SUM
    label: str | None = None
    """The label that has the value, if above 0; without it the value is the sample's."""
    where: tuple[str, tuple[str, ...]] | None = None
    """A label and its values, to select series by; "" for a total beside its parts."""
    prefixed: bool = True
    """Whether `families` are without the prefix; else they are full names."""
    factor: float = 1.0
    """Converts the unit."""
    exceptions: str = ""
    """The label that lists parts of the engine with another text."""

    @property
    def names(self) -> tuple[str, ...]:
        """All families, one by one."""
        return tuple(name for families in self.families for name in families.split("+"))


class Profile(Struct, frozen=True, kw_only=True, dict=True):
    """How to read the page of one kind of engine."""

    name: str
    prefixes: tuple[str, ...]
    """The first that is found on the page counts."""
    facts: tuple[Fact, ...]
    model_label: str = "model_name"
    """Empty where no series names a model."""
    engine_label: str = "engine"
    repeat_labels: tuple[str, ...] = ()
    """Among series that differ only in these labels the highest value counts."""
    replica_labels: tuple[str, ...] = ()
    """For values in labels, only these labels distinguish replicas: the other labels are
    settings."""
    product: str
    """The engine's common name."""
    path: str = "/metrics"
    """The path of its page."""
    switch: str
    """The option that enables the page."""
    reasons: Mapping[str, str] = {}
    """Why inputs are missing, each with their names."""

    @cached_property
    def absent(self) -> tuple[tuple[str, str], ...]:
        """Each missing input and why it is missing."""
        absent_inputs = []
        for engine_input in INPUTS.values():
            for reason, names in self.reasons.items():
                if engine_input.name in names.split():
                    absent_inputs.append((engine_input.name, reason))
        return tuple(absent_inputs)

    @cached_property
    def plain_families(self) -> frozenset[str]:
        """The names that are read without a prefix."""
        plain_facts = [fact for fact in self.facts if not fact.prefixed]
        return frozenset(name for fact in plain_facts for name in fact.names)

    @cached_property
    def names_pattern(self) -> str:
        """A regular expression of the names of all samples the profile reads."""
        prefixed_facts = [fact for fact in self.facts if fact.prefixed]
        families = sorted({name for fact in prefixed_facts for name in fact.names})
        prefixes_pattern = _match_any(self.prefixes)
        patterns = [f"(?:{prefixes_pattern})(?:{_match_any(families)})"]
        if self.plain_families:
            patterns.append(_match_any(sorted(self.plain_families)))
        return "|".join(patterns)

    @cached_property
    def inputs(self) -> tuple[tuple[str, str], ...]:
        """The inputs that any engine may offer, each with its field."""
        # Memory in bytes is optional: the budget and the probe replace it.
        has_bytes = any(fact.field == "memory_bytes" for fact in self.facts)
        return tuple(
            (engine_input.name, field)
            for field, engine_input in INPUTS.items()
            if has_bytes or field != "memory_bytes"
        )


def _match_any(names: Iterable[str]) -> str:
    """Return a regular expression that matches each of the names."""
    return "|".join(map(re.escape, names))
