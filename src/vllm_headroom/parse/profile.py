"""The format of a profile, which maps the series on an engine's page to fields."""

import re
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from functools import cached_property

from msgspec import Struct

from vllm_headroom.model import INPUTS


class Combine(Enum):
    """How the values of an engine's parts, such as replicas, are combined into one value."""

    SUM = auto()
    """Adds up the values; used for amounts."""
    MEAN = auto()
    """Takes the mean; used for ratios."""
    SAME = auto()
    """Takes the common value; used for settings. The value is unknown if the values differ."""
    SHARE = auto()
    """Divides the sum by the number of engines on the page. SHARE is used if each engine reports
    the total of all engines.
    """
    TEXT = auto()
    """Takes the text of a label if all parts have the same text. TEXT is used for settings. The
    value is unknown if the texts differ, or if `exceptions` names parts with a different text.
    """


class Fact(Struct, frozen=True):
    """The source of one field of EngineReading.

    If a field has several facts, the first one with a value is used. Values must be at least 0. In
    a `_ratio` field, they must also be at most 1. Four names are not fields of EngineReading, but
    are used to compute missing fields:

    - `kv_blocks` times `kv_block_tokens` is `kv_capacity_tokens`.
    - If `kv_state_block_tokens` is present, this product is not the capacity. In that case, groups
      of layers share the blocks.
    - `kv_used_tokens` divided by the capacity is `kv_used_ratio`. If only the ratio is known,
      `kv_used_tokens` divided by the ratio is the capacity.
    """

    field: str
    families: tuple[str, ...]
    """Sample names without the profile's prefix.

    The first name with a value is used. An old and a new name are never added up. Names joined by
    "+" are summed. If one is missing, the sum is unknown.
    """
    combine: Combine = Combine.SUM
    label: str | None = None
    """The label that contains the value, or None if the sample itself has the value. In a label, 0
    means that there is no value.
    """
    where: tuple[str, tuple[str, ...]] | None = None
    """A label, and the values of this label that select a series. The value "" selects series
    without the label. An example is a total that is exported along with its parts.
    """
    prefixed: bool = True
    """Whether `families` are names without the prefix; False if they are full names."""
    factor: float = 1.0
    """The factor that converts the value to the field's unit."""
    exceptions: str = ""
    """For TEXT, the label that names parts of the engine with a different text."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return all families, one by one."""
        return tuple(name for families in self.families for name in families.split("+"))


class Profile(Struct, frozen=True, kw_only=True, dict=True):
    """The rules for reading the page of one kind of engine."""

    name: str
    prefixes: tuple[str, ...]
    """The possible prefixes of the engine's series. The first one found on the page is used."""
    facts: tuple[Fact, ...]
    model_label: str = "model_name"
    """The label that names the model; empty if no series of the engine names one."""
    engine_label: str = "engine"
    repeat_labels: tuple[str, ...] = ()
    """The labels that name the reporter of a value, such as the API server. If series differ only
    in these labels, the highest value is used.
    """
    replica_labels: tuple[str, ...] = ()
    """If a value is in a label, these labels distinguish replicas. All other labels are settings.
    """
    product: str
    """The engine's common name."""
    path: str = "/metrics"
    """The path of the engine's page."""
    switch: str
    """The engine option that enables the page."""
    reasons: Mapping[str, str] = {}
    """Reasons why the page lacks inputs. Each reason has the names of these inputs, separated by
    spaces.
    """

    grouped_models: re.Pattern[str] | None = None
    """Matches the names of models whose layers form groups. A number of blocks cannot be converted
    to tokens for these models.
    """

    @cached_property
    def absent(self) -> tuple[tuple[str, str], ...]:
        """Return the inputs that a page of this profile never has, each with the reason."""
        absent_inputs = []
        for engine_input in INPUTS.values():
            for reason, names in self.reasons.items():
                if engine_input.name in names.split():
                    absent_inputs.append((engine_input.name, reason))
        return tuple(absent_inputs)

    @cached_property
    def plain_families(self) -> frozenset[str]:
        """Return the full names of the samples that have no prefix."""
        plain_facts = [fact for fact in self.facts if not fact.prefixed]
        return frozenset(name for fact in plain_facts for name in fact.names)

    @cached_property
    def names_pattern(self) -> str:
        """Return a regular expression for the names of all samples that the profile reads."""
        prefixed_facts = [fact for fact in self.facts if fact.prefixed]
        families = sorted({name for fact in prefixed_facts for name in fact.names})
        prefixes_pattern = _match_any(self.prefixes)
        patterns = [f"(?:{prefixes_pattern})(?:{_match_any(families)})"]
        if self.plain_families:
            patterns.append(_match_any(sorted(self.plain_families)))
        return "|".join(patterns)

    @cached_property
    def inputs(self) -> tuple[tuple[str, str], ...]:
        """Return the names of the inputs, each with its field in EngineReading."""
        # Memory in bytes is an input only if the profile has it. Without memory in bytes, the
        # budget or the probe is used instead.
        has_bytes = any(fact.field == "memory_bytes" for fact in self.facts)
        return tuple(
            (engine_input.name, field)
            for field, engine_input in INPUTS.items()
            if has_bytes or field != "memory_bytes"
        )


def _match_any(names: Iterable[str]) -> str:
    """Return a regular expression that matches any of the names."""
    return "|".join(map(re.escape, names))
