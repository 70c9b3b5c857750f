"""Breaks the program one place at a time, and prints which breaks no test of that place notices.

usage: python tests/mutants.py [--since REVISION] [--most N] [FILE OR FOLDER ...]

Without files it takes those of src that differ from REVISION. The tests of a file are the folder of tests/unit that has
most of its path, and the files of tests/unit that import it. They run on a copy of src, for at most ten times
as long as on the whole program.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

ROOT: Final = Path(__file__).parents[1]
UNIT: Final = ROOT / "tests" / "unit"
PAIRS: Final = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div),
)  # fmt: skip
SWAPS: Final[dict[type[ast.AST], type[ast.AST]]] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
OUTSIDE: Final = frozenset({"annotation", "returns", "decorator_list"})


def broken(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may replace a node."""
    if swap := SWAPS.get(type(node)):
        yield swap()
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.UnaryOp(op=ast.Not(), operand=only) | ast.Call(args=[only], keywords=[]):
            yield only
        case ast.IfExp(body=one, orelse=other):
            yield from (one, other)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass()


class Break(ast.NodeTransformer):
    """Breaks the place of this number, none where it is -1; `places` is how many it has met, and `line` where it is."""

    def __init__(self, number: int) -> None:
        self.places = self.line = self._last_line = 0
        self._number = number

    def visit(self, node: ast.AST) -> ast.AST:
        """Break what is executed: no annotation and no decorator."""
        self._last_line = line = getattr(node, "lineno", self._last_line)
        variants = list(broken(node))
        kept_fields = {name: vars(node).pop(name) for name in OUTSIDE & vars(node).keys()}
        node = self.generic_visit(node)
        vars(node).update(**kept_fields)
        for new in variants:
            if self.places == self._number:
                node, self.line = ast.copy_location(new, node), line
            self.places += 1
        return node


def changed_files(since: str, chosen: list[Path]) -> list[Path]:
    if not chosen:
        command = f"git diff --name-only --diff-filter=d {since} -- src".split()
        names = subprocess.check_output(command, cwd=ROOT, text=True)
        chosen = [ROOT / name for name in names.split()]
    files = (file for path in chosen for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path]))
    return [file.resolve() for file in files if file.suffix == ".py"]


def tests_of(file: Path) -> list[Path]:
    parts = file.relative_to(ROOT / "src").with_suffix("").parts
    sizes = range(len(parts), 1, -1)
    folders = (base.joinpath(*parts[1:size]) for size in sizes for base in (UNIT, UNIT / "commands"))
    folder = next((candidate for candidate in folders if candidate.is_dir()), None)
    name = ".".join(parts).removesuffix(".__init__")
    other_tests = [path for path in sorted(UNIT.rglob("test_*.py")) if folder not in path.parents]
    importers = [
        test_file for test_file in other_tests if f"from {name} import" in test_file.read_text(encoding="utf-8")
    ]
    return importers if folder is None else [folder, *importers]


def passes(tests: list[Path], source: Path, seconds: float | None = None) -> bool:
    """Return whether the tests pass on the program in a folder; they do not where they take too long."""
    options = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile=ci")
    environ = {**os.environ, "PYTHONPATH": str(source)}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL
    ) as process:
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            process.terminate()
            return False


def survivors(file: Path, source: Path, mutant_limit: int) -> tuple[int, int]:
    """Print what becomes of each mutant of a file; return how many survived, and of how many."""
    tests, copy, text = tests_of(file), source / file.relative_to(ROOT / "src"), file.read_text(encoding="utf-8")
    began = time.monotonic()
    if not tests or not passes(tests, source):
        sys.exit(f"{file}: no tests, or they fail as it is")
    seconds = 10 * (time.monotonic() - began)
    counter = Break(-1)
    lines = ast.unparse(counter.visit(ast.parse(text))).splitlines()
    numbers = sorted(Random(0).sample(range(counter.places), min(mutant_limit, counter.places)))  # noqa: S311 - always the same
    lived = 0
    for number in numbers:
        place = Break(number)
        copy.write_text(ast.unparse(place.visit(ast.parse(text))), encoding="utf-8")
        os.utime(copy, (number, number))  # else two that are written within a second may share what is compiled
        mutated = copy.read_text(encoding="utf-8").splitlines()
        line_before, line_after = next(
            (pair for pair in zip(lines, mutated, strict=False) if pair[0] != pair[1]), ("", "")
        )
        start = max(
            0, next((at for at, (a, b) in enumerate(zip(line_before, line_after, strict=False)) if a != b), 0) - 40
        )
        shown = " -> ".join(line_part[start : start + 80].strip() for line_part in (line_before, line_after))
        survives = passes(tests, source, seconds)
        lived += survives
        word = "SURVIVED" if survives else "killed"
        print(f"{word:8} {file.relative_to(ROOT)}:{place.line}: {shown}", flush=True)  # noqa: T201
    copy.write_text(text, encoding="utf-8")
    return lived, len(numbers)


def main() -> None:
    """Print a line for each mutant, and how many were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD", help="the revision that src is compared with")
    parser.add_argument("--most", type=int, default=40, help="mutants of a file, drawn at random and always the same")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__")))
        outcomes = [survivors(file, source, options.most) for file in changed_files(options.since, options.files)]
    lived, total = (sum(counts) for counts in zip((0, 0), *outcomes, strict=True))
    print(f"{total - lived} of {total} mutants killed, {lived} survived")  # noqa: T201


if __name__ == "__main__":
    main()
