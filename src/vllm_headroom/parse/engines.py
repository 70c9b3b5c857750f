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

MOST_SHARED: Final = 5000
"""Most readings of series that several engines or models share: each costs 10 us."""

_ONLY_ENGINE: Final = "0"
_NO_EXCEPTIONS: Final = ("", "[]", "None")
_Key = tuple[str, str]
_Families = Mapping[str, list[Sample]]


def build_page(profile: Profile, samples: Iterable[Sample]) -> EnginePage | Failure:
    """Build the page's engines from its samples; none when no sample has a prefix of the profile.

    A page that would cost too much is OUT_OF_BOUNDS. A series without a model belongs to every model of its engine, one
    without model and engine to every engine of the page, and one with only a model to engine "0". If no series names a
    model, the model is "" (in some modes vLLM exports only its settings, the budget among them, before the first
    request), or the profile's name if its pages never have one.
    """
    samples = tuple(samples)
    prefix = next(
        (each for each in profile.prefixes if any(s.name.startswith(each) for s in samples)), ""
    )
    owned = [
        s
        for s in samples
        if prefix and (s.name.startswith(prefix) or s.name in profile.plain_families)
    ]
    labels = [
        (s.labels.get(profile.model_label, ""), s.labels.get(profile.engine_label, ""))
        for s in owned
    ]
    ranks = {engine for _, engine in labels if engine} or {_ONLY_ENGINE}
    named = {(model, engine or _ONLY_ENGINE) for model, engine in labels if model}
    nameless = "" if profile.model_label else profile.name
    keys = sorted(named or {(nameless, engine) for engine in ranks}) if owned else []
    families = (
        None
        if len(keys) > MOST_ENGINES
        else _group_by_engine(keys, zip(owned, labels, strict=True), prefix)
    )
    if families is None:
        return refuse_page(
            f"has {len(keys)} engines and models, or repeats their settings too often"
            f" (at most {MOST_ENGINES}, {MOST_SHARED} readings of what they share): {ONE_SERVER}"
        )
    engines = tuple(_build_reading(profile, key, families[key], len(ranks)) for key in keys)
    found = tuple(
        (name, any(getattr(engine, field) is not None for engine in engines))
        for name, field in profile.inputs
    )
    return EnginePage(profile=profile.name, engines=engines, inputs=found)


def _group_by_engine(
    keys: list[_Key], owned: Iterable[tuple[Sample, _Key]], prefix: str
) -> dict[_Key, dict[str, list[Sample]]] | None:
    """Return the samples of each engine by family; None when too many readings are shared."""
    families: dict[_Key, dict[str, list[Sample]]] = {key: {} for key in keys}
    by_rank: dict[str, list[_Key]] = {"": keys}
    for key in keys:
        by_rank.setdefault(key[1], []).append(key)
    shared = 0
    for sample, (model, engine) in owned:
        owners = [(model, engine or _ONLY_ENGINE)] if model else by_rank.get(engine, [])
        shared += 0 if model else len(owners)
        if shared > MOST_SHARED:
            return None
        for key in owners:
            families[key].setdefault(sample.name.removeprefix(prefix), []).append(sample)
    return families


def _build_reading(profile: Profile, key: _Key, families: _Families, ranks: int) -> EngineReading:
    values: dict[str, Any] = {}
    for fact in profile.facts:
        if values.get(fact.field) is None:
            values[fact.field] = _find_value(profile, fact, families, ranks)
    blocks, block_tokens = values.pop("kv_blocks", None), values.pop("kv_block_tokens", None)
    if values.get("kv_capacity_tokens") is None and blocks is not None and block_tokens is not None:
        values["kv_capacity_tokens"] = _check_value("kv_capacity_tokens", blocks * block_tokens)
    used, capacity = values.pop("kv_used_tokens", None), values.get("kv_capacity_tokens")
    ratio = values.get("kv_used_ratio")
    if ratio is None and used is not None and capacity:
        values["kv_used_ratio"] = _check_value("kv_used_ratio", used / capacity)
    elif capacity is None and used is not None and ratio:
        values["kv_capacity_tokens"] = _check_value("kv_capacity_tokens", round(used / ratio))
    awake = values.pop("awake", None)
    return EngineReading(
        model_name=key[0], engine=key[1], awake=None if awake is None else awake > 0, **values
    )


