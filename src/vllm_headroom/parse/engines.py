"""Engine readings from the samples of a page, by a profile."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from typing import Any, Final

from prometheus_client.samples import Sample

from vllm_headroom.model import EnginePage, EngineReading, Failure
from vllm_headroom.parse.exposition import ONE_SERVER, check_page, parse_samples, refuse_page
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.parse.profile import Combine, Fact, Profile
from vllm_headroom.parse.profiles import PROFILES

MOST_ENGINES: Final = 256
"""Engines and models on one page: each adds dozens of series to ours."""

MOST_SHARED_READINGS: Final = 5000
"""Readings of series that several engines or models share: each costs 10 us."""

_ONLY_ENGINE: Final = "0"
"""The engine of series that name none."""

_NO_EXCEPTIONS: Final = ("", "[]", "None")
"""Texts of a label that lists no part of the engine."""

_EngineKey = tuple[str, str]
"""The names of a model and of an engine."""

_Families = Mapping[str, list[Sample]]
"""The samples of one engine, by their name without the profile's prefix."""


def build_page(profile: Profile, samples: Iterable[Sample]) -> EnginePage | Failure:
    """Build the page's engines from its samples; none when no sample has a prefix of the profile.

    A page that would cost too much is OUT_OF_BOUNDS. A series without a model belongs to every
    model of its engine, one without model and engine to every engine of the page, and one with only
    a model to engine "0". If no series names a model, the model is "" (in some modes vLLM exports
    only its settings, the budget among them, before the first request), or the profile's name if
    its pages never have one.
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
    engine_names = {engine for _, engine in sample_keys if engine} or {_ONLY_ENGINE}
    keys = {(model, engine or _ONLY_ENGINE) for model, engine in sample_keys if model}
    if not keys:
        nameless_model = "" if profile.model_label else profile.name
        keys = {(nameless_model, engine) for engine in engine_names}
    # Grouping is refused before it is begun, or as soon as it becomes too much.
    families = None
    if len(keys) <= MOST_ENGINES:
        families = _group_by_engine(sorted(keys), profile_samples, sample_keys, prefix)
    if families is None:
        return refuse_page(
            f"has {len(keys)} engines and models, or repeats their settings too often (at most"
            f" {MOST_ENGINES}, {MOST_SHARED_READINGS} readings of what they share): {ONE_SERVER}"
        )
    engines = tuple(
        _build_reading(profile, key, engine_families, len(engine_names))
        for key, engine_families in families.items()
    )
    return _assemble_page(profile, engines)


def _find_prefix(profile: Profile, samples: Collection[Sample]) -> str | None:
    """Return the first of the profile's prefixes that the page has; None when it has none."""
    for prefix in profile.prefixes:
        if any(sample.name.startswith(prefix) for sample in samples):
            return prefix
    return None


def _assemble_page(profile: Profile, engines: tuple[EngineReading, ...]) -> EnginePage:
    inputs = tuple(
        (name, any(getattr(engine, field) is not None for engine in engines))
        for name, field in profile.inputs
    )
    return EnginePage(profile=profile.name, engines=engines, inputs=inputs)


def _group_by_engine(
    keys: list[_EngineKey], samples: list[Sample], sample_keys: list[_EngineKey], prefix: str
) -> dict[_EngineKey, dict[str, list[Sample]]] | None:
    """Return the samples of each engine by family; None when too many readings are shared.

    `sample_keys` has, for each sample, the model and the engine that its labels name, or "".
    """
    families: dict[_EngineKey, dict[str, list[Sample]]] = {key: {} for key in keys}
    keys_by_engine: dict[str, list[_EngineKey]] = {"": keys}
    for key in keys:
        keys_by_engine.setdefault(key[1], []).append(key)
    shared_readings = 0
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
    values: dict[str, Any] = {}
    for fact in profile.facts:
        if values.get(fact.field) is None:
            values[fact.field] = _find_value(profile, fact, families, engine_count)
    _complete_kv_cache(values)
    awake_series = values.pop("awake", None)
    return EngineReading(
        model_name=key[0],
        engine=key[1],
        awake=None if awake_series is None else awake_series > 0,
        **values,
    )


