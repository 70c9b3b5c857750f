"""A fact with some of its fields changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # what it is given is checked as the arguments of this
    from dataclasses import replace as changed
else:
    T = TypeVar("T")

    def changed(fact: T, **changes: Any) -> T:  # noqa: ANN401 - each field has its own type
        """Return what `dataclasses.replace` does of a class with slots, in half of its time.

        It makes every field anew, where this copies them: each reading of a GPU changes a track of 28.
        """
        made = object.__new__(type(fact))
        for name in fact.__slots__:
            object.__setattr__(made, name, getattr(fact, name))
        for name, value in changes.items():
            object.__setattr__(made, name, value)
        return made


__all__ = ["changed"]
