"""Settings from the command line, the environment and a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from vllm_headroom.config.fields import refusals
from vllm_headroom.config.settings import Settings
from vllm_headroom.config.sources import CONFIG, Found, from_arguments, from_environment, from_file
from vllm_headroom.vocabulary import CONTROLS


class SettingsError(Exception):
    """Settings that cannot be used; `lines` has exactly one line per mistake."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.lines: Final = tuple(mistake.translate(CONTROLS) for mistake in mistakes)
        super().__init__("\n".join(self.lines))


AnySettings = TypeVar("AnySettings", bound=Settings)


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings in force: the command line beats the environment, the environment beats the file.

    Raises SettingsError with every mistake, also in a value that another source overrides.
    """
    return load_as(Settings, argv, environ)


def load_as(kind: type[AnySettings], argv: Sequence[str], environ: Mapping[str, str]) -> AnySettings:
    """Return the settings of one command; like `load`."""
    names = {*kind.model_fields, CONFIG}
    arguments = from_arguments(argv, names - kind.no_options)
    environment = from_environment(environ, names)
    sources = (arguments, environment, _file(arguments, environment, kind))
    mistakes = [line for found in sources for line in (*found.mistakes, *refusals(kind, found.given))]
    if mistakes:
        raise SettingsError(mistakes)
    given = [given for found in reversed(sources) for given in found.given if given.setting != CONFIG]
    return kind.model_validate({each.setting: each.value for each in given})


def _file(arguments: Found, environment: Found, kind: type[Settings]) -> Found:
    for given in (*arguments.given, *environment.given):
        if given.setting == CONFIG:
            return from_file(str(given.value or ""), given.name, kind.model_fields)
    return Found()
