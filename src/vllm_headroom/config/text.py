"""The settings as text: for --help, for the README, and for --print-config."""

from __future__ import annotations

import textwrap
from typing import Final

import yaml

from vllm_headroom.config.fields import about
from vllm_headroom.config.settings import Settings
from vllm_headroom.config.sources import key, option, variable
from vllm_headroom.config.values import redacted

WIDTH: Final = 80

SOURCES: Final = """\
Each is an option, an environment variable and a key of the YAML file:
  --sample-interval-seconds 5
  HEADROOM_SAMPLE_INTERVAL_SECONDS=5
  sample_interval_seconds: 5
The command line beats the environment, and the environment beats the file.
An empty environment variable counts as not set."""

OTHERS: Final = (
    "  --config FILE    Read settings from a YAML file, as HEADROOM_CONFIG does.",
    "  --print-config   Show what is in force, as such a file, and exit.",
    "  --version        Show the version and exit.",
    "  -h, --help       Show this and exit.",
)


def settings_help(kind: type[Settings]) -> str:
    """Return what --help says of a command's settings, its own first, and of the options beside them."""
    settings = [
        _entry(
            f"{option(name)} {about(field, 'word')}",
            str(field.description),
            f"Default: {about(field, 'shown')}. Accepts {about(field, 'accepts')}.",
        )
        for name, field in sorted(kind.model_fields.items(), key=lambda item: item[0] in Settings.model_fields)
        if name not in kind.no_options
    ]
    return "\n".join((f"Settings. {SOURCES}\n", *settings, "\nOther options:", *OTHERS))


def _entry(*lines: str) -> str:
    head, *rest = lines
    indent = " " * 6
    return "\n".join(
        (f"  {head}", *(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent) for text in rest))
    )


def settings_table() -> str:
    """Return the README's table of settings, in Markdown."""
    rows = [
        f"| `{variable(name)}` | {about(field, 'shown')} | {field.description} | {about(field, 'accepts')} |"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(("| setting | default | meaning | accepts |", "| --- | --- | --- | --- |", *rows)) + "\n"


def settings_yaml(settings: Settings) -> str:
    """Return what is in force as YAML that --config accepts, with stars for secrets."""
    in_force = settings.model_dump(mode="json")
    in_force["engine_url"] = redacted(settings.engine_url)
    in_force["engine_headers"] = dict.fromkeys(settings.engine_headers, "***")
    return yaml.safe_dump(
        {key(name): in_force[name] for name in in_force if name not in settings.no_options},
        sort_keys=False,
        allow_unicode=True,
    )
