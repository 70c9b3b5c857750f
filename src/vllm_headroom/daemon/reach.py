"""How the engine is asked, by what the settings say of reaching it."""

from __future__ import annotations

from typing import Final

import httpx

from vllm_headroom.config.settings import Settings
from vllm_headroom.scrape.http.canary import Canary
from vllm_headroom.scrape.http.reader import PageReader

HEALTH_SECONDS: Final = 10.0
TOKEN_SECONDS: Final = 60.0
"""For one token of an idle engine; beyond it the request is given up, and asked again."""


def page_reader(settings: Settings, url: str, *, timeout_seconds: float) -> PageReader:
    """Return a reader of a page of the engine, with all that the settings say of how to reach it."""
    return PageReader(
        url=url,
        timeout_seconds=timeout_seconds,
        max_bytes=settings.engine_max_page_bytes,
        bearer_token_file=settings.engine_bearer_token_file,
        ca_file=settings.engine_ca_file,
        headers={name: value.get_secret_value() for name, value in settings.engine_headers.items()},
    )


def canary(settings: Settings) -> Canary:
    """Return what asks the server beside its page; whether the engine sleeps is told by the engine, as a token is."""
    url = httpx.URL(settings.engine_url)

    def reader(path: str, seconds: float) -> PageReader:
        return page_reader(settings, str(url.join(path)), timeout_seconds=seconds)

    return Canary(
        health=reader("health", HEALTH_SECONDS),
        sleep=reader("is_sleeping", TOKEN_SECONDS),
        completion=reader("v1/completions", TOKEN_SECONDS),
    )
