"""The pages for people: where what is, that their links lead somewhere and that the options they name exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from alerts.tests.walk import REMOVED
from tests.assets.alerts import unknown_alerts
from tests.assets.console import PAGES, ROOT
from vllm_headroom_tools.cli import COMMANDS

README: Final = ROOT / "README.md"
COMMAND_PAGES: Final = ROOT / "docs" / "commands"
DESIGN: Final = ROOT / "DESIGN.md"
LINKING: Final = (
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md", "SECURITY.md")),
    *(
        page
        for folder in ("alerts", "dashboards", "deploy", "tests/bench/leak")
        for page in sorted((ROOT / folder).rglob("*.md"))
    ),
)
MOST_LINES: Final = 150
"""Of the README, which is read before anything is decided; a longer text has a page in docs/."""
MOST_WORDS: Final = 200
"""Of a decision in DESIGN.md: context, decision, consequence. Longer ones are two decisions."""

OF_VLLM: Final = frozenset(
    {
        "--kv-cache-memory-bytes",
        "--limit-mm-per-prompt",
        "--max-logprobs",
        "--mm-processor-kwargs",
        "--no-enable-prefix-caching",
    }
)
WITHOUT_RULE: Final = {"HeadroomTest", *(alert for alert, *_ in REMOVED)}
"""What docs/paging.md sends, and alerts that are no more."""

OF_OTHERS: Final = frozenset({"--container", "--ctl", "--update-golden"})

_LINK: Final = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_DECISION: Final = re.compile(r"^### (\d+)\. .*\n((?:(?!#).*\n)*)", re.MULTILINE)
_TERM: Final = re.compile(r"^\| ([^|]+) \|(?! ---)", re.MULTILINE)
_ROW: Final = re.compile(r"^\| \[`(\w+)`\]\(docs/commands/(\w+)\.md\) \|", re.MULTILINE)
_FILE: Final = re.compile(r"`((?:src|tests|alerts|dashboards|deploy|docs)/[\w./-]+)`")
_HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE: Final = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")


def test_the_readme_is_read_to_its_end() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_a_decision_is_short_and_their_numbers_follow_each_other() -> None:
    decisions = _DECISION.findall(DESIGN.read_text(encoding="utf-8"))

    assert [int(number) for number, _ in decisions] == list(range(1, len(decisions) + 1))
    assert [number for number, text in decisions if len(text.split()) > MOST_WORDS] == []


def test_the_glossary_has_each_term_once_in_the_order_of_the_alphabet() -> None:
    terms = [
        term.strip("`").lower() for term in _TERM.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    ]

    assert terms[1:] == sorted(set(terms[1:]))


def test_each_command_has_its_page_and_its_row_in_the_readme() -> None:
    rows = _ROW.findall(README.read_text(encoding="utf-8"))

    assert rows == [(name, name) for name in COMMANDS]
    assert sorted(page.stem for page in COMMAND_PAGES.glob("*.md")) == sorted(COMMANDS)


def test_the_readme_leads_to_each_page() -> None:
    linked = {target for target, _ in _LINK.findall(README.read_text(encoding="utf-8"))}

    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_a_link_leads_somewhere(subtests: pytest.Subtests) -> None:
    for page in LINKING:
        with subtests.test(str(page.relative_to(ROOT))):
            for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
                target_file = page.parent / target if target else page

                assert target_file.exists(), target
                assert not anchor or anchor in _anchors(target_file), anchor


def test_a_page_names_files_that_there_are(subtests: pytest.Subtests) -> None:
    for page in LINKING:
        with subtests.test(str(page.relative_to(ROOT))):
            named = _FILE.findall(page.read_text(encoding="utf-8"))

            assert [name for name in named if not (ROOT / name.replace("ENGINE", "vllm")).exists()] == []


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """Return the options of each command, by its own help."""
    return {name: set(_OPTION.findall(_help(name))) for name in COMMANDS}


def _help(name: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", name, "--help"],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_a_page_names_alerts_that_there_are(subtests: pytest.Subtests) -> None:
    for page in LINKING:
        with subtests.test(str(page.relative_to(ROOT))):
            assert unknown_alerts(page.read_text(encoding="utf-8")) <= WITHOUT_RULE


def test_a_commands_page_names_options_that_it_has(options: dict[str, set[str]], subtests: pytest.Subtests) -> None:
    for name in COMMANDS:
        with subtests.test(name):
            text = (COMMAND_PAGES / f"{name}.md").read_text(encoding="utf-8")
            named = {option.replace("_", "-") for code in _CODE.findall(text) for option in _OPTION.findall(code)}

            assert named - OF_VLLM - OF_OTHERS <= set().union(*options.values())


def test_a_page_types_options_that_the_command_has(options: dict[str, set[str]], subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(str(page.relative_to(ROOT))):
            for name, option in _typed(page.read_text(encoding="utf-8")):
                assert option in options[name], f"{name} {option}"


def _typed(text: str) -> list[tuple[str, str]]:
    """Return each option that is typed behind a command, with the command's name."""
    lines = [line for code in _CODE.findall(text) for line in code.replace("\\\n", " ").splitlines()]
    commands = [re.search(r"vllm-headroom(?: ([a-z]+))?((?: [^|&#]*)?)", line) for line in lines]
    # Behind " -- " stands the command line of another program.
    return [
        (match[1] or "run", option)
        for match in commands
        if match
        for option in _OPTION.findall(re.split("`| -- ", match[2])[0])
    ]
