"""Reads the command line's words as options: argparse, which declares them, would stop at the first mistake."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct, field

from vllm_headroom.config.sources import Found, Given, unknown

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
