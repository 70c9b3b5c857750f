"""What differs between two manifests, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Leaves = dict[tuple[str, ...], Any]


def leaves(value: Any) -> Leaves:
    """Return every leaf by the way to it; in lists, where there are names, by name."""
    return dict(_leaves(value, ()))


def differences(old_document: Any, new_document: Any) -> dict[tuple[str, ...], tuple[Any, Any]]:
    """Return what each way leads to before and after where that is not the same; None where it leads nowhere."""
    old, new = leaves(old_document), leaves(new_document)
    return {way: (old.get(way), new.get(way)) for way in old.keys() | new.keys() if old.get(way) != new.get(way)}


def _leaves(value: Any, way: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*way, key))
    elif isinstance(value, list) and value:
        for position, inner in enumerate(value):
            name = inner.get("name", str(position)) if isinstance(inner, dict) else str(position)
            yield from _leaves(inner, (*way, name))
    else:
        yield way, value
