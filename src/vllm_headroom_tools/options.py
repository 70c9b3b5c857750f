"""The options of a command: the kinds of their values, and a reader that reports every mistake at once."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct, field

from vllm_headroom.inputs import (
    describe_refused,
    describe_unknown,
    parse_gpus,
    parse_http_url,
    parse_metrics_url,
    parse_number,
    parse_path,
    parse_whole,
    show_url,
    show_value,
    split_closed,
)
from vllm_headroom.units import parse_duration, parse_share, parse_size, parse_vllm_number
from vllm_headroom.vocabulary import CONTROLS

if TYPE_CHECKING:
    import httpx

    from vllm_headroom.config import Settings

T = TypeVar("T")
Number = TypeVar("Number", int, float)
MOST: Final = 2**53


class Value(Struct, Generic[T], frozen=True, kw_only=True):
    """How a text becomes a value: `read` raises ValueError for one that is not what it `accepts`."""

    read: Callable[[str], T]
    accepts: str
    shown: Callable[[object], str] = show_value

    def __call__(self, text: str) -> T:
        """Return the value, as argparse has it."""
        return self.read(text)


def bounded(read: Callable[[str], Number], low: float, high: float) -> Callable[[str], Number]:
    """Return what reads a number from `low` to `high`, and refuses any other."""

    def checked(text: str) -> Number:
        value = read(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return checked


def above_zero(read: Callable[[str], float], high: float = 1.7e308) -> Callable[[str], float]:
    """Return what reads a number above 0, and refuses any other."""
    return bounded(read, 5e-324, high)


TEXT: Final = Value(read=str, accepts="a text")
FILE: Final = Value(read=parse_path, accepts="the path of a file")
FOLDER: Final = Value(read=parse_path, accepts="the path of a directory")
TRACE: Final = Value(
    read=lambda text: str(parse_path(text)), accepts="the path of a trace, or - for standard input"
)
RATIO: Final = Value(read=above_zero(parse_number, 1), accepts="a ratio above 0, at most 1")
SHARE: Final = Value(
    read=bounded(parse_share, 0, 1), accepts="a share such as 5% or 0.05, at most 100%"
)
DURATION: Final = Value(
    read=above_zero(parse_duration), accepts="a duration above 0 such as 90s, 5m or 1h"
)
NUMBER: Final = Value(read=above_zero(parse_number), accepts="a number above 0")
GPUS: Final = Value(
    read=parse_gpus, accepts="auto, all, or GPU indices or UUIDs separated by commas"
)


def size(example: str) -> Value[int]:
    """Return the kind of a size in bytes."""
    return Value(
        read=parse_size, accepts=f"a size such as {example}, or a number of bytes from 1 MiB on"
    )


def whole(low: int = 1, high: int = MOST) -> Value[int]:
    """Return the kind of a whole number from `low` to `high`."""
    most = f" to {high}" if high < MOST else " on"
    return Value(read=bounded(parse_whole, low, high), accepts=f"a whole number from {low}{most}")


def tokens(high: int = MOST) -> Value[int]:
    """Return the kind of a number of tokens, as vLLM's options take it."""
    accepts = f"a whole number from 1 to {high}, such as 32768, 32k (32,000) or 32K (32,768)"
    return Value(read=bounded(parse_vllm_number, 1, high), accepts=accepts)


def choice(names: Sequence[str]) -> Value[str]:
    """Return the kind of a name out of several."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Value(read=read, accepts=f"{', '.join(names[:-1])} or {names[-1]}")


def url(example: str) -> Value[httpx.URL]:
    """Return the kind of an http or https URL."""
    return Value(
        read=parse_http_url, accepts=f"an http or https URL such as {example}", shown=show_url
    )


def page_url(example: str) -> Value[str]:
    """Return the kind of the URL of a page of metrics."""
    return Value(
        read=parse_metrics_url, accepts=f"an http or https URL such as {example}", shown=show_url
    )


class BadOptions(Exception):  # noqa: N818 - it says what was given, which is all the operator needs to know
    """Options that cannot be used; `lines` has exactly one line per mistake."""

    def __init__(self, *mistakes: str) -> None:
        self.lines: Final = tuple(mistake.translate(CONTROLS) for mistake in mistakes)
        super().__init__("\n".join(self.lines))


class Printed(Exception):  # noqa: N818 - no error: what was asked for in place of the command
    """The text that --help, --version or --print-config print."""


def option(key: str) -> str:
    """Return how the command line spells a setting."""
    return "--" + key.replace("_", "-")


SOURCES: Final = """\
Each is an option, an environment variable and a key of the YAML file:
  --sample-interval-seconds 5
  HEADROOM_SAMPLE_INTERVAL_SECONDS=5
  sample_interval_seconds: 5
