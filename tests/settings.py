"""Settings as a command reads them, from a command line and an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from vllm_headroom.config.fields import about
from vllm_headroom.config.options import Parser
from vllm_headroom.config.settings import Settings
from vllm_headroom.config.sources import variable

AnySettings = TypeVar("AnySettings", bound=Settings)


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the daemon's settings; raises BadOptions."""
    return load_as(Settings, argv, environ)


def load_as(kind: type[AnySettings], argv: Sequence[str], environ: Mapping[str, str]) -> AnySettings:
    """Return the settings of a command; raises BadOptions."""
    parser = Parser("vllm-headroom")
    parser.add_settings(kind)
    settings = parser.read(argv, environ).settings
    assert isinstance(settings, kind)
    return settings


def settings_table() -> str:
    """Return docs' table of settings, in Markdown."""
    rows = [
        f"| `{variable(name)}` | {about(field).default} | {field.description} | {about(field).kind.accepts} |"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(("| setting | default | meaning | accepts |", "| --- | --- | --- | --- |", *rows)) + "\n"
