"""A command's options: their kinds of values, and a parser that reports all mistakes."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from msgspec import Struct, field

from vllm_headroom.inputs import (
    describe_refused,
    describe_unknown,
    parse_gpus,
    parse_http_url,
    parse_metrics_url,
    parse_number,
    parse_path,
    parse_ratio,
    parse_whole_number,
    show_url,
    show_value,
    split_closed_set,
)
from vllm_headroom.units import parse_duration, parse_share, parse_size, parse_vllm_number
from vllm_headroom.vocabulary import CONTROLS

if TYPE_CHECKING:
    import httpx

    from vllm_headroom.config import Settings

T = TypeVar("T")
AnyNumber = TypeVar("AnyNumber", int, float)
MAX_WHOLE_NUMBER: Final = 2**53
"""A float represents every integer up to this number exactly."""


SMALLEST_FLOAT: Final = 5e-324
LARGEST_FLOAT: Final = 1.7e308


class Value(Struct, Generic[T], frozen=True, kw_only=True):
    """A kind of option value: how it is parsed, and which input is accepted."""

    read: Callable[[str], T]
    """Parses a value; raises ValueError if it is not accepted."""

    accepts: str
    """A description of the accepted values, worded as the end of a sentence."""

    is_json: bool = False
    """Whether the value is a JSON object. A single key of this object can be set with --name.key
    VALUE.
    """

    show: Callable[[object], str] = show_value
    """Formats a rejected value for error messages, for example with the password removed."""

    def __call__(self, text: str) -> T:
        """Parse a value; argparse expects a type to be callable."""
        return self.read(text)


def bounded(
    read: Callable[[str], AnyNumber], low: float, high: float
) -> Callable[[str], AnyNumber]:
    """Return a function that parses a number.

    The function raises ValueError if the number is out of bounds.
    """

    def read_bounded(text: str) -> AnyNumber:
        """Return the number; raise ValueError if it is out of bounds."""
        number = read(text)
        if not low <= number <= high:
            raise ValueError
        return number

    return read_bounded


def above_zero(read: Callable[[str], float], high: float = LARGEST_FLOAT) -> Callable[[str], float]:
    """Return a function that parses a number.

    The function raises ValueError if the number is not in (0, `high`].
    """
    return bounded(read, SMALLEST_FLOAT, high)


TEXT: Final = Value(read=str, accepts="a text")
FILE: Final = Value(read=parse_path, accepts="the path of a file")
FOLDER: Final = Value(read=parse_path, accepts="the path of a directory")
TRACE: Final = Value(
    read=lambda text: str(parse_path(text)), accepts="the path of a trace, or - for standard input"
)
LOG: Final = Value(
    read=lambda text: str(parse_path(text)),
    accepts="the path of an engine's log, or - for standard input",
)
RATIO: Final = Value(read=above_zero(parse_ratio, 1), accepts="a ratio above 0, at most 1")
SHARE: Final = Value(
    read=bounded(parse_share, 0, 1), accepts="a share such as 5% or 0.05, at most 100%"
)
DURATION: Final = Value(
    read=above_zero(parse_duration), accepts="a duration above 0 such as 90s, 5m or 1h"
)
POSITIVE_NUMBER: Final = Value(read=above_zero(parse_number), accepts="a number above 0")
GPUS: Final = Value(
    read=parse_gpus, accepts="auto, all, or GPU indices or UUIDs separated by commas"
)


def size_value(example: str) -> Value[int]:
    """Return the kind of value for a size in bytes."""
    return Value(
        read=parse_size, accepts=f"a size such as {example}, or a number of bytes from 1 MiB on"
    )


REPORTED_BYTES: Final = size_value("72GiB")
REPORTED_BYTES_VARIABLE: Final = "HEADROOM_REPORTED_BYTES"


def add_reported_bytes(parser: argparse._ActionsContainer) -> None:
    """Add --reported-bytes, the memory that the engine should use on each GPU."""
    parser.add_argument(
        "--reported-bytes",
        metavar="SIZE",
        type=REPORTED_BYTES,
        help=f"what the engine should hold of each GPU, as {REPORTED_BYTES_VARIABLE}",
    )


def read_reported_bytes(environ: Mapping[str, str]) -> int | None:
    """Return the value of --reported-bytes from the sidecar's environment, or None if not set.

    Raises BadOptions if the value is not a size.
    """
    text = environ.get(REPORTED_BYTES_VARIABLE)
    if not text:
        return None
    try:
        return REPORTED_BYTES.read(text)
    except ValueError as error:
        raise BadOptions(f"{REPORTED_BYTES_VARIABLE} takes {REPORTED_BYTES.accepts}") from error


def whole_number(low: int = 1, high: int = MAX_WHOLE_NUMBER) -> Value[int]:
    """Return the kind of value for a whole number from `low` to `high`."""
    upper_bound = f" to {high}" if high < MAX_WHOLE_NUMBER else " on"
    return Value(
        read=bounded(parse_whole_number, low, high),
        accepts=f"a whole number from {low}{upper_bound}",
    )


def tokens(high: int = MAX_WHOLE_NUMBER) -> Value[int]:
    """Return the kind of value for a number of tokens, as in vLLM's options."""
    accepts = f"a whole number from 1 to {high}, such as 32768, 32k (32,000) or 32K (32,768)"
    return Value(read=bounded(parse_vllm_number, 1, high), accepts=accepts)


