"""Read YAML written by people: report repeated keys, and optionally keep values as text."""

from collections import Counter
from collections.abc import Iterator
from errno import EFBIG
from os import strerror
from pathlib import Path
from typing import Final, NamedTuple

import yaml

from vllm_headroom.text_file import read_file

MAX_FILE_BYTES: Final = 2**20
"""The largest file that is read. A thousand users with their passwords take 100 kB. A file such as
/dev/zero never ends.
"""

MOST_ENTRIES: Final = 10_000
"""A file with more lines and commas than this is not read. Parsing this many takes two seconds. A
file with a thousand users has a thousand lines.
"""

NULL_TAG: Final = "tag:yaml.org,2002:null"


class AliasRefuser(yaml.parser.Parser, yaml.composer.Composer):
    """Refuses aliases, because a few nested ones can expand 400 bytes to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node, or None after the last one.

        Raises an error for an alias.
        """
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                problem="an alias is not read here, write its value out", problem_mark=mark
            )
        return super().compose_node(parent, index)


class PlainLoader(AliasRefuser, yaml.SafeLoader):
    """Gives values the types that YAML assigns to them."""


class TextLoader(AliasRefuser, yaml.BaseLoader):
    """Keeps all values except null as text.

    `yes` is not read as true, nor `1:30` as 90.
    """


# PyYAML's pattern for null. The patterns are listed by the first character of a value. `~` always
# means null.
NULL_PATTERN: Final = next(
    pattern for tag, pattern in yaml.SafeLoader.yaml_implicit_resolvers["~"] if tag == NULL_TAG
)
TextLoader.add_implicit_resolver(NULL_TAG, NULL_PATTERN, ["~", "n", "N", ""])
TextLoader.add_constructor(NULL_TAG, lambda *_: None)


class YamlDocument(NamedTuple):
    """The result of parsing YAML."""

    document: object
    """The content of the document, or None for empty text."""
    repeated_keys: tuple[str, ...]
    """The keys that occur more than once in a mapping of the document."""


class NotYamlError(ValueError):
    """A text is not YAML, or contains an alias.

    `place` names the line, and is empty if the line is unknown.
    """

    def __init__(self, place: str, problem: str) -> None:
        self.place: Final = place
        self.problem: Final = problem
        super().__init__(problem)


def read_yaml(path: Path, *, as_text: bool = False) -> YamlDocument:
    """Read a YAML file as described in `parse_yaml`.

    Raises OSError if the file cannot be read or is too large. Raises NotYamlError if it is not
    valid.
    """
    content = read_file(path, MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(EFBIG, strerror(EFBIG))
    if content.count(b"\n") + content.count(b",") > MOST_ENTRIES:
        raise NotYamlError("", f"more than {MOST_ENTRIES} lines and commas are not read")
    return parse_yaml(content, as_text=as_text)


def parse_yaml(content: bytes, *, as_text: bool = False) -> YamlDocument:
    """Parse YAML in UTF-8; with `as_text`, every value except null remains text.

    Raises NotYamlError in three cases:

    - The text is not YAML in UTF-8.
    - The text contains an alias.
    - The text is nested too deeply.
    """
    loader_class = TextLoader if as_text else PlainLoader
    try:
        # Repeated keys can only be found in the nodes. The document no longer contains them.
        loader = loader_class(content.decode())
        root = loader.get_single_node()
        document = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise NotYamlError(place, str(error.problem)) from None
    except RecursionError:
        raise NotYamlError("", "nested too deep") from None
    except (ValueError, AttributeError, yaml.YAMLError):  # `!!timestamp x` raises AttributeError.
        raise NotYamlError("", "it is no text in UTF-8") from None
    repeated_keys = dict.fromkeys(_find_repeated_keys(root))
    return YamlDocument(document=document, repeated_keys=tuple(repeated_keys))


def _find_repeated_keys(node: yaml.Node | None) -> Iterator[str]:
    """Yield every occurrence of each key that occurs more than once in its mapping."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        counts = Counter(keys)
        for key in keys:
            if counts[key] > 1:
                yield key
        for _, value in node.value:
            yield from _find_repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _find_repeated_keys(item)
