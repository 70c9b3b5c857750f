"""The daemon's process while it reads its settings, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.command import OWN


def test_the_daemon_stops_when_asked_while_its_settings_are_read(tmp_path: Path) -> None:
    file = tmp_path / "headroom.yaml"
    os.mkfifo(file)
    words = (sys.executable, "-m", "vllm_headroom", "run", "--config", str(file))
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=OWN) as process,
        file.open("w"),  # once the daemon reads it
    ):
        process.terminate()

        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0
