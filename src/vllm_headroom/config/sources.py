"""What each source of settings gives, before it is read, and how it spells them."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct, field

PREFIX: Final = "HEADROOM_"


class Given(Struct, frozen=True, kw_only=True):
    """One setting as its author wrote it; `name` is how and where, `value` text or, from YAML, a list or mapping."""

    setting: str
    name: str
    value: object


class Found(Struct, frozen=True, kw_only=True):
    """What one source gives, and its mistakes, one line each."""

    given: tuple[Given, ...] = ()
    mistakes: tuple[str, ...] = ()


def unknown(name: str, known: Iterable[str], what: str = "a setting") -> str:
    """Say that there is no such thing; its value is not shown, for it may be a secret under a wrong name."""
    spelt = {_plain(each): each for each in sorted(known)}
    meant = _plain(name.split(maxsplit=1)[0])
    containing = sorted((each for each in spelt if set(meant.split("_")) <= set(each.split("_"))), key=len)
    import difflib  # noqa: PLC0415 - only a mistake asks for it

    shortest = [each for each in containing if len(each) == len(containing[0])]
    closest = shortest or difflib.get_close_matches(meant, spelt, n=1)
    meant_names = " or ".join(spelt[each] for each in closest)
    return f"{name}: not {what}, " + (f"did you mean {meant_names}?" if closest else "see --help")


def _plain(name: str) -> str:
    return name.lower().lstrip("-").removeprefix(PREFIX.lower()).replace("-", "_")


CONFIG: Final = "config"
"""The option that is no setting: it names the file."""

SOURCES: Final = """\
Each is an option, an environment variable and a key of the YAML file:
  --sample-interval-seconds 5
  HEADROOM_SAMPLE_INTERVAL_SECONDS=5
  sample_interval_seconds: 5
The command line beats the environment, and the environment beats the file.
An empty environment variable counts as not set."""

SERVICE_VARIABLE: Final = re.compile(
    r"HEADROOM_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
SERVICE_PORT: Final = re.compile(r"HEADROOM_(?:\w+_)?PORT=(?:tcp|udp|sctp)://.*")
"""What Kubernetes puts into every container's environment for a Service named headroom or headroom-anything."""


def key(setting: str) -> str:
    """Return how the file spells a setting: pydantic has a `model_config` of its own, so ours is `model_config_`."""
    return setting.removesuffix("_")


def option(setting: str) -> str:
    """Return how the command line spells a setting."""
    return "--" + key(setting).replace("_", "-")


def variable(setting: str) -> str:
    """Return how the environment spells a setting."""
    return PREFIX + key(setting).upper()


def from_environment(environ: Mapping[str, str], settings: Collection[str]) -> Found:
    """Read the variables with our prefix; one that is empty counts as not set, as orchestrators' templates leave it."""
    known = {variable(setting): setting for setting in settings}
    ours = {name: environ[name] for name in sorted(environ) if name.startswith(PREFIX) and environ[name].strip()}
    return Found(
        given=tuple(
            Given(setting=known[name], name=name, value=value) for name, value in ours.items() if name in known
        ),
        mistakes=tuple(
            unknown(name, known)
            for name, value in ours.items()
            if not (name in known or SERVICE_VARIABLE.fullmatch(name) or SERVICE_PORT.fullmatch(f"{name}={value}"))
        ),
    )


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


def from_arguments(
    argv: Sequence[str], options: Mapping[str, argparse.Action], places: Sequence[argparse.Action]
) -> Found:
    """Read `--name value`, `--name=value` and, for `places`, words by themselves; `_` in a name counts as `-`."""
    typed, loose = _typed(argv, options, len(places))
    given: list[Given] = []
    mistakes: list[str] = []
    times = Counter(each.action.dest for each in typed if each.action is not None)
    for each in typed:
        problem = _problem(each, times, options)
        if problem is not None:
            mistakes.append(problem)
        elif each.action is not None and not (mistakes and each.action.dest in {"help", "version"}):
            value = True if each.action.nargs == 0 else each.values[0]
            given.append(Given(setting=each.action.dest, name=each.name, value=value))
    for place, word in zip(places, loose, strict=False):
        given.append(Given(setting=place.dest, name=str(place.metavar), value=word))
    mistakes += [f"{word!r}: not an option, see --help" for word in loose[len(places) :]]
    return Found(given=tuple(given), mistakes=tuple(dict.fromkeys(mistakes)))


def _typed(argv: Sequence[str], options: Mapping[str, argparse.Action], places: int) -> tuple[list[Typed], list[str]]:
    """Return the options in order, and the words that are no option's."""
    typed: list[Typed] = []
    loose: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if OPTION.match(word):
            spelt = name.replace("_", "-") if name.startswith("--") else name
            typed.append(Typed(name, options.get(spelt), [value] if equals else []))
        elif typed and (typed[-1].is_open or len(loose) == places):
            typed[-1].values.append(word)
        else:
            loose.append(word)
    return typed, loose


def _problem(typed: Typed, times: Counter[str], options: Mapping[str, argparse.Action]) -> str | None:
    name, action, values = typed.name, typed.action, typed.values
    if action is None:
        return unknown(name, options, "an option")
    if times[action.dest] > 1 and not isinstance(action.default, list):
        return f"{name}: given {times[action.dest]} times, accepts one"
    if action.nargs == 0:
        return f"{name}: takes no value" if values else None
    if len(values) > 1:
        return f"{name}: got {len(values)} words, accepts one: put a value with spaces in quotes"
    return None if values else f"{name}: got nothing, accepts {getattr(action.type, 'accepts', 'a text')}"
