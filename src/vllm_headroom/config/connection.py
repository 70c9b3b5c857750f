"""How the engine's page is reached."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from vllm_headroom.config.fields import EngineProfile, Headers, Size, Url, file, seconds, setting, size
from vllm_headroom.parse.profiles import PROFILES


class EngineConnection(BaseModel):
    """The settings of the connection to the engine."""

    engine_url: Url = setting(
        "http://127.0.0.1:8000/metrics",
        "Where the engine serves its metrics; a URL without a path gets /metrics.",
        accepts="an http or https URL",
        word="URL",
        repr=False,
    )
    engine_profile: EngineProfile = setting(
        "auto",
        "Which engine's series to read; auto takes the first engine whose series are on the page.",
        accepts=f"auto, {', '.join(each.name for each in PROFILES)}",
        word="NAME",
    )
    engine_timeout_seconds: float = seconds(
        4, 0.05, 60, "How long to wait for the engine's page; never longer than the sample interval."
    )
    engine_max_page_bytes: Size = size("4MiB", "The largest page to read from the engine; a larger one is a failure.")
    engine_bearer_token_file: Path | None = file(
        "A file with the token to send to the engine as 'Authorization: Bearer ...'; read for every page."
    )
    engine_ca_file: Path | None = file("The certificates, in PEM, to trust for an https engine.")
    engine_headers: Headers = setting(
        {},
        "More headers to send to the engine; their values are never shown.",
        accepts="a mapping of header names to values, in JSON or YAML",
        word="JSON",
        shown="none",
    )
