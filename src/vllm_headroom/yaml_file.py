"""A YAML file that people write: a key given twice is found, and a value can stay the text that was written."""

from collections.abc import Iterator
from errno import EFBIG
from os import strerror
from pathlib import Path
from typing import Final

import yaml

from vllm_headroom.text_file import read_file

MOST_BYTES: Final = 2**20
"""A thousand users with their passwords take 100 kB; what has no end need not be held in memory."""

NULL: Final = "tag:yaml.org,2002:null"


class WithoutAliases(yaml.parser.Parser, yaml.composer.Composer):
    """Refuses aliases: a few, nested, make gigabytes of 400 bytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node, as the base class does."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                problem="an alias is not read here, write its value out", problem_mark=mark
            )
        return super().compose_node(parent, index)


class PlainLoader(WithoutAliases, yaml.SafeLoader):
    """Reads values as YAML means them."""


class TextLoader(WithoutAliases, yaml.BaseLoader):
    """Keeps every value but null as the text it is: `yes` is no number, and 1:30 is not 90."""


_null_words = next(
    each for tag, each in yaml.SafeLoader.yaml_implicit_resolvers["~"] if tag == NULL
)
TextLoader.add_implicit_resolver(NULL, _null_words, ["~", "n", "N", ""])
TextLoader.add_constructor(NULL, lambda *_: None)


class NotYamlError(ValueError):
    """What is not YAML; `place` is the line, where it is known, and `problem` what is wrong there."""

    def __init__(self, place: str, problem: str) -> None:
        self.place: Final = place
        self.problem: Final = problem
        super().__init__(problem)


def read_yaml(path: Path, *, as_text: bool = False) -> tuple[object, tuple[str, ...]]:
    """Return what the file holds and the keys that one of its mappings has twice; raises OSError and NotYamlError."""
    held = read_file(path, MOST_BYTES + 1)
    if len(held) > MOST_BYTES:
        raise OSError(EFBIG, strerror(EFBIG))
    return parse_yaml(held, as_text=as_text)


def parse_yaml(held: bytes, *, as_text: bool = False) -> tuple[object, tuple[str, ...]]:
    """Return what YAML in UTF-8 says and the keys that one of its mappings has twice; raises NotYamlError."""
    try:
        loader = (TextLoader if as_text else PlainLoader)(held.decode())
        root = loader.get_single_node()
        document = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise NotYamlError(place, str(error.problem)) from None
    except RecursionError:
        raise NotYamlError("", "nested too deep") from None
    except (ValueError, AttributeError, yaml.YAMLError):  # AttributeError: `!!timestamp x`
        raise NotYamlError("", "it is no text in UTF-8") from None
    return document, tuple(dict.fromkeys(_find_repeated(root)))


def _find_repeated(node: yaml.Node | None) -> Iterator[str]:
    """Yield the keys that a mapping has more than once."""
    if node is None or isinstance(node.value, str):
        return
    pairs = [each if isinstance(each, tuple) else (None, each) for each in node.value]
    names = [key.value for key, _ in pairs if key is not None and isinstance(key.value, str)]
    yield from (name for name in names if names.count(name) > 1)
    for _, value in pairs:
        yield from _find_repeated(value)
