"""The console blocks of a page: what is typed, what is shown, and whether the two agree.

A comment before a block says where it is run: `<!-- console: NAME -->` in the scene of that name (scenes.py), no
comment in an empty folder, and `<!-- console: not run, needs vLLM -->` nowhere. In what is shown, `...` represents
anything within a line, and alone on a line for any number of lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

NOT_RUN: Final = "not run, needs "
NEEDS: Final = frozenset({"a GPU", "a cluster", "a package index", "kind", "vLLM"})

_FENCE: Final = re.compile(
    r"^(?:<!-- console: (?P<scene>.+?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_STEP: Final = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command and what the page shows of its output, "" where it shows nothing."""

    command: str
    shown: str

    def agrees(self, output: str) -> bool:
        """Return whether the output is what is shown; where nothing is, it may be anything."""
        return not self.shown or re.fullmatch(_pattern(self.shown), _trimmed(output)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page; `scene` is None where no comment says one."""

    page: Path
    line: int
    language: str
    scene: str | None
    body: str

    @property
    def steps(self) -> tuple[Step, ...]:
        """What is typed, in order."""
        return tuple(
            Step(command=step_match["command"], shown=step_match["shown"]) for step_match in _STEP.finditer(self.body)
        )

    @property
    def needs(self) -> str | None:
        """What it needs that a test has not, or None where it is run."""
        return self.scene.removeprefix(NOT_RUN) if self.scene and self.scene.startswith(NOT_RUN) else None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    """Return every fenced block of every page."""
    return [block for page in PAGES for block in _blocks_of(page)]


def _blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, fence.start("language")) + 1,
            language=fence["language"],
            scene=fence["scene"],
            body=fence["body"],
        )
        for fence in _FENCE.finditer(text)
    ]


def show(block: Block, step: Step, output: str) -> None:
    """Write into the page that this is what the command says; of a command that is on it twice, the first is meant."""
    text = block.page.read_text(encoding="utf-8")
    typed = f"$ {step.command}\n"
    block.page.write_text(text.replace(typed + step.shown, typed + _trimmed(output), 1), encoding="utf-8")


def _trimmed(output: str) -> str:
    """Return the lines as a page has them: without blanks at their ends, each with its line feed."""
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def _pattern(shown: str) -> str:
    lines = (
        r"(?:.*\n)*" if line == "..." else r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n"
        for line in shown.splitlines()
    )
    return "".join(lines)
