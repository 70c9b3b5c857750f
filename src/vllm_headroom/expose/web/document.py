"""A YAML file as exporter-toolkit takes one: strictly."""

from __future__ import annotations

from collections.abc import Iterator
from errno import EFBIG
from os import strerror
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_headroom.text_file import file_bytes

if TYPE_CHECKING:
    import yaml


class WebConfigError(Exception):
    """A file that cannot be used; `lines` has one line per mistake."""

    def __init__(self, lines: list[str]) -> None:
        self.lines: Final = tuple(lines)
        super().__init__("\n".join(lines))


MOST_BYTES: Final = 2**20
"""A thousand users with their passwords take 100 kB; what has no end need not be held in memory."""


def yaml_text(path: Path) -> str:
    """Return what a file that people write holds; raises OSError, also for one that no person has written."""
    held = file_bytes(path, MOST_BYTES + 1)
    if len(held) > MOST_BYTES:
        raise OSError(EFBIG, strerror(EFBIG))
    return held.decode()


def read_document(path: Path) -> object:
    """Return what a YAML file holds. Raises WebConfigError, a key given twice included: one might open the door."""
    import yaml  # noqa: PLC0415 - for those who set a file: it takes 15 ms of the start, and 1 MiB

    try:
        text = yaml_text(path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except OSError as error:
        raise WebConfigError([f"it cannot be read ({error.strerror})"]) from None
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError):  # AttributeError: `!!timestamp x`
        raise WebConfigError(["it is not YAML"]) from None
    twice = [] if root is None else list(dict.fromkeys(_twice(root, set())))
    if twice:
        raise WebConfigError([f"{name}: given twice" for name in twice])
    return document


def _twice(node: yaml.Node, seen: set[int]) -> Iterator[str]:
    """Yield the keys that a mapping has more than once; what an alias shows again is looked at once."""
    if id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))
    pairs = [each if isinstance(each, tuple) else (None, each) for each in node.value]
    names = [key.value for key, _ in pairs if key is not None and isinstance(key.value, str)]
    yield from (name for name in names if names.count(name) > 1)
    for _, value in pairs:
        yield from _twice(value, seen)
