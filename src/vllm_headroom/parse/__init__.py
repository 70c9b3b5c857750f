"""Pure: text to readings."""

from __future__ import annotations

from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.engines import engine_page
from vllm_headroom.parse.exposition import page_failure, wanted_samples
from vllm_headroom.parse.profiles import PROFILES


def parse_engines(page: str) -> EnginePage | Failure:
    """Return what a page of Prometheus text says of the engines behind it.

    An empty page, and one without a series of any known engine, is read with the first profile and has no engines.
    Gives NOT_METRICS for anything but metrics, INCOMPLETE for a page that is cut off, MALFORMED when a line that is
    needed cannot be parsed and OUT_OF_BOUNDS for a page that would cost more than any engine's does.
    """
    if failure := page_failure(page):
        return failure
    pages: list[EnginePage] = []
    for profile in PROFILES:
        samples = wanted_samples(page, profile.names_pattern)
        if isinstance(samples, Failure):
            return samples
        understood = engine_page(profile, samples)
        if isinstance(understood, Failure):
            return understood
        pages.append(understood)
    return next((found for found in pages if found.engines), pages[0])