The command line beats the environment, and the environment beats the file.
An empty environment variable counts as not set."""

ENGINE_URL: Final = "--engine-url"

OPTION: Final = re.compile(r"--|-[A-Za-z]")
"""How an option begins; a negative number is a value."""


class Typed(Struct):
    """An option as it was typed with the words that are taken for its values; `action` is None for an unknown one."""

    name: str
    action: argparse.Action | None
    values: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the next word is its value."""
        return not self.values and (self.action is None or self.action.nargs != 0)


Option = tuple[str, argparse.Action, str]
"""An option or a place as it was typed, and its value, empty for a flag."""


class Parser(argparse.ArgumentParser):
    """A command's options; a default that is a list takes an option as often as it is given."""

    def __init__(self, prog: str, version: Callable[[], str] = str) -> None:
        super().__init__(
            prog=prog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._version = version
        self._settings: type[Settings] | None = None
        self._of_settings: list[argparse.Action] = []
        self.add_argument("-h", "--help", action="store_true", help="show this and exit")
        self.add_argument("--version", action="store_true", help="show the version and exit")

    def add_settings(self, kind: type[Settings]) -> None:
        """Add the settings of `kind`, its own first; the environment and a file may give them as well."""
        from vllm_headroom.config import Settings, key, read_descriptions, variable, words  # noqa: PLC0415 - most have none

        self._settings = kind
        yaml, text = (
            Value(read=str, accepts="the path of a YAML file"),
            "read settings from it, as HEADROOM_CONFIG",
        )
        self._of_settings = [self.add_argument("--config", metavar="FILE", type=yaml, help=text)]
        self.add_argument(
            "--print-config",
            action="store_true",
            help="show what is in force, as such a file, and exit",
        )
        add = self.add_argument_group("settings", SOURCES).add_argument
        descriptions = read_descriptions(kind)
        for name in sorted(kind.model_fields, key=lambda name: name in Settings.model_fields):
            if name not in kind.no_options:
                shown = words(kind.model_fields[name])
                word, accepts, default = (shown[each] for each in ("word", "accepts", "default"))
                text = f"{descriptions[name]} Accepts {accepts}. {variable(name)}; default: {default}".replace(
                    "%", "%%"
                )
                value = Value(read=str, accepts=accepts)
                self._of_settings.append(
                    add(option(key(name)), metavar=word, type=value, help=text)
                )

    def explain(self, action: argparse.Action) -> str:
        """Return the help of an option, with its default in place."""
        return self._get_formatter()._expand_help(action)  # noqa: SLF001 - argparse has no public way

    def list_values(self, action: argparse.Action) -> list[str]:
        """Return the values of an option that takes one of a few, none of any other."""
        return split_closed(_kind(action).accepts)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the values by name, with `settings` where they were added.

        A first word that is a URL is the engine's, where the command has no place for words. Raises BadOptions with
        every mistake, also in a value that another source overrides, and Printed.
        """
        places = [action for action in self._actions if not action.option_strings]
        is_url = any("://" in word and not OPTION.match(word) for word in argv[:1])
        if is_url and not places and ENGINE_URL in self._option_string_actions:
            argv = (ENGINE_URL, *argv)
        typed, loose = self._split(argv, len(places))
        sound, mistakes = self._sound(typed)
        mistakes += [f"{word!r}: not an option, see --help" for word in loose[len(places) :]]
        sound += [
            (str(place.metavar), place, word) for place, word in zip(places, loose, strict=False)
        ]
        given = argparse.Namespace(
            **{
                each.dest: _kind(each)(each.default)
                if isinstance(each.default, str)
                else each.default
                for each in self._actions
            }
        )
        for name, action, word in sound:
            if action not in self._of_settings:
                mistakes += _take(name, action, word, given)
        if self._settings is not None:
            mistakes += self._take_settings(self._settings, sound, given)
        named = [each.action for each in typed]
        lacking = [action for action in self._actions if action.required and action not in named]
        mistakes += [
            f"{each.option_strings[-1]}: needed, accepts {_kind(each).accepts}" for each in lacking
        ]
        if mistakes:
            raise BadOptions(*dict.fromkeys(mistakes))
        if self._settings is not None and given.print_config:
            from vllm_headroom.config import settings_yaml  # noqa: PLC0415 - as above

            raise Printed(settings_yaml(given.settings).rstrip())
        return given

    def _split(self, argv: Sequence[str], places: int) -> tuple[list[Typed], list[str]]:
        """Return the options in order, and the words that are no option's; `_` in a name counts as `-`."""
        typed: list[Typed] = []
        loose: list[str] = []
        for word in argv:
            name, equals, value = word.partition("=")
            if OPTION.match(word):
                spelt = name.replace("_", "-") if name.startswith("--") else name
                typed.append(
                    Typed(name, self._option_string_actions.get(spelt), [value] if equals else [])
                )
            elif typed and (typed[-1].is_open or len(loose) == places):
                typed[-1].values.append(word)
            else:
                loose.append(word)
        return typed, loose

    def _sound(self, typed: Sequence[Typed]) -> tuple[list[Option], list[str]]:
        """Return the options that are known and have the value they need, and a line for each other; raises Printed."""
        sound: list[Option] = []
        mistakes: list[str] = []
        times = Counter(each.action.dest for each in typed if each.action is not None)
        for each in typed:
            problem = self._problem(each, times)
            if problem is not None:
                mistakes.append(problem)
            elif (
                each.action is not None and each.action.dest in {"help", "version"} and not mistakes
            ):
                raise Printed(
                    self.format_help().rstrip() if each.action.dest == "help" else self._version()
                )
            elif each.action is not None:
                sound.append((each.name, each.action, "".join(each.values)))
        return sound, mistakes

    def _problem(self, typed: Typed, times: Counter[str]) -> str | None:
        name, action, values = typed.name, typed.action, typed.values
        if action is None:
            return describe_unknown(name, self._option_string_actions, "an option")
        if times[action.dest] > 1 and not isinstance(action.default, list):
            return f"{name}: given {times[action.dest]} times, accepts one"
        if action.nargs == 0:
            return f"{name}: takes no value" if values else None
        if len(values) > 1:
            return (
                f"{name}: got {len(values)} words, accepts one: put a value with spaces in quotes"
            )
        return None if values else f"{name}: got nothing, accepts {_kind(action).accepts}"

    def _take_settings(
        self, kind: type[Settings], sound: Sequence[Option], given: argparse.Namespace
    ) -> Sequence[str]:
        """Put the settings into what is given; return the lines that refuse them, if they are refused."""
        from vllm_headroom.config import CONFIG, Given, Settings, read_settings  # noqa: PLC0415 - as above

        options = {
            action.dest: Given(name, word)
            for name, action, word in sound
            if action in self._of_settings
        }
        settings = read_settings(kind, options, options.pop(CONFIG, None))
        if not isinstance(settings, Settings):
            return settings
        given.settings = settings
        return ()


def _take(
    name: str, action: argparse.Action, word: str, given: argparse.Namespace
) -> Iterator[str]:
    """Put the value of an option into what is given; yield the line that refuses it, if it is refused."""
    kind = _kind(action)
    try:
        value: object = True if action.nargs == 0 else kind(word)
    except ValueError as error:
        yield describe_refused(name, word, kind.accepts, error, kind.shown)
    else:
        is_list = isinstance(action.default, list)
        setattr(given, action.dest, [*getattr(given, action.dest), value] if is_list else value)


def _kind(action: argparse.Action) -> Value[Any]:
    return action.type if isinstance(action.type, Value) else TEXT
