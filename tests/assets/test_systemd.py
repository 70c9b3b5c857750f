"""The unit for bare metal is well-formed and stays hardened."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from vllm_headroom.config import Settings
from vllm_headroom.expose.server import MOST_CONNECTIONS

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT: Final = FOLDER / "vllm-headroom.service"
EXPOSURE: Final = 2.0
"""What `systemd-analyze security` may find, of 10: most is the network and the processes it is there to see."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on the PATH: install systemd"
)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Return the unit with a program that exists on this machine."""
    # Quoted, because the checkout may be in a folder with a blank in its name.
    program = f'ExecStart="{sys.executable}"'
    text, replaced = re.subn(r"^ExecStart=\S+", lambda _: program, UNIT.read_text(), flags=re.MULTILINE)
    assert replaced == 1
    path = tmp_path / UNIT.name
    path.write_text(text)
    return path


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    done = systemd_analyze("verify", str(unit))

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_the_unit_exposes_little(unit: Path) -> None:
    if int(systemd_analyze("--version").stdout.split()[1]) < 250:
        pytest.skip("this systemd-analyze cannot look at a unit that is not loaded: it is older than 250")
    done = systemd_analyze("security", "--offline=true", f"--threshold={EXPOSURE * 10:.0f}", "--no-pager", str(unit))

    assert done.returncode == 0, done.stdout


def systemd_analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False, timeout=60)


def test_the_unit_gives_every_connection_its_descriptor() -> None:
    (limit,) = re.findall(r"^LimitNOFILE=(\d+)$", UNIT.read_text(), re.MULTILINE)

    assert int(limit) >= 2 * MOST_CONNECTIONS, "half of it is for the engine, files and who waits for his handshake"


def test_the_example_names_settings_that_there_are() -> None:
    text = (FOLDER / "vllm-headroom.env").read_text() + UNIT.read_text()
    named = set(re.findall(r"HEADROOM_(\w+)=", text))

    assert len(named) > 3
    assert {name.lower() for name in named} <= set(Settings.model_fields)


def test_vllm_and_the_sidecar_share_the_probes_folder() -> None:
    drop_in = (FOLDER / "vllm-headroom-probe.conf").read_text()
    tmpfiles = (FOLDER / "vllm-headroom-probe.tmpfiles").read_text()
    (folder,) = re.findall(r"^Environment=HEADROOM_PROBE_DIR=(\S+)$", drop_in, re.MULTILINE)
    (path,) = re.findall(r"^Environment=PYTHONPATH=(\S+)$", drop_in, re.MULTILINE)

    assert f"#HEADROOM_PROBE_DIR={folder}\n" in (FOLDER / "vllm-headroom.env").read_text()
    assert re.findall(r"^d (\S+) 1777 ", tmpfiles, re.MULTILINE) == [folder]
    assert folder.startswith("/run/"), "which is in memory"
    readme = (FOLDER / "README.md").read_text()
    assert f"vllm-headroom probe install {path}\n" in readme
    assert {file.name for file in FOLDER.iterdir()} <= set(re.findall(r"[\w.-]+", readme)) | {"README.md"}


@needs_systemd
def test_systemd_accepts_the_drop_in(unit: Path) -> None:
    folder = unit.parent / f"{unit.name}.d"
    folder.mkdir()
    shutil.copy(FOLDER / "vllm-headroom-probe.conf", folder)
    done = systemd_analyze("verify", str(unit))

    assert (done.returncode, done.stdout + done.stderr) == (0, "")
