"""The probe runs in vLLM's Python: an older syntax, and nothing but the standard library."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Final

import pytest

import vllm_headroom_probe

FILES: Final = sorted(Path(vllm_headroom_probe.__file__).parent.glob("*.py"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@each_file
def test_it_is_python_3_9(file: Path) -> None:
    tree = ast.parse(file.read_text(), feature_version=(3, 9))

    first_imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)][:1]
    assert [node.module for node in first_imports] == ["__future__"], "annotations are not evaluated"


@each_file
def test_it_imports_the_standard_library_and_itself(file: Path) -> None:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}

    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"vllm_headroom_probe"}