def choice(names: Sequence[str]) -> Value[str]:
    """Return the kind of value that accepts only these names."""

    def read(text: str) -> str:
        """Return the name; raise ValueError if it is not one of the names."""
        if text not in names:
            raise ValueError
        return text

    return Value(read=read, accepts=f"{', '.join(names[:-1])} or {names[-1]}")


LOCAL_SIDECAR: Final = "http://127.0.0.1:9839"
"""The URL of a sidecar in the same pod or on the same machine. The port is the default port."""


def find_local_sidecar() -> str:
    """Return the URL of the sidecar on this machine, with the port HEADROOM_LISTEN_PORT."""
    port = os.environ.get("HEADROOM_LISTEN_PORT", "")
    return f"http://127.0.0.1:{port}" if port.isdecimal() else LOCAL_SIDECAR


def url(example: str) -> Value[httpx.URL]:
    """Return the kind of value for an http or https URL."""
    return Value(
        read=parse_http_url, accepts=f"an http or https URL such as {example}", show=show_url
    )


def page_url(example: str) -> Value[str]:
    """Return the kind of value for the URL of a metrics page."""
    return Value(
        read=parse_metrics_url, accepts=f"an http or https URL such as {example}", show=show_url
    )


class BadOptions(Exception):  # noqa: N818 - it describes the options
    """Options that cannot be used; `lines` contains exactly one line per mistake."""

    def __init__(self, *mistakes: str) -> None:
        self.lines: Final = tuple(mistake.translate(CONTROLS) for mistake in mistakes)
        super().__init__("\n".join(self.lines))


class Printed(Exception):  # noqa: N818 - not an error, but the requested output
    """Ends parsing with the output of --help, --version or --print-config."""


def name_option(key: str) -> str:
    """Return the option for a setting."""
    return "--" + key.replace("_", "-")


SOURCES_HELP: Final = """\
Each is an option, an environment variable and a key of the YAML file:
  --sample-interval-seconds 5
  HEADROOM_SAMPLE_INTERVAL_SECONDS=5
  sample_interval_seconds: 5
The command line beats the environment, and the environment beats the file.
An empty environment variable counts as not set."""

ENGINE_URL: Final = "--engine-url"

END_OF_OPTIONS: Final = "--"

LEVEL: Final = re.compile(r"-O(?:\d|\..+)", re.ASCII)
"""vLLM's optimisation level, written without a space."""

OPTION: Final = re.compile(r"--|-[A-Za-z]")
"""Matches the start of an option; a word such as -1 is a value."""


