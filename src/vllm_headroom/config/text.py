"""The settings as text, for --help and the documentation."""

from __future__ import annotations

from typing import Final

from vllm_headroom.config.fields import about
from vllm_headroom.config.settings import Settings
from vllm_headroom.config.sources import variable

SOURCES: Final = """\
Each is an option, an environment variable and a key of the YAML file:
  --sample-interval-seconds 5
  HEADROOM_SAMPLE_INTERVAL_SECONDS=5
  sample_interval_seconds: 5
The command line beats the environment, and the environment beats the file.
An empty environment variable counts as not set."""


def own_first(kind: type[Settings]) -> list[str]:
    """Return the names of a command's settings, its own before those of the daemon."""
    return sorted(kind.model_fields, key=lambda name: name in Settings.model_fields)


def settings_table() -> str:
    """Return docs' table of settings, in Markdown."""
    rows = [
        f"| `{variable(name)}` | {about(field, 'shown')} | {field.description} | {about(field, 'accepts')} |"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(("| setting | default | meaning | accepts |", "| --- | --- | --- | --- |", *rows)) + "\n"
