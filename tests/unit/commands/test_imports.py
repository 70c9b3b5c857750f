"""A process imports only what it needs, which is most of the time that a short command takes."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from tests.command import OWN

NOTHING: Final = '{"headroom_trace": 1}\n'
DAEMON: Final = frozenset({"uvloop", "httpx", "uvicorn", "pynvml"})


@pytest.mark.parametrize(
    ("name", "words", "absent"),
    [
        ("check", ["--trace", "-", "--max-leak-per-thousand-requests", "1MB"], DAEMON | {"pydantic"}),
        ("advise", ["-"], DAEMON | {"rich"}),
        ("replay", ["-"], DAEMON | {"pydantic"}),
        ("replay", ["-", "--json"], DAEMON | {"pydantic"}),
    ],
)
def test_a_command_over_a_trace_imports_nothing_of_the_daemon(name: str, words: list[str], absent: set[str]) -> None:
    code = (
        f"import sys; from vllm_headroom_tools import cli; from vllm_headroom_tools.{name}.command import COMMAND;"
        f" cli.execute(COMMAND, {name!r}, sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *words], input=NOTHING, capture_output=True, text=True, check=True, env=OWN
    )

    assert not absent & set(process.stderr.split())


def test_the_daemon_imports_neither_yaml_nor_the_doctor() -> None:
    code = "import sys, vllm_headroom.__main__, vllm_headroom.config, vllm_headroom.daemon.app; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=OWN)

    assert not {"yaml", "vllm_headroom_tools.doctor"} & set(imported.stdout.split())
