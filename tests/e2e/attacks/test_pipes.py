"""Pipes in the place of files of settings: reported in a line, where one waited forever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.command import OWN

RUN = (sys.executable, "-m", "vllm_headroom", "run", "--listen-port", "0")
DEADLINE_SECONDS = 60.0


def test_a_pipe_into_which_nobody_writes_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    options = ("--config", "--web-config-file", "--model-config")
    started = [
        subprocess.Popen([*RUN, option, str(pipe)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=OWN)
        for option in options
    ]
    for option, process in zip(options, started, strict=True):
        try:
            _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            process.kill()

        assert process.returncode == 2, option
        assert b"a pipe into which nobody writes for 5 s" in errors


def test_a_certificate_that_is_a_pipe_is_a_mistake_in_the_web_configuration(folder: Path) -> None:
    (folder / "server.crt").unlink()
    os.mkfifo(folder / "server.crt")
    done = subprocess.run(
        [*RUN, "--web-config-file", str(folder / "web.config.yml")],
        stderr=subprocess.PIPE,
        env=OWN,
        timeout=DEADLINE_SECONDS,
        check=False,
    )

    assert done.returncode == 2
    assert b"a pipe cannot be read again" in done.stderr


def test_settings_may_come_through_a_pipe_that_somebody_writes_into() -> None:
    taking, giving = os.pipe()
    os.write(giving, b"sample_interval_seconds: 7\n")
    os.close(giving)
    try:
        done = subprocess.run(
            [*RUN, "--config", f"/dev/fd/{taking}", "--print-config"],
            stdout=subprocess.PIPE,
            env=OWN,
            timeout=DEADLINE_SECONDS,
            check=True,
            pass_fds=(taking,),
        )
    finally:
        os.close(taking)

    assert b"sample_interval_seconds: 7.0" in done.stdout