def _find_value(
    profile: Profile, fact: Fact, families: _Families, ranks: int
) -> float | str | None:
    if fact.combine is Combine.TEXT:
        samples = [sample for name in fact.names for sample in families.get(name, ())]
        found = {sample.labels.get(fact.label or "", "") for sample in samples}
        has_exceptions = any(
            sample.labels.get(fact.exceptions, "") not in _NO_EXCEPTIONS for sample in samples
        )
        return None if len(found) != 1 or has_exceptions else found.pop() or None
    for names in fact.families:
        values = [
            _combine_samples(profile, fact, families.get(name, ()), ranks)
            for name in names.split("+")
        ]
        known = [value for value in values if value is not None]
        if (
            len(known) == len(values)
            and (value := _check_value(fact.field, sum(known))) is not None
        ):
            return value
    return None


def _combine_samples(
    profile: Profile, fact: Fact, samples: Collection[Sample], ranks: int
) -> float | None:
    """Return one value for the samples; None when a part is unknown.

    It is also None where a series has two values, as on a page joined from several servers: the format leaves this
    undefined, and Prometheus keeps the first.
    """
    if len(samples) > 1:
        values = {(frozenset(sample.labels.items()), sample.value) for sample in samples}
        if len(values) > len({series for series, _ in values}):
            return None
    parts: defaultdict[object, list[float]] = defaultdict(list)
    for sample in samples:
        if fact.where is None or sample.labels.get(fact.where[0], "") in fact.where[1]:
            parts[_identify_part(profile, fact, sample)] += _list_amount(fact, sample)
    if not parts or not all(parts.values()):
        return None
    known = [max(repeated) for repeated in parts.values()]
    if fact.combine is Combine.SAME:
        return known[0] if len(set(known)) == 1 else None
    divisor = {Combine.SUM: 1, Combine.MEAN: len(known), Combine.SHARE: ranks}[fact.combine]
    return _check_value(fact.field, sum(known) / divisor)


def _identify_part(profile: Profile, fact: Fact, sample: Sample) -> object:
    """Return a key of the part that a sample measures; repetitions of one part have the same key."""
    if fact.label is not None:
        return tuple(sample.labels.get(name, "") for name in profile.replica_labels)
    return frozenset(
        [item for item in sample.labels.items() if item[0] not in profile.repeat_labels]
    )


def _list_amount(fact: Fact, sample: Sample) -> list[float]:
    """Return the amount of a sample, none where it has no usable one."""
    try:
        value = float(sample.value if fact.label is None else sample.labels.get(fact.label, ""))
    except (ValueError, OverflowError):  # a label that says "None"; an integer beyond any float
        return []
    amount = (
        None
        if fact.label is not None and value == 0
        else _check_value(fact.field, value * fact.factor)
    )
    return [] if amount is None else [amount]


def _check_value(field: str, value: float) -> float | None:
    highest = 1.0 if field.endswith("_ratio") else LARGEST
    return value if isfinite(value) and 0 <= value <= highest else None


DEFAULT: Final = PROFILES[0]


def parse_engines(page: str, profile: str | None = None) -> EnginePage | Failure:
    """Parse a page of Prometheus text into engine readings, with the profile of this name.

    Without a name, the first profile with matching series is used. A page without series of a known engine
    yields the first profile and no engines. Failures: NOT_METRICS for an empty page or no metrics, INCOMPLETE for a
    truncated page, MALFORMED for a needed line that cannot be parsed, OUT_OF_BOUNDS for an oversized page.
    """
    if failure := check_page(page):
        return failure
    pages: list[EnginePage] = []
    for each in PROFILES if profile is None else [find_profile(profile)]:
        samples = parse_samples(page, each.names_pattern)
        understood = samples if isinstance(samples, Failure) else build_page(each, samples)
        if isinstance(understood, Failure) or understood.engines:
            return understood
        pages.append(understood)
    return pages[0]


def find_profile(name: str) -> Profile:
    """Return the profile of this name; the first one if there is none."""
    return next((each for each in PROFILES if each.name == name), DEFAULT)


def explain_empty_page(page: EnginePage) -> str:
    """Return why a page may have no engine: the expected series, and what enables them in each engine."""
    wanted = PROFILES if page.profile == DEFAULT.name else (find_profile(page.profile),)
    expected = "; ".join(
        f"{each.product} ({' '.join(each.prefixes)}; {each.path}, {each.switch})" for each in wanted
    )
    return (
        "the page has no series of an engine: check that HEADROOM_ENGINE_URL is the engine's own port and path, and"
        " that it exports metrics; a server that has served no request yet may show none. Looked for"
        f" {expected}. Another engine needs its own profile: docs/engines.md"
    )
