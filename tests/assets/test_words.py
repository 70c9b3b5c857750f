"""What users read is plain technical English: the words that had to be read twice are gone, and stay away."""

from __future__ import annotations

import io
import re
import token
import tokenize
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]

WORDS: Final = {
    r"tells|told": "reports, shows, notifies",
    r"anew": "again, starts over",
    r"(say|says|said) of": "reports about",
    r"at the (least|most)": "at least, at most, at the earliest, lower bound",
    r"(stand|stands|stood|standing) (for|in)": "means, is, replaces",
    r"of (its|their) own": "separate, its own ...",
    r"(is|are) asked": "reads, queries, requests",
    r"life|lives|lived": "run (of an engine), restart, runs",
    r"for ever": "forever",
    r"mend|mends|mended|mending": "fix, recover",
    r"afresh": "again, from the start",
    r"in vain": "without success",
}
"""What is not written, as a pattern, and what is written instead; docs/glossary.md has the terms."""

READ_BY_USERS: Final = (
    "*.md",
    "docs/**/*.md",
    "docs/*.json",
    "alerts/*.md",
    "alerts/*.py",
    "alerts/*.yaml",
    "alerts/alertmanager/*.yml",
    "alerts/rules/*.yaml",
    "alerts/runbooks/*.md",
    "dashboards/*.md",
    "dashboards/*.py",
    "dashboards/source/*.py",
    "deploy/**/README.md",
    "deploy/compose/*.yml",
    "deploy/kubernetes/**/*.yaml",
    "deploy/otel/*.yaml",
    "deploy/systemd/*",
    ".github/**/*.yml",
    "src/**/*.py",
)
"""Of Python the strings and comments are read, of everything else the whole text; names in backticks are left out."""

_NAME: Final = re.compile(r"`[^`\n]+`")
_KEY: Final = re.compile(r"\"[a-z_]+\"")
"""A string of one word is a name, such as a key in a file of state."""
_FIELD: Final = re.compile(r"\{[^{}\n]*\}")
_BREAK: Final = re.compile(r"\s*\n\s*(?:# ?|> ?)?")
_WORD: Final = {pattern: re.compile(rf"(?<![-\w/.])(?:{pattern})(?![-\w/]|\.\w)", re.IGNORECASE) for pattern in WORDS}
_TEXTS: Final = {token.STRING, token.COMMENT, getattr(token, "FSTRING_MIDDLE", token.STRING)}

READ_BY_CONTRIBUTORS: Final = "tests/**/*.py"
"""Of these the docstrings and comments are read, without the names of cases and the texts that they compare."""

PATHS: Final = sorted({path for pattern in READ_BY_USERS for path in ROOT.glob(pattern) if path.is_file()})


def words_to_avoid(text: str) -> list[str]:
    """Return each word of the list in a text, with what is around it and what is written instead."""
    flat = _BREAK.sub(" ", _NAME.sub("`...`", text))
    return [
        f"...{flat[max(0, word_match.start() - 40) : word_match.end() + 20]}... : {WORDS[pattern]}"
        for pattern, word in _WORD.items()
        for word_match in word.finditer(flat)
    ]


def read_text(path: Path) -> str:
    """Return what a person reads in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        texts = [token.string for token in tokens if token.type in _TEXTS and not _KEY.fullmatch(token.string)]
        return "\n".join(_FIELD.sub("...", text) for text in texts)
    return text


def read_remarks(path: Path) -> str:
    """Return the docstrings and comments of a file of tests."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return "\n".join(
        lexed_token.string
        for lexed_token in tokens
        if lexed_token.type == token.COMMENT or lexed_token.string.startswith('"""')
    )


def test_a_text_for_users_has_none_of_the_words_that_had_to_be_read_twice() -> None:
    faults = {str(path.relative_to(ROOT)): words_to_avoid(read_text(path)) for path in PATHS}

    assert {name: words for name, words in faults.items() if words} == {}


def test_the_tests_explain_themselves_without_these_words_too() -> None:
    paths = [path for path in ROOT.glob(READ_BY_CONTRIBUTORS) if path != Path(__file__)]
    faults = {str(path.relative_to(ROOT)): words_to_avoid(read_remarks(path)) for path in paths}

    assert {name: words for name, words in faults.items() if words} == {}


def test_every_kind_of_text_is_there() -> None:
    assert [pattern for pattern in READ_BY_USERS if not any(ROOT.glob(pattern))] == []


@pytest.mark.parametrize(
    "text",
    [
        "The page tells it.",
        "in 4 h, 2 h at the\n    # least",
        "A life of the engine ended.",
        "it stands in\nfor the total",
        "Begun Anew.",
        "a name of its own",
        "It waits for\never.",
        "a restart mends it",
    ],
)
def test_a_word_to_avoid_is_found_also_over_the_end_of_a_line(text: str) -> None:
    assert words_to_avoid(text)


@pytest.mark.parametrize(
    "text", ["`told` and `life`", "group headroom-life", "derive/life/lives.py", "at least one", "lively"]
)
def test_a_name_is_no_word(text: str) -> None:
    assert words_to_avoid(text) == []


def test_of_code_only_texts_and_comments_are_read(tmp_path: Path) -> None:
    source = tmp_path / "some.py"
    source.write_text('told = f"it {anew} says", "life"  # a comment\n')

    assert words_to_avoid(read_text(source)) == []