def _complete_kv_cache(values: dict[str, Any]) -> None:
    """Replace the facts that only help to find capacity and usage of the KV cache by these."""
    blocks = values.pop("kv_blocks", None)
    block_tokens = values.pop("kv_block_tokens", None)
    used_tokens = values.pop("kv_used_tokens", None)
    capacity_tokens = values.get("kv_capacity_tokens")
    if capacity_tokens is None and blocks is not None and block_tokens is not None:
        capacity_tokens = _check_value("kv_capacity_tokens", blocks * block_tokens)
        values["kv_capacity_tokens"] = capacity_tokens
    if used_tokens is None:
        return
    used_ratio = values.get("kv_used_ratio")
    if used_ratio is None and capacity_tokens:
        values["kv_used_ratio"] = _check_value("kv_used_ratio", used_tokens / capacity_tokens)
    elif capacity_tokens is None and used_ratio:
        capacity_tokens = _check_value("kv_capacity_tokens", round(used_tokens / used_ratio))
        values["kv_capacity_tokens"] = capacity_tokens


def _find_value(
    profile: Profile, fact: Fact, families: _Families, engine_count: int
) -> float | str | None:
    """Return a fact of one engine, from the first families that have it; None when unknown."""
    if fact.combine is Combine.TEXT:
        return _find_text(fact, families)
    for alternative in fact.families:
        values = []
        for name in alternative.split("+"):
            value = _combine_samples(profile, fact, families.get(name, ()), engine_count)
            if value is None:
                break
            values.append(value)
        else:
            total = _check_value(fact.field, sum(values))
            if total is not None:
                return total
    return None


def _find_text(fact: Fact, families: _Families) -> str | None:
    """Return the text on which all series agree; None where they differ or it has exceptions."""
    texts = set()
    for name in fact.names:
        for sample in families.get(name, ()):
            if sample.labels.get(fact.exceptions, "") not in _NO_EXCEPTIONS:
                return None
            texts.add(sample.labels.get(fact.label or "", ""))
    if len(texts) != 1:
        return None
    return texts.pop() or None


def _combine_samples(
    profile: Profile, fact: Fact, samples: Collection[Sample], engine_count: int
) -> float | None:
    """Return one value for the samples; None when a part is unknown.

    It is also None where a series has two values, as on a page joined from several servers: the
    format leaves this undefined, and Prometheus keeps the first.
    """
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
    # Repetitions of one part, as by each API server: the others may be 0.
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
    """Return whether two samples of one series differ."""
    readings = {(frozenset(sample.labels.items()), sample.value) for sample in samples}
    return len(readings) > len({series for series, _ in readings})


def _identify_part(profile: Profile, fact: Fact, sample: Sample) -> object:
    """Return a key of the part that a sample measures.

    Repetitions of one part have the same key.
    """
    if fact.label is not None:
        return tuple(sample.labels.get(name, "") for name in profile.replica_labels)
    return frozenset(
        [item for item in sample.labels.items() if item[0] not in profile.repeat_labels]
    )


def _read_amount(fact: Fact, sample: Sample) -> float | None:
    """Return the amount of a sample, None where it has no usable one."""
    try:
        value = float(sample.value if fact.label is None else sample.labels.get(fact.label, ""))
    except (ValueError, OverflowError):  # a label that says "None"; an integer beyond any float
        return None
    if fact.label is not None and value == 0:
        return None
    return _check_value(fact.field, value * fact.factor)


def _check_value(field: str, value: float) -> float | None:
    """Return the value, None where the field cannot have it."""
    highest = 1.0 if field.endswith("_ratio") else LARGEST
    return value if isfinite(value) and 0 <= value <= highest else None


DEFAULT: Final = PROFILES[0]
"""The profile of a page on which no engine is found."""


def parse_engines(page: str, profile_name: str | None = None) -> EnginePage | Failure:
    """Parse a page of Prometheus text into engine readings, with the profile of this name.

    Without a name, the first profile with matching series is used. A page without series of a known
    engine yields the first profile and no engines. Failures: NOT_METRICS for an empty page or no
    metrics, INCOMPLETE for a truncated page, MALFORMED for a needed line that cannot be parsed,
    OUT_OF_BOUNDS for an oversized page.
    """
    failure = check_page(page)
    if failure is not None:
        return failure
    profiles = PROFILES if profile_name is None else (find_profile(profile_name),)
    empty_pages: list[EnginePage] = []
    for profile in profiles:
        samples = parse_samples(page, profile.names_pattern)
        if isinstance(samples, Failure):
            return samples
        engine_page = build_page(profile, samples)
        if isinstance(engine_page, Failure) or engine_page.engines:
            return engine_page
        empty_pages.append(engine_page)
    return empty_pages[0]


def find_profile(name: str) -> Profile:
    """Return the profile of this name; the first one if there is none."""
    return next((profile for profile in PROFILES if profile.name == name), DEFAULT)


def explain_empty_page(page: EnginePage) -> str:
    """Return why a page may have no engine: the series expected, and what enables them."""
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
