"""What an operator gave, before it is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

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
