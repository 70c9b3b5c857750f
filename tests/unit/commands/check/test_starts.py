"""Two starts are compared by their logs: parts may grow, and the KV cache shrink, by a share."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.command import read_data, run_command
from tests.engine_logs import DEATH, VLLM_0_19, begin

MORE = VLLM_0_19.replace("increase: 1.96GiB", "increase: 2.96GiB")
LESS = VLLM_0_19.replace("memory: 37.28 GiB", "memory: 30.28 GiB")
SLIGHTLY_MORE = VLLM_0_19.replace("increase: 1.96GiB", "increase: 1.98GiB")
LONGER = VLLM_0_19.replace("'max_model_len': 8192", "'max_model_len': 16384")
FAILED = begin("0.32.0") + "ValueError: No available memory for the cache blocks. Try increasing\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "older.log").write_text(VLLM_0_19)
    return tmp_path


def check(folder: Path, newer: str, *words: str) -> CompletedProcess[str]:
    (folder / "newer.log").write_text(newer)
    return run_command("check", "--log", str(folder / "older.log"), str(folder / "newer.log"), *words)


@pytest.mark.parametrize(
    ("newer", "status", "part"),
    [
        (VLLM_0_19, 0, None),
        (SLIGHTLY_MORE, 0, None),
        (MORE, 1, "activations"),
        (LESS, 1, "kv_cache"),
        (VLLM_0_19 + DEATH, 0, None),
        (FAILED, 1, "the start"),
        (LONGER, 2, None),
    ],
    ids=["same", "rounded", "more", "less", "died later", "failed", "other options"],
)
def test_a_part_may_grow_by_the_share(folder: Path, newer: str, status: int, part: str | None) -> None:
    process = check(folder, newer, "--max-growth-over-baseline", "5%", "--json")
    parts: list[dict[str, Any]] = read_data(process.stdout)["parts"]

    assert (process.returncode, process.stderr) == (status, "")
    assert [part["part"] for part in parts if part["verdict"] == "not_good"] == ([] if part is None else [part])


def test_without_a_limit_the_figures_are_shown(folder: Path) -> None:
    process = check(folder, MORE)

    assert process.returncode == 0
    assert "2.96 GiB, +51.02%" in process.stdout
    assert process.stdout.endswith("Compared 6 figures without a limit: 1 differ.\n")


def test_other_options_are_named_and_the_junit_file_is_written(folder: Path) -> None:
    process = check(folder, LONGER, "--max-growth-over-baseline", "5%", "--junit", str(folder / "report.xml"))

    assert "max_model_len differs: 8192, 16384" in process.stdout
    assert ET.parse(folder / "report.xml").getroot().get("errors") == "6"  # noqa: S314 - our own file


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--log", "a"), "--log: needs two files, got 1: --log OLDER NEWER"),
        (("a.jsonl",), "'a.jsonl': needs --trace before it, or --log before two logs"),
        (("--log", "-", "-"), "--log: both logs cannot be standard input"),
        (
            ("--log", "a", "b", "--max-restarts", "0"),
            "--max-restarts is about traces and cannot be given with --log",
        ),
        (("--log", "/none/a", "b"), "--log: /none/a: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], why: str) -> None:
    process = run_command("check", *words)

    assert (process.returncode, process.stderr) == (2, f"vllm-headroom check: {why}\n")
