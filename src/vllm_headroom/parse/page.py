"""A page of an engine, read by the profile that knows it."""

from __future__ import annotations

from typing import Final

from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.engines import engine_page
from vllm_headroom.parse.exposition import page_failure, wanted_samples
from vllm_headroom.parse.profile import Profile
from vllm_headroom.parse.profiles import PROFILES

DEFAULT: Final = PROFILES[0]


def parse_engines(page: str, profile: str | None = None) -> EnginePage | Failure:
    """Return what a page of Prometheus text says of the engines behind it, read by the profile of this name.

    Without a name the first profile that finds its series reads it. An empty page, and one without a series of any
    known engine, is read with the first profile and has no engines. Gives NOT_METRICS for anything but metrics,
    INCOMPLETE for a page that is cut off, MALFORMED when a line that is needed cannot be parsed and OUT_OF_BOUNDS for a
    page that would cost more than any engine's does.
    """
    if failure := page_failure(page):
        return failure
    pages: list[EnginePage] = []
    for each in PROFILES if profile is None else [profile_of(profile)]:
        samples = wanted_samples(page, each.names_pattern)
        if isinstance(samples, Failure):
            return samples
        understood = engine_page(each, samples)
        if isinstance(understood, Failure):
            return understood
        if understood.engines:
            return understood
        pages.append(understood)
    return pages[0]


def profile_of(name: str) -> Profile:
    """Return the profile of this name, the first for a name of none."""
    return next((each for each in PROFILES if each.name == name), DEFAULT)


def nothing_found(page: EnginePage) -> str:
    """Return why a page may have no engine: what was looked for, and what makes each engine tell it."""
    wanted = PROFILES if page.profile == DEFAULT.name else (profile_of(page.profile),)
    told = "; ".join(f"{each.product} ({' '.join(each.prefixes)}; {each.path}, {each.switch})" for each in wanted)
    return (
        "the page has no series of an engine: check that HEADROOM_ENGINE_URL is the engine's own port and path, and"
        f" that it tells its metrics; a server that has served no request yet may show none. Looked for {told}. Another"
        " engine is read by a profile of its own: docs/engines.md"
    )
