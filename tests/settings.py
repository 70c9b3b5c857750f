"""Settings as a command reads them, from a command line and an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar
from unittest.mock import patch

from vllm_headroom.config import Settings, find_display, name_variable
from vllm_headroom_tools.options import Parser
from vllm_headroom_tools.settings import ModelSettings

AnySettings = TypeVar("AnySettings", bound=Settings)


def load(argv: Sequence[str], environ: Mapping[str, str]) -> ModelSettings:
    """Return the daemon's settings; raises BadOptions."""
    return load_as(ModelSettings, argv, environ)


def load_as(kind: type[AnySettings], argv: Sequence[str], environ: Mapping[str, str]) -> AnySettings:
    """Return the settings of a command; raises BadOptions."""
    parser = Parser("vllm-headroom")
    parser.add_settings(kind)
    with patch("os.environ", dict(environ)):
        settings = parser.read(argv).settings
    assert isinstance(settings, kind)
    return settings


def settings_table() -> str:
    """Return docs' table of settings, in Markdown."""
    rows = []
    for name, field in Settings.model_fields.items():
        display = find_display(field)
        rows.append(f"| `{name_variable(name)}` | {display.default} | {field.description} | {display.accepts} |")
    return "\n".join(("| setting | default | meaning | accepts |", "| --- | --- | --- | --- |", *rows)) + "\n"
