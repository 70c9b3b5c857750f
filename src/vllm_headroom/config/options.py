"""The options of a command: declared as argparse's, read so that every mistake is told at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm_headroom.config.kinds import ANYTHING, Value
from vllm_headroom.config.sources import (
    CONFIG,
    SOURCES,
    Found,
    Given,
    from_arguments,
    from_environment,
    option,
    variable,
)
from vllm_headroom.units import RefusedError
from vllm_headroom.vocabulary import CONTROLS

if TYPE_CHECKING:
    from vllm_headroom.config.settings import Settings

A_CONFIG: Final = Value(read=str, accepts="the path of a YAML file")


class BadOptions(Exception):  # noqa: N818 - it says what was given, which is all the operator needs to know
    """Options that cannot be used; `lines` has exactly one line per mistake."""

    def __init__(self, *mistakes: str) -> None:
        self.lines: Final = tuple(mistake.translate(CONTROLS) for mistake in mistakes)
        super().__init__("\n".join(self.lines))


class Told(Exception):  # noqa: N818 - no error: what was asked for in place of the command
    """The text that --help, --version or --print-config ask for."""


class Parser(argparse.ArgumentParser):
    """A command's options; a default that is a list takes an option as often as it is given."""

    def __init__(self, prog: str, version: Callable[[], str] = str) -> None:
        super().__init__(
            prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, add_help=False
        )
        self._version = version
        self._settings: type[Settings] | None = None
        self._values: dict[str, Value[Any]] = {}
        self.add_argument("-h", "--help", action="store_true", help="show this and exit")
        self.add_argument("--version", action="store_true", help="show the version and exit")

    def add_settings(self, kind: type[Settings]) -> None:
        """Add the settings of `kind`, its own first; the environment and a file may give them as well."""
        from vllm_headroom.config.fields import about  # noqa: PLC0415 - most commands have no settings
        from vllm_headroom.config.settings import Settings  # noqa: PLC0415 - the same

        self._settings = kind
        own_first = sorted(kind.model_fields, key=lambda name: name in Settings.model_fields)
        self._values = {name: about(kind.model_fields[name]).kind for name in own_first}
        self.add_argument("--config", metavar="FILE", type=A_CONFIG, help="read settings from it, as HEADROOM_CONFIG")
        self.add_argument("--print-config", action="store_true", help="show what is in force, as such a file, and exit")
        group = self.add_argument_group("settings", SOURCES)
        for name, value in self._values.items():
            if name not in kind.no_options:
                field = kind.model_fields[name]
                is_ = about(field)
                told = f"{field.description} Accepts {value.accepts}. {variable(name)}; default: {is_.default}"
                group.add_argument(option(name), dest=name, metavar=is_.word, type=value, help=told.replace("%", "%%"))

    def read(self, argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
        """Return the values by name, with `settings` where they were added.

        Of these the command line beats the environment, and the environment beats the file. Raises BadOptions with
        every mistake, also in a value that another source overrides, and Told.
        """
        places = [action for action in self._actions if not action.option_strings]
        arguments = from_arguments(argv, self._option_string_actions, places)
        for given in arguments.given:
            if given.setting in {"help", "version"}:
                raise Told(self.format_help().rstrip() if given.setting == "help" else self._version())
        values, mistakes = self._valued((arguments, *self._other_sources(arguments, environ)))
        mistakes += self._missing(argv)
        if mistakes:
            raise BadOptions(*mistakes)
        return self._complete(values)

    def _other_sources(self, arguments: Found, environ: Mapping[str, str]) -> Iterator[Found]:
        """Yield what the environment gives and the file that the command line or else the environment names."""
        if self._settings is None:
            return
        environment = from_environment(environ, {*self._values, CONFIG})
        yield environment
        for given in (*arguments.given, *environment.given):
            if given.setting == CONFIG:
                from vllm_headroom.config.yaml_file import from_file  # noqa: PLC0415 - YAML costs 25 ms of the start

                yield from_file(str(given.value), given.name, self._values)
                return

    def _valued(self, sources: Sequence[Found]) -> tuple[dict[str, Any], list[str]]:
        """Return the values, of which the first source's count, and the mistakes."""
        values: dict[str, Any] = {}
        mistakes: list[str] = []
        lists = {action.dest for action in self._actions if isinstance(action.default, list)}
        for source in sources:
            mistakes += source.mistakes
            for given in source.given:
                kind, told = self._kind(given), given.value
                try:
                    value = kind(told.strip() if isinstance(told, str) and given.setting in self._values else told)
                except ValueError as error:
                    reason = f" ({error})" if isinstance(error, RefusedError) else ""
                    mistakes.append(f"{given.name}: got {kind.shown(given.value)}{reason}, accepts {kind.accepts}")
                    continue
                if given.setting in lists:
                    values.setdefault(given.setting, []).append(value)
                else:
                    values.setdefault(given.setting, value)
        return values, mistakes

    def _kind(self, given: Given) -> Value[Any]:
        if given.setting in self._values:
            return self._values[given.setting]
        return next((_kind(action) for action in self._actions if action.dest == given.setting), ANYTHING)

    def _missing(self, argv: Sequence[str]) -> list[str]:
        typed = {word.partition("=")[0].replace("_", "-") for word in argv}
        lacking = [action for action in self._actions if action.required and not typed & set(action.option_strings)]
        return [f"{action.option_strings[-1]}: needed, accepts {_kind(action).accepts}" for action in lacking]

    def _complete(self, values: dict[str, Any]) -> argparse.Namespace:
        given = argparse.Namespace(**{action.dest: _default(action) for action in self._actions} | values)
        if self._settings is not None:
            settings = {name: value for name, value in values.items() if name in self._values}
            given.settings = self._settings.model_validate(settings)
            if given.print_config:
                from vllm_headroom.config.yaml_file import settings_yaml  # noqa: PLC0415 - as above

                raise Told(settings_yaml(given.settings).rstrip())
        return given


def _kind(action: argparse.Action) -> Value[Any]:
    return action.type if isinstance(action.type, Value) else ANYTHING


def _default(action: argparse.Action) -> object:
    """Return a default; one that is a text is read as if it were given."""
    return _kind(action)(action.default) if isinstance(action.default, str) else action.default