class TypedOption(Struct):
    """An option as it was typed, with the words after it."""

    name: str

    action: argparse.Action | None
    """The option in argparse, or None if it does not exist."""

    values: list[str] = field(default_factory=list)

    is_foreign: bool = False
    """Whether the option belongs to another program and has no effect on this one."""

    @property
    def is_unknown(self) -> bool:
        """Return whether neither this command nor the other program has the option."""
        return self.action is None and not self.is_foreign

    @property
    def is_open(self) -> bool:
        """Return whether the next word may be this option's value."""
        takes_value = self.action is None or self.action.nargs != 0
        return takes_value and not self.values


def join_parts(words: Sequence[str], json_names: Container[str]) -> list[str]:
    """Return the words with parts such as `--name.key VALUE` merged into one JSON object.

    This is how vLLM parses such options (vLLM 0.33, utils/argparse_utils.py). Parts are merged only
    for the options in `json_names`. The merged JSON object comes after all other words.
    """
    joined_words: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    place = 0
    while place < len(words):
        path, equals_sign, text = words[place].partition("=")
        name, *keys = path.split(".")
        name = name.replace("_", "-")
        place += 1
        if not keys or name not in json_names:
            joined_words.append(words[place - 1])
            continue
        # The value of a part follows `=`, or is the next word.
        if not equals_sign and place < len(words):
            text = words[place]
            place += 1
        part = objects.setdefault(name, {})
        for key in keys[:-1]:
            part = part.setdefault(key, {})
        part[keys[-1]] = _parse_part(text)
    for name, content in objects.items():
        joined_words += [name, json.dumps(content)]
    return joined_words


