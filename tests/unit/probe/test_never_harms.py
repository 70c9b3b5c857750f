"""Whatever becomes of the probe and its folder, vLLM serves on: absence, and one line in each process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import eventually
from tests.unit.probe.running import INSIDE, SPOILING, Vllm, environment, vllm

MOUNTS = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
needs_mounts = pytest.mark.skipif(not MOUNTS, reason="unshare cannot make a mount namespace here")


def lines(running: Vllm) -> list[str]:
    """Return what the probe has said."""
    return [line for line in running.log.read_text().splitlines() if "headroom" in line]


def tells(running: Vllm, phrase: str, processes: int) -> list[str]:
    return eventually(
        lambda: matching if len(matching := [line for line in lines(running) if phrase in line]) >= processes else None,
        f"{phrase} in the log: {running.log.read_text()}",
    )


BEGINS = "begin __init__ _build_peaks _build_snapshots start search _watch_for_ooms"
"""What it takes for the thread to begin; each further name lets the thread come a step further before it raises."""


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("spared", "reported_text"),
    [
        ("", "it did not start, vLLM does"),
        (BEGINS, "SpoiledError"),
        (f"{BEGINS} _run _stop _mark_stopped", "stopped for good: SpoiledError"),
        (f"{BEGINS} _run _stop _mark_stopped _tick _read_document _read_identity", "stopped for good: SpoiledError"),
    ],
)
def test_a_probe_that_raises_wherever_it_can(
    site: Path, folder: Path, start: str, spared: str, reported_text: str
) -> None:
    path = f"{SPOILING}:{site}:{INSIDE}"
    with vllm(site, folder, "--start", start, PYTHONPATH=path, SPOILING_SPARES=spared) as running:
        eventually(
            lambda: reported_text in running.log.read_text(), f"{reported_text} in the log: {running.log.read_text()}"
        )

        assert running.serves()
        assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_there(site: Path, tmp_path: Path) -> None:
    with vllm(site, tmp_path / "nowhere") as running:
        stop_lines = tells(running, "stopped for good", 3)

        assert set(stop_lines) == {f"headroom probe: stopped for good: {tmp_path}/nowhere: No such file or directory"}
        assert running.serves()
        assert lines(running) == stop_lines


def test_a_folder_that_vanishes(site: Path, folder: Path) -> None:
    with vllm(site, folder) as running:
        running.reports_of("EngineCore", "VllmWorker-0")
        eventually(lambda: _removed(folder), "the folder is gone")
        tells(running, "No such file or directory", 3)

        assert running.serves()


def _removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)  # they write meanwhile
    return not folder.exists()


@needs_mounts
@pytest.mark.parametrize(
    ("options", "why"), [("size=4k", "No space left on device"), ("size=64k,ro", "Read-only file system")]
)
def test_a_folder_that_takes_no_more(site: Path, folder: Path, options: str, why: str) -> None:
    mount = f'mount -t tmpfs -o {options} probe {folder} && exec "$@"'
    with vllm(site, folder, command_prefix=("unshare", "-rm", "sh", "-c", mount, "sh")) as running:
        stop_lines = tells(running, why, 2)  # one process may have the one page of the full one to itself

        assert all(line.startswith(f"headroom probe: stopped for good: {folder}") for line in stop_lines)
        assert running.serves()
        folder_inside = Path(f"/proc/{running.process.pid}/root{folder}")
        assert not list(folder_inside.glob(".*")), "nothing unfinished is left"


def test_a_vllm_that_is_too_old_is_left_alone(site: Path, folder: Path) -> None:
    code = (
        "import vllm; vllm.__version__ = '0.8.5.post2'; from vllm.plugins import load_general_plugins as load; load();"
        "import threading; print(threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(site, folder), capture_output=True, text=True, check=True
    )

    assert done.stdout == "1\n"
    assert done.stderr == "headroom probe: idle, vLLM 0.8.5.post2 is older than 0.9\n"


def test_a_folder_for_snapshots_alone_is_too_little(site: Path, folder: Path) -> None:
    code = "from vllm.plugins import load_general_plugins as load; load()"
    environ = environment(site, None, HEADROOM_PROBE_SNAPSHOT=str(folder))
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)

    assert set(done.stderr.splitlines()) == {
        "headroom probe: idle, HEADROOM_PROBE_SNAPSHOT needs HEADROOM_PROBE_DIR too"
    }


def test_a_command_that_soon_ends_leaves_nothing(site: Path, folder: Path) -> None:
    code = "from vllm.plugins import load_general_plugins as load; load()"
    environ = environment(site, folder, FAKE_INTERVAL_SECONDS="5")
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=60)

    assert list(folder.iterdir()) == []
