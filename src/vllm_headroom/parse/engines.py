"""Build engine readings from the samples of a page, according to a profile."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from typing import Any, Final

from msgspec.structs import replace
from prometheus_client.samples import Sample

from vllm_headroom.model import EnginePage, EngineReading, Failure
from vllm_headroom.parse.exposition import ONE_SERVER, check_page, parse_samples, refuse_page
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.parse.profile import Combine, Fact, Profile
from vllm_headroom.parse.profiles import PROFILES

MOST_PAGE_ENGINES: Final = 256
"""The maximum number of (engine, model) pairs on one page. The number is limited because each pair
adds dozens of series to the sidecar's page.
"""

MOST_SHARED_READINGS: Final = 5000
"""The maximum number of times that shared series are read. A shared series is read once for each
engine or model that shares it. Each reading takes 10 µs.
"""

_ONLY_ENGINE: Final = "0"
"""The engine name for series that do not name an engine."""

_NO_EXCEPTIONS: Final = ("", "[]", "None")
"""The values of an `exceptions` label that mean "no exceptions" (see Fact)."""

_EngineKey = tuple[str, str]
"""The names of a model and an engine."""

_Families = Mapping[str, list[Sample]]
"""The samples of one engine, keyed by family. The family is the sample name without the profile's
prefix.
"""


def build_page(profile: Profile, samples: Iterable[Sample]) -> EnginePage | Failure:
    """Build the page's engines from its samples.

    If no sample's name starts with a prefix of the profile, there are no engines. The result is the
    failure OUT_OF_BOUNDS if building the page would be too expensive.

    A series without a model applies to every model of its engine. A series without model and engine
    applies to every engine on the page. A series with only a model applies to engine "0". If no
    series names a model, the model name is "". For a profile whose pages never name a model, it is
    the profile's name. An engine may have only settings. In some modes, vLLM exports nothing else
    until the first request. The settings include the budget.
    """
    samples = tuple(samples)
    prefix = _find_prefix(profile, samples)
    if prefix is None:
        return _assemble_page(profile, ())
    profile_samples = [
        sample
        for sample in samples
        if sample.name.startswith(prefix) or sample.name in profile.plain_families
    ]
    sample_keys = [
        (sample.labels.get(profile.model_label, ""), sample.labels.get(profile.engine_label, ""))
        for sample in profile_samples
    ]
    # If the page names no engine, there is only one.
    engine_names = {engine for _, engine in sample_keys if engine} or {_ONLY_ENGINE}
    keys = {(model, engine or _ONLY_ENGINE) for model, engine in sample_keys if model}
    if not keys:
        nameless_model = "" if profile.model_label else profile.name
        keys = {(nameless_model, engine) for engine in engine_names}
    # A page with too many engines is refused before the costly grouping.
    families = None
    if len(keys) <= MOST_PAGE_ENGINES:
        families = _group_by_engine(sorted(keys), profile_samples, sample_keys, prefix)
    if families is None:
        return refuse_page(
            f"has {len(keys)} engines and models, or repeats their settings too often (at most"
            f" {MOST_PAGE_ENGINES}, {MOST_SHARED_READINGS} readings of what they share):"
            f" {ONE_SERVER}"
        )
    engines = tuple(
        _build_reading(profile, key, engine_families, len(engine_names))
        for key, engine_families in families.items()
    )
    page = _assemble_page(profile, engines)
    return replace(page, has_capacity_of_blocks=_counts_in_blocks(profile, families))


def _counts_in_blocks(profile: Profile, families: Mapping[_EngineKey, _Families]) -> bool:
    """Return whether the page gives capacities only in blocks, which layer groups may share."""
    if profile.grouped_models is None:
        return False
    for fact in profile.facts:
        if fact.field != "kv_capacity_tokens":
            continue
        for engine_families in families.values():
            if _find_value(profile, fact, engine_families, len(families)) is not None:
                return False
    return True


def _find_prefix(profile: Profile, samples: Collection[Sample]) -> str | None:
    """Return the profile's first prefix that starts any sample's name, or None if none does."""
    for prefix in profile.prefixes:
        if any(sample.name.startswith(prefix) for sample in samples):
            return prefix
    return None


def _assemble_page(profile: Profile, engines: tuple[EngineReading, ...]) -> EnginePage:
    """Return the page. An input is offered if at least one engine has a value for it."""
    inputs = tuple(
        (name, any(getattr(engine, field) is not None for engine in engines))
        for name, field in profile.inputs
    )
    return EnginePage(profile=profile.name, engines=engines, inputs=inputs)


def _group_by_engine(
    keys: list[_EngineKey], samples: list[Sample], sample_keys: list[_EngineKey], prefix: str
) -> dict[_EngineKey, dict[str, list[Sample]]] | None:
    """Return the samples of each engine by family.

    Returns None if grouping would be too expensive. `sample_keys` contains the model and the engine
    in each sample's labels, or "" if missing. A sample without a model may be shared by several
    engines (see `build_page`).
    """
    # An engine has an entry even if all of its samples are shared.
    families: dict[_EngineKey, dict[str, list[Sample]]] = {key: {} for key in keys}
    keys_by_engine: dict[str, list[_EngineKey]] = {"": keys}
    for key in keys:
        keys_by_engine.setdefault(key[1], []).append(key)
    shared_readings = 0
    # A shared sample counts once per engine, because each use of it takes time.
    for sample, (model, engine) in zip(samples, sample_keys, strict=True):
        if model:
            owners = [(model, engine or _ONLY_ENGINE)]
        else:
            owners = keys_by_engine.get(engine, [])
            shared_readings += len(owners)
        if shared_readings > MOST_SHARED_READINGS:
            return None
        for owner in owners:
            families[owner].setdefault(sample.name.removeprefix(prefix), []).append(sample)
    return families


def _build_reading(
    profile: Profile, key: _EngineKey, families: _Families, engine_count: int
) -> EngineReading:
    """Return the reading of one engine; `engine_count` is the number of engines on the page."""
    values: dict[str, Any] = {}
    for fact in profile.facts:
        # If several facts provide a field, the first one with a value is used.
        if values.get(fact.field) is None:
            values[fact.field] = _find_value(profile, fact, families, engine_count)
    # The block size of these models differs by group. No capacity can be computed from it.
    if profile.grouped_models is not None and profile.grouped_models.search(key[0]):
        values.pop("kv_blocks", None)
    _complete_kv_cache(values)
    awake_series = values.pop("awake", None)
    return EngineReading(
        model_name=key[0],
        engine=key[1],
        awake=None if awake_series is None else awake_series > 0,
        **values,
    )


def _complete_kv_cache(values: dict[str, Any]) -> None:
    """Compute the missing capacity and usage of the KV cache, modifying `values`.

    Facts that are not fields of EngineReading are removed (see Fact).
    """
    # A model with state blocks (Mamba) has two kinds of blocks. No capacity can be computed from
    # their number.
    blocks = values.pop("kv_blocks", None)
    if values.pop("kv_state_block_tokens", None) is not None:
        blocks = None
    block_tokens = values.pop("kv_block_tokens", None)
    used_tokens = values.pop("kv_used_tokens", None)
    capacity_tokens = values.get("kv_capacity_tokens")
    if capacity_tokens is None and blocks is not None and block_tokens is not None:
        capacity_tokens = _check_value("kv_capacity_tokens", blocks * block_tokens)
        values["kv_capacity_tokens"] = capacity_tokens
    if used_tokens is None:
        return
    # Any two of capacity, use and ratio determine the third.
    used_ratio = values.get("kv_used_ratio")
    if used_ratio is None and capacity_tokens:
        values["kv_used_ratio"] = _check_value("kv_used_ratio", used_tokens / capacity_tokens)
    elif capacity_tokens is None and used_ratio:
        capacity_tokens = _check_value("kv_capacity_tokens", round(used_tokens / used_ratio))
        values["kv_capacity_tokens"] = capacity_tokens


def _find_value(
    profile: Profile, fact: Fact, families: _Families, engine_count: int
) -> float | str | None:
    """Return the value of a fact for one engine, or None if unknown.

    The first of the fact's families with a value is used. If families are joined by "+", all of
    them must have a value.
    """
    if fact.combine is Combine.TEXT:
        return _find_text(fact, families)
    for alternative in fact.families:
        values = []
        for name in alternative.split("+"):
            value = _combine_samples(profile, fact, families.get(name, ()), engine_count)
            if value is None:
                break
            values.append(value)
        # Every family in the sum has a value.
        else:
            total = _check_value(fact.field, sum(values))
            if total is not None:
                return total
    return None


def _find_text(fact: Fact, families: _Families) -> str | None:
    """Return the text that is the same in all series.

    Returns None if:

    - the texts differ
    - the texts are empty
    - a series is an exception for a part of the engine
    """
    texts = set()
    for name in fact.names:
        for sample in families.get(name, ()):
            if sample.labels.get(fact.exceptions, "") not in _NO_EXCEPTIONS:
                return None
            # Different texts belong to different parts, so none of them applies to the whole
            # engine.
            texts.add(sample.labels.get(fact.label or "", ""))
    if len(texts) != 1:
        return None
    return texts.pop() or None


def _combine_samples(
    profile: Profile, fact: Fact, samples: Collection[Sample], engine_count: int
) -> float | None:
    """Return one value for a family's samples, combined as the fact specifies.

    Returns None if the value is unknown. The samples come from several parts, such as workers or
    ranks. Each part may be reported several times. The value is unknown if any part's value is
    unknown. The value is also unknown if a series has two values, as on a page combined from
    several servers. The format does not define a repeated series, and Prometheus keeps the first
    value.
    """
    # Two values of the same series mean that the page is combined from several servers.
    if len(samples) > 1 and _has_contradiction(samples):
        return None
    amounts_by_part: defaultdict[object, list[float]] = defaultdict(list)
    for sample in samples:
        if fact.where is None or sample.labels.get(fact.where[0], "") in fact.where[1]:
            amounts = amounts_by_part[_identify_part(profile, fact, sample)]
            amount = _read_amount(fact, sample)
            if amount is not None:
                amounts.append(amount)
    if not amounts_by_part or not all(amounts_by_part.values()):
        return None
    # Several API servers may report the same part. All of these servers but one report 0.
    part_values = [max(amounts) for amounts in amounts_by_part.values()]
    if fact.combine is Combine.SAME:
        return part_values[0] if len(set(part_values)) == 1 else None
    value = sum(part_values)
    if fact.combine is Combine.MEAN:
        value /= len(part_values)
    elif fact.combine is Combine.SHARE:
        value /= engine_count
    return _check_value(fact.field, value)


def _has_contradiction(samples: Collection[Sample]) -> bool:
    """Return whether any series has samples with different values."""
    readings = {(frozenset(sample.labels.items()), sample.value) for sample in samples}
    return len(readings) > len({series for series, _ in readings})


def _identify_part(profile: Profile, fact: Fact, sample: Sample) -> object:
    """Return a key for the sample's part of the engine, such as a rank.

    Samples of the same part have the same key, whichever API server reports them.
    """
    # If the value is in a label, the other labels are settings too. Only the labels that
    # distinguish replicas identify the part.
    if fact.label is not None:
        return tuple(sample.labels.get(name, "") for name in profile.replica_labels)
    return frozenset(
        [item for item in sample.labels.items() if item[0] not in profile.repeat_labels]
    )


def _read_amount(fact: Fact, sample: Sample) -> float | None:
    """Return a sample's value, or the number in its label, multiplied by the fact's factor.

    Returns None if the result is not a number or is impossible for the field. Also returns None for
    0 in a label: a setting of 0 has no value.
    """
    try:
        value = float(sample.value if fact.label is None else sample.labels.get(fact.label, ""))
    except (ValueError, OverflowError):  # the label "None", or an integer too large for a float
        return None
    if fact.label is not None and value == 0:
        return None
    return _check_value(fact.field, value * fact.factor)


def _check_value(field: str, value: float) -> float | None:
    """Return the value, or None if the field cannot have it.

    A ratio must be from 0 to 1. Any other value must be from 0 to LARGEST.
    """
    highest = 1.0 if field.endswith("_ratio") else LARGEST
    return value if isfinite(value) and 0 <= value <= highest else None


DEFAULT: Final = PROFILES[0]
"""The profile of a page on which no engine was found."""


def parse_engines(page: str, profile_name: str | None = None) -> EnginePage | Failure:
    """Parse a page of Prometheus text into engine readings.

    The page is read with the profile named `profile_name`. Without a name, the first profile with
    matching series is used. If none matches, the first of all profiles is used. A page without
    matching series has no engines. The reason for a failure is:

    - NOT_METRICS for an empty page, or a page without metrics,
    - INCOMPLETE for a truncated page,
    - MALFORMED for a needed line that cannot be parsed,
    - OUT_OF_BOUNDS for a page that is too large.
    """
    failure = check_page(page)
    if failure is not None:
        return failure
    profiles = PROFILES if profile_name is None else (find_profile(profile_name),)
    empty_pages: list[EnginePage] = []
    for profile in profiles:
        # A page may match several profiles; the first profile that finds engines is used.
        samples = parse_samples(page, profile.names_pattern)
        if isinstance(samples, Failure):
            return samples
        engine_page = build_page(profile, samples)
        if isinstance(engine_page, Failure) or engine_page.engines:
            return engine_page
        empty_pages.append(engine_page)
    return empty_pages[0]


def find_profile(name: str) -> Profile:
    """Return the profile with this name, or the first profile if there is none."""
    return next((profile for profile in PROFILES if profile.name == name), DEFAULT)


def explain_empty_page(page: EnginePage) -> str:
    """Return why a page may have no engine.

    The text names the expected series and how to enable them. The expected series are those of the
    page's profile. If this is the first profile, the series of all profiles are expected.
    """
    profiles = PROFILES if page.profile == DEFAULT.name else (find_profile(page.profile),)
    expected = "; ".join(
        f"{profile.product} ({' '.join(profile.prefixes)}; {profile.path}, {profile.switch})"
        for profile in profiles
    )
    return (
        "the page has no series of an engine: check that HEADROOM_ENGINE_URL is the engine's own"
        " port and path, and that it exports metrics; a server that has served no request yet may"
        f" show none. Looked for {expected}. Another engine needs its own profile: docs/engines.md"
    )