def _parse_part(text: str) -> object:
    """Return the value as parsed JSON, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class Argument(NamedTuple):
    """An option or a positional argument, with the value that was entered for it."""

    name: str
    action: argparse.Action

    text: str
    """The value as entered; empty for a flag."""


class Parser(argparse.ArgumentParser):
    """A command's options; the parser reports all mistakes in them at once.

    argparse declares the options and formats the help. argparse does not parse the words, because
    it stops at the first mistake. An option may be repeated if its default is a list.
    """

    def __init__(self, prog: str, version: Callable[[], str] = str) -> None:
        super().__init__(
            prog=prog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # Options cannot be abbreviated. A new option could make an existing abbreviation
            # ambiguous.
            allow_abbrev=False,
            add_help=False,
        )
        self._version = version
        self._settings_class: type[Settings] | None = None
        self._settings_actions: list[argparse.Action] = []
        self._option_kind = "an option"
        self._line_hint = ""
        self._foreign_names: set[str] = set()
        self._read_line: Callable[[Sequence[str]], Sequence[str]] | None = None
        self._is_lenient = False
        self.add_argument("-h", "--help", action="store_true", help="show this and exit")
        self.add_argument("--version", action="store_true", help="show the version and exit")

    def add_settings(self, settings_class: type[Settings]) -> None:
        """Add an option for each setting, beginning with those that only `settings_class` has.

        `read` then also reads the settings from the environment and from a file.
        """
        from vllm_headroom.config import (  # noqa: PLC0415 - most commands need no pydantic
            Settings,
            find_display,
            name_key,
            name_variable,
        )

        self._settings_class = settings_class
        config = self.add_argument(
            "--config",
            metavar="FILE",
            type=Value(read=str, accepts="the path of a YAML file"),
            help="read settings from it, as HEADROOM_CONFIG",
        )
        self._settings_actions = [config]
        self.add_argument(
            "--print-config",
            action="store_true",
            help="show what is in force, as such a file, and exit",
        )
        group = self.add_argument_group("settings", SOURCES_HELP)
        own_names = [
            name for name in settings_class.model_fields if name not in Settings.model_fields
        ]
        for name in (*own_names, *Settings.model_fields):
            if name in settings_class.no_options:
                continue
            setting = settings_class.model_fields[name]
            display = find_display(setting)
            description = f"{setting.description} Accepts {display.accepts}."
            source = f"{name_variable(name)}; default: {display.default}"
            action = group.add_argument(
                name_option(name_key(name)),
                metavar=display.metavar,
                type=Value(read=str, accepts=display.accepts),
                help=f"{description} {source}".replace("%", "%%"),
            )
            self._settings_actions.append(action)

    def accept_line(
        self,
        foreign_names: Iterable[str],
        read_line: Callable[[Sequence[str]], Sequence[str]],
        option_kind: str,
        *,
        is_lenient: bool = False,
    ) -> None:
        """Also accept options of another program and, after `--`, that program's command line.

        `foreign_names` are the other program's options that this one ignores. `read_line` extracts
        the options from the other program's command line. If an option is repeated after `--`, the
        last occurrence counts. An option before `--` overrides the same option after it.
        `option_kind` describes these options in error messages.

        With `is_lenient`, unknown options are accepted. A newer release of the program may have
        them. `unknown_options` in the namespace then contains a sentence about each of them.
        """
        self._is_lenient = is_lenient
        self._option_kind = option_kind
        self._line_hint = f"; a whole line comes after {END_OF_OPTIONS}"
        self._foreign_names = set(foreign_names) - set(self._option_string_actions)
        self._read_line = read_line

    def explain(self, action: argparse.Action) -> str:
        """Return an option's help text with its default inserted."""
        formatter = self._get_formatter()
        return formatter._expand_help(action)  # noqa: SLF001 - argparse has no public way

    def list_values(self, action: argparse.Action) -> list[str]:
        """Return the values that an option accepts.

        Returns an empty list if there is no fixed set.
        """
        return split_closed_set(_find_kind(action).accepts)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the options into a namespace, which includes `settings` if the parser has settings.

        A command without positional arguments accepts the engine's URL as its first word. Raises
        BadOptions with a line for each mistake, even if another source overrides the value. Raises
        Printed for --help, --version and --print-config.
        """
        positionals = [action for action in self._actions if not action.option_strings]
        if self._begins_with_url(argv) and not positionals:
            argv = (ENGINE_URL, *argv)
        line: Sequence[str] = ()
        if self._read_line is not None:
            json_names = self._list_json_names()
            if END_OF_OPTIONS in argv:
                place = argv.index(END_OF_OPTIONS)
                line = join_parts(self._read_line(argv[place + 1 :]), json_names)
                if self._is_lenient:
                    line = [self._complete(word) for word in line]
                argv = argv[:place]
            argv = join_parts(argv, json_names)
        typed_options, loose_words = self._split(argv, len(positionals))
        line_options = self._choose_from_line(line, typed_options)
        unknown_names: list[str] = []
        if self._is_lenient:
            unknown_names = [option.name for option in line_options if option.is_unknown]
            line_options = [option for option in line_options if not option.is_unknown]
        typed_options += line_options
        # From here on, mistakes are collected, so that the operator sees all of them at once.
        arguments, mistakes = self._check(typed_options)
        for place, word in enumerate(loose_words):
            if place < len(positionals):
                action = positionals[place]
                arguments.append(Argument(str(action.metavar), action, word))
            else:
                mistakes.append(f"{word!r}: not an option, see --help{self._line_hint}")

        namespace = self._build_defaults()
        namespace.typed_names = frozenset(argument.action.dest for argument in arguments)
        if self._read_line is not None:
            foreign_names = [option.name for option in typed_options if option.is_foreign]
            namespace.ignored_options = tuple(dict.fromkeys(foreign_names))
            namespace.has_line = bool(line)
            unknown_options = map(self._describe_unknown, unknown_names)
            namespace.unknown_options = tuple(dict.fromkeys(unknown_options))
        for argument in arguments:
            if argument.action not in self._settings_actions:
                mistakes += _store(argument, namespace)
        if self._settings_class is not None:
            mistakes += self._store_settings(self._settings_class, arguments, namespace)
        mistakes += self._list_missing(typed_options)
        if mistakes:
            # Remove duplicate lines, which a repeated option produces.
            raise BadOptions(*dict.fromkeys(mistakes))
        if self._settings_class is not None and namespace.print_config:
            from vllm_headroom_tools.sources import format_settings  # noqa: PLC0415 - see above

            raise Printed(format_settings(namespace.settings).rstrip())
        return namespace

    def _begins_with_url(self, argv: Sequence[str]) -> bool:
        """Return whether the first word is a URL and the command has the option --engine-url."""
        if not argv or ENGINE_URL not in self._option_string_actions:
            return False
        return "://" in argv[0] and not OPTION.match(argv[0])

    def _build_defaults(self) -> argparse.Namespace:
        """Return the default of each option; defaults that are strings are parsed."""
        namespace = argparse.Namespace()
        for action in self._actions:
            default = action.default
            if isinstance(default, str):
                default = _find_kind(action).read(default)
            setattr(namespace, action.dest, default)
        return namespace

    def _split(
        self, argv: Sequence[str], positional_count: int
    ) -> tuple[list[TypedOption], list[str]]:
        """Return the options in order, and the remaining words.

        In names, `_` is the same as `-`. Surplus positional words become values of the preceding
        option. The likely cause is an unquoted value with a space.
        """
        typed_options: list[TypedOption] = []
        loose_words: list[str] = []
        for word in argv:
            if OPTION.match(word):
                typed_options.append(self._parse_option(word))
                continue
            # Either the last option still needs a value, or there are enough positional arguments
            # already.
            is_value = bool(typed_options) and (
                typed_options[-1].is_open or len(loose_words) == positional_count
            )
            if is_value:
                typed_options[-1].values.append(word)
            else:
                loose_words.append(word)
        return typed_options, loose_words

    def _parse_option(self, word: str) -> TypedOption:
        """Parse a word such as --name or --name=value; the option's action may be None."""
        name, equals_sign, value = word.partition("=")
        spelling = name.replace("_", "-") if name.startswith("--") else name
        action = self._option_string_actions.get(spelling)
        return TypedOption(
            name=name,
            action=action,
            values=[value] if equals_sign else [],
            is_foreign=action is None and self._is_foreign(spelling),
        )

    def _describe_unknown(self, name: str) -> str:
        """Return the error for an unknown option, suggesting similar names, including vLLM's."""
        names = {*self._option_string_actions, *self._foreign_names}
        return describe_unknown(name, names, self._option_kind)

    def _complete(self, word: str) -> str:
        """Expand an abbreviated option to its full name.

        vLLM uses argparse, which accepts any unambiguous prefix of a name.
        """
        name, equals_sign, value = word.partition("=")
        names = {*self._option_string_actions, *self._foreign_names}
        if not name.startswith("--") or name.replace("_", "-") in names:
            return word
        completions = [other for other in names if other.startswith(name.replace("_", "-"))]
        return f"{completions[0]}{equals_sign}{value}" if len(completions) == 1 else word

    def _is_foreign(self, spelling: str) -> bool:
        """Return whether the other program has an option such as --name, -O3 or --name.key."""
        if LEVEL.fullmatch(spelling):
            spelling = spelling[:2]
        return spelling.partition(".")[0] in self._foreign_names

    def _list_json_names(self) -> set[str]:
        """Return the names of options whose value is a JSON object."""
        return {
            name
            for name, action in self._option_string_actions.items()
            if isinstance(action.type, Value) and action.type.is_json
        }

    def _choose_from_line(
        self, line: Sequence[str], typed_options: Sequence[TypedOption]
    ) -> list[TypedOption]:
        """Return the options after `--` that take effect, in order."""
        line_options, _ = self._split(line, 0)
        set_names = {option.action.dest for option in typed_options if option.action is not None}
        effective_options = []
        # The last occurrence of an option counts, so the line is processed from the end.
        for option in reversed(line_options):
            if option.action is None:
                effective_options.append(option)
            elif option.action.dest not in set_names:
                set_names.add(option.action.dest)
                effective_options.append(option)
        return effective_options[::-1]

    def _check(self, typed_options: Sequence[TypedOption]) -> tuple[list[Argument], list[str]]:
        """Return the valid options, and an error line for each invalid one.

        Raises Printed for --help and --version unless a mistake precedes them.
        """
        arguments: list[Argument] = []
        mistakes: list[str] = []
        counts = Counter(
            option.action.dest for option in typed_options if option.action is not None
        )
        for option in typed_options:
            action = option.action
            if option.is_foreign:
                continue
            if action is None:
                mistakes.append(self._describe_unknown(option.name))
                continue
            problem = _describe_misuse(option.name, action, option.values, counts[action.dest])
            if problem is not None:
                if len(option.values) > 1:
                    problem += self._line_hint
                mistakes.append(problem)
                continue
            # Printing the help would hide mistakes that precede --help.
            if action.dest == "help" and not mistakes:
                raise Printed(self.format_help().rstrip())
            if action.dest == "version" and not mistakes:
                raise Printed(self._version())
            arguments.append(Argument(option.name, action, "".join(option.values)))
        return arguments, mistakes

    def _list_missing(self, typed_options: Sequence[TypedOption]) -> Iterator[str]:
        """Yield an error line for each required option that is missing."""
        typed_actions = [option.action for option in typed_options]
        for action in self._actions:
            if action.required and action not in typed_actions:
                yield f"{action.option_strings[-1]}: needed, accepts {_find_kind(action).accepts}"

    def _store_settings(
        self,
        settings_class: type[Settings],
        arguments: Sequence[Argument],
        namespace: argparse.Namespace,
    ) -> Sequence[str]:
        """Store the settings in the namespace, or return a line for each mistake in them."""
        from vllm_headroom.config import Settings  # noqa: PLC0415 - see above
        from vllm_headroom_tools.sources import (  # noqa: PLC0415 - see above
            CONFIG,
            Entry,
            read_settings,
        )

        options = {
            argument.action.dest: Entry(argument.name, argument.text)
            for argument in arguments
            if argument.action in self._settings_actions
        }
        config = options.pop(CONFIG, None)
        settings = read_settings(settings_class, options, config)
        if not isinstance(settings, Settings):
            return settings
        namespace.settings = settings
        return ()


