"""The bar of a replay from Prometheus, on a real terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from tests.fakes.prometheus_server import PrometheusServer
from tests.unit.commands.replay.prometheus.history import BEGIN, add_dcgm, add_vllm
from tests.unit.commands.screen import on_a_terminal

READ: Final = """
import sys
from vllm_headroom_tools.cli import build_parser
from vllm_headroom_tools.replay.command import COMMAND
from vllm_headroom_tools.replay.prometheus.records import read_records
print(sum(1 for _ in read_records(build_parser(COMMAND, "replay").read(sys.argv[1:]))))
"""


@pytest.fixture
def words() -> Iterator[list[str]]:
    """Give the words that read ten hours, two pages."""
    with PrometheusServer() as server:
        add_dcgm(server, 600, every=60)
        add_vllm(server, 600, every=60)
        span = ["--start", str(BEGIN), "--end", str(BEGIN + 36_000)]
        yield [sys.executable, "-c", READ, "--from-prometheus", server.url, *span]


def test_a_terminal_gets_a_bar_that_goes_away_and_leaves_the_output_alone(words: list[str]) -> None:
    shown, status = on_a_terminal(words)

    assert status == 0
    assert "Reading history" in shown
    assert shown.endswith("\r\x1b[1A\x1b[2K601\r\n")


def test_a_file_gets_none(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, check=False, timeout=60)

    assert (done.stdout, done.stderr) == (b"601\n", b"")
