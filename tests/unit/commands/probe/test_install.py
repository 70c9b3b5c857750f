"""What `probe install` leaves is what vLLM finds."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.command import read_data, run_command, run_process
from vllm_headroom_tools.probe.install import ENTRY_POINTS, install

GROUP: Final = "all(group='vllm.general_plugins')"
REPOSITORY: Final = Path(__file__).parents[4]
PROJECT: Final = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def test_a_python_with_the_folder_on_its_path_finds_the_entry_point(tmp_path: Path) -> None:
    install(tmp_path)
    code = (
        f"from importlib.metadata import entry_points as all; print([(p.name, p.load().__module__) for p in {GROUP}])"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert out == "[('headroom_probe', 'vllm_headroom_probe')]\n"


def test_the_entry_point_is_the_one_of_the_distribution() -> None:
    ((name, value),) = PROJECT["project"]["entry-points"]["vllm.general_plugins"].items()

    assert f"[vllm.general_plugins]\n{name} = {value}\n" == ENTRY_POINTS
    assert "src/vllm_headroom_probe" in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_an_older_probe_is_replaced_and_what_else_is_there_stays(tmp_path: Path) -> None:
    old = tmp_path / "vllm_headroom_probe-0.0.1.dist-info"
    old.mkdir()
    (tmp_path / "vllm_headroom_probe").mkdir()
    (tmp_path / "vllm_headroom_probe" / "gone.py").touch()
    (tmp_path / "another.py").touch()

    first_files, second = install(tmp_path), install(tmp_path)

    assert first_files == second
    assert {path.name for path in tmp_path.iterdir()} == {*first_files, "another.py"}
    assert not (tmp_path / "vllm_headroom_probe" / "gone.py").exists()


def test_everybody_may_read_it(tmp_path: Path) -> None:
    previous_umask = os.umask(0o077)
    try:
        install(tmp_path / "site")
    finally:
        os.umask(previous_umask)

    installed = [tmp_path / "site", *(tmp_path / "site").rglob("*")]
    assert len(installed) > 5
    assert {path.stat().st_mode & 0o777 for path in installed} == {0o755, 0o644}


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site").chmod(0o750)  # whatever the umask is
    install(tmp_path / "site")

    assert (tmp_path / "site").stat().st_mode & 0o777 == 0o750


def test_the_command_says_what_to_set(tmp_path: Path) -> None:
    process = run_process("probe", "install", os.path.relpath(tmp_path))
    printed = run_command("probe", "install", "--json", str(tmp_path))

    assert (process.returncode, process.stderr) == (0, "")
    (line,) = (line for line in process.stdout.splitlines() if "PYTHONPATH" in line)
    path = line.removeprefix("  PYTHONPATH=")
    assert path.startswith("/"), "vLLM is started elsewhere"
    assert os.path.samefile(path, tmp_path)  # noqa: PTH121 - of two texts
    assert read_data(printed.stdout)["folder"] == str(tmp_path)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("install", "/proc/here"), "vllm-headroom probe: /proc/here: No such file or directory"),
        (("install",), "vllm-headroom probe: needs one of: install FOLDER, record --for DURATION, snapshot [FILE]"),
        ((), "vllm-headroom probe: needs one of: install FOLDER, record --for DURATION, snapshot [FILE]"),
        (("remove", "x"), "vllm-headroom probe: ACTION: got 'remove', accepts install, record or snapshot"),
    ],
)
def test_what_cannot_be_done_is_reported(words: tuple[str, ...], why: str) -> None:
    done = run_command("probe", *words)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == why