def _describe_misuse(
    name: str, action: argparse.Action, values: Sequence[str], count: int
) -> str | None:
    """Describe an error in the use of an option.

    Returns None if there is no error. `count` is how often the option has occurred so far. `values`
    are the words after it.
    """
    # An option that may be repeated has a list as its default.
    if count > 1 and not isinstance(action.default, list):
        return f"{name}: given {count} times, accepts one"
    if action.nargs == 0:
        return f"{name}: takes no value" if values else None
    if not values:
        return f"{name}: got nothing, accepts {_find_kind(action).accepts}"
    if len(values) > 1:
        return f"{name}: got {len(values)} words, accepts one: put a value with spaces in quotes"
    return None


def _store(argument: Argument, namespace: argparse.Namespace) -> Iterator[str]:
    """Store an option's value in the namespace; yield an error line if it is rejected."""
    action = argument.action
    if action.nargs == 0:
        setattr(namespace, action.dest, True)
        return
    kind = _find_kind(action)
    try:
        value = kind.read(argument.text)
    except ValueError as error:
        yield describe_refused(argument.name, argument.text, kind.accepts, error, kind.show)
        return
    if isinstance(action.default, list):
        # The option may be repeated. A new list is created, so that the default is not modified.
        value = [*getattr(namespace, action.dest), value]
    setattr(namespace, action.dest, value)


def _find_kind(action: argparse.Action) -> Value[Any]:
    """Return the kind of an option's value, which is text by default."""
    return action.type if isinstance(action.type, Value) else TEXT
