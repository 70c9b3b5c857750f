import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from vllm_headroom.config.settings import Settings
from vllm_headroom.config.sources import key, option

OWN = {name: value for name, value in os.environ.items() if not name.startswith("HEADROOM_")}


def vllm_headroom(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", *argv],
        env=OWN | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("argv", [("--help",), ("-h",), ("run", "--help"), ("--listen-port", "x", "--help")])
def test_help_has_the_commands_and_every_setting(argv: tuple[str, ...]) -> None:
    process = vllm_headroom(*argv)

    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("Usage: vllm-headroom [run] [OPTION VALUE]...\n")
    assert "\n  demo      The daemon over a simulated engine and GPU, to look at.\n" in process.stdout
    assert all(f"\n  {option(name)} " in process.stdout for name in Settings.model_fields)
    assert max(map(len, process.stdout.splitlines())) <= 80


def test_the_demo_has_a_help_of_its_own() -> None:
    process = vllm_headroom("demo", "--help")

    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("Usage: vllm-headroom demo [OPTION VALUE]...\n")
    assert "Default: healthy. Accepts healthy, leak, burst, neighbour or restart.\n" in process.stdout


def test_version_is_that_of_the_distribution() -> None:
    process = vllm_headroom("--version")

    assert (process.returncode, process.stdout) == (0, f"vllm-headroom {metadata.version('vllm-headroom')}\n")


def test_print_config_shows_what_is_in_force_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "headroom.yaml"
    file.write_text("listen_port: 1\nengine_headers: {X-Key: hunter2}\n")

    process = vllm_headroom("--print-config", "--config", str(file), "--gpus=0,1", HEADROOM_LOG_LEVEL="debug")
    printed = yaml.safe_load(process.stdout)

    assert (process.returncode, process.stderr) == (0, "")
    assert list(printed) == list(map(key, Settings.model_fields))
    assert printed["listen_port"] == 1
    assert printed["gpus"] == ["0", "1"]
    assert printed["log_level"] == "debug"
    assert printed["engine_headers"] == {"X-Key": "***"}
    assert "hunter2" not in process.stdout


def test_bad_settings_end_with_status_2_and_a_line_for_each() -> None:
    process = vllm_headroom("--listen-port", "high", "--colour=blue", HEADROOM_GPUS="gpu0", HEADROOM_LOG_LEVEL="loud")

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines() == [
        "--colour: not a setting, see --help",
        "--listen-port: got 'high', accepts a port number from 0 to 65535",
        "HEADROOM_GPUS: got 'gpu0', accepts auto, all, or GPU indices or UUIDs separated by commas",
        "HEADROOM_LOG_LEVEL: got 'loud', accepts debug, info, warning or error",
    ]


def test_the_demo_tells_its_own_mistakes_with_the_others_and_takes_no_engine() -> None:
    process = vllm_headroom("demo", "--scenario=x", "--speed=0", "--engine-url=http://engine", "--listen-port=x")

    assert process.returncode == 2
    assert process.stderr.splitlines() == [
        "--engine-url: not a setting, see --help",
        "--scenario: got 'x', accepts healthy, leak, burst, neighbour or restart",
        "--speed: got '0', accepts a number above 0, at most 1000",
        "--listen-port: got 'x', accepts a port number from 0 to 65535",
    ]


def test_only_the_demo_knows_scenarios() -> None:
    assert vllm_headroom("--scenario=leak", "--print-config").returncode == 2
    assert yaml.safe_load(vllm_headroom("demo", "--scenario=leak", "--print-config").stdout)["scenario"] == "leak"


def test_an_unknown_command_is_told_the_known_ones() -> None:
    process = vllm_headroom("doctr")

    assert (process.returncode, process.stdout) == (2, "")
    known = "run, demo, doctor, plan, preflight, smoke, load, check, advise, replay"
    assert process.stderr == f"'doctr': not a command, accepts {known}\n"


def test_help_imports_nothing_of_the_daemon() -> None:
    code = "import sys; from vllm_headroom.__main__ import main; main(); print(*sys.modules, file=sys.stderr)"
    process = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True, env=OWN
    )

    assert not {"uvloop", "httpx", "uvicorn", "pynvml", "structlog"} & set(process.stderr.split())


LIVE = """
import asyncio, sys
from vllm_headroom.__main__ import _live
from vllm_headroom.config.settings import Settings
from vllm_headroom.config.sources import key, option
async def daemon():
    print(type(asyncio.get_running_loop()).__module__)
    {end}
sys.exit(_live(daemon(), Settings()))
"""


def live(end: str) -> subprocess.CompletedProcess[str]:
    code = LIVE.format(end=end)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=OWN
    )


def test_the_daemon_runs_on_uvloop_and_its_status_is_the_exit_status() -> None:
    process = live("return 3")

    assert (process.returncode, process.stdout, process.stderr) == (3, "uvloop\n", "")


def test_an_error_of_its_own_ends_the_process_with_its_traceback_and_status_1() -> None:
    process = live("raise RuntimeError('the sampler fell over')")

    assert process.returncode == 1
    assert process.stderr.startswith("Traceback (most recent call last):\n")
    assert process.stderr.endswith("\nRuntimeError: the sampler fell over\n")
