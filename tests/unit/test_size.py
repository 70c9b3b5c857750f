"""The source stays readable: no file is longer than 400 lines, and no function longer than one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import vllm_headroom
import vllm_headroom_probe
import vllm_headroom_tools

PACKAGES: Final = (vllm_headroom, vllm_headroom_tools, vllm_headroom_probe)
FILES: Final = sorted(file for each in PACKAGES for file in Path(str(each.__file__)).parent.rglob("*.py"))
ONE_PAGE: Final = Path(vllm_headroom.__file__).parent / "catalog.py"
"""The table of all metrics, whose worth is that it is one page: it grows by a metric, and has no code."""

FILE_LINES: Final = 400
FUNCTION_LINES: Final = 60


def functions(file: Path) -> list[tuple[str, int]]:
    """Return each function of a file and how many lines it has."""
    nodes = ast.walk(ast.parse(file.read_text()))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(f"{file}:{node.name}", (node.end_lineno or 0) - node.lineno + 1) for node in found]


def test_no_file_is_too_long() -> None:
    files = [file for file in FILES if file != ONE_PAGE]

    assert [file.name for file in files if len(file.read_text().splitlines()) > FILE_LINES] == []


def test_no_function_is_too_long() -> None:
    measured = [each for file in FILES for each in functions(file)]

    assert measured
    assert {name: lines for name, lines in measured if lines > FUNCTION_LINES} == {}
