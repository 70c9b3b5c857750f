"""The real command, before vLLM starts, over a C library as NVML."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command import read_data
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.vllm_processes import serving
from tests.process import eventually
from tests.unit.commands.doctor.looking import RECORDED

HIDDEN = ("HEADROOM_", "CUDA_", "LD_LIBRARY_PATH")
OWN = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")])


def preflight(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "preflight", *words],
        env=OWN | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def document(process: subprocess.CompletedProcess[str]) -> Any:
    assert process.stderr == ""
    return read_data(process.stdout)


def test_a_go_ends_with_status_0(nvml: FakeNvml) -> None:
    process = preflight(**nvml.environment())

    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines() == [
        "GPU 0 (GPU-a) NVIDIA H100 80GB HBM3: 79.41 GiB free of 79.41 GiB, vLLM requests 73.06 GiB",
        "GPU 1 (GPU-b) NVIDIA H100 80GB HBM3: 79.41 GiB free of 79.41 GiB, vLLM requests 73.06 GiB",
        "GO",
        "The highest --gpu-memory-utilization that would work now is 0.99.",
    ]


def test_no_go_ends_with_status_1_and_names_the_process(nvml: FakeNvml) -> None:
    nvml.gpus[1].used_bytes, nvml.gpus[1].processes = 30 * GIB, {os.getpid(): 30 * GIB}
    nvml.write()

    process = preflight("--json", **nvml.environment())
    report = document(process)

    assert process.returncode == 1
    assert report["highest_gpu_memory_utilization"] == 0.61
    assert report["gpus"][1]["free_bytes"] == 50 * GIB - nvml.gpus[1].reserved_bytes
    (process_on_it,) = report["gpus"][1]["processes"]
    assert process_on_it["pid"] == os.getpid()
    assert [(finding["kind"], finding["verdict"], finding["gpu"]) for finding in report["findings"]] == [
        ("memory", "not_good", 1)
    ]


def test_vllms_options_and_cudas_variable_choose_what_is_judged(nvml: FakeNvml) -> None:
    nvml.gpus[1].used_bytes = 30 * GIB
    nvml.write()
    environ = nvml.environment()

    assert preflight("--gpu-memory-utilization", "0.6", **environ).returncode == 0
    assert preflight("--bytes", "45GiB", **environ).returncode == 0
    assert preflight("--gpus", "0", **environ).returncode == 0
    assert preflight("--tensor-parallel-size=1", **environ).returncode == 0
    assert preflight("--tensor-parallel-size=2", **environ).returncode == 1
    assert preflight(CUDA_VISIBLE_DEVICES="0", **environ).returncode == 0
    assert preflight(CUDA_VISIBLE_DEVICES="1", **environ).returncode == 1
    assert preflight(HIP_VISIBLE_DEVICES="1", **environ).returncode == 1
    assert preflight(CUDA_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="1", **environ).returncode == 0
    assert preflight("--gpus=0", CUDA_VISIBLE_DEVICES="1", **environ).returncode == 0


def test_a_hung_driver_is_unknown_and_does_not_keep_the_command(nvml: FakeNvml) -> None:
    nvml.hangs = {"nvmlInitWithFlags": 600}
    nvml.write()

    began = time.monotonic()
    process = preflight(**nvml.environment())

    assert process.returncode == 2
    assert process.stdout.startswith("CANNOT TELL\n  NVML does not answer: ")
    assert time.monotonic() - began < 60


def test_a_signal_ends_it_while_it_waits(nvml: FakeNvml) -> None:
    nvml.gpus[0].used_bytes = 60 * GIB
    nvml.write()
    with subprocess.Popen(
        [sys.executable, "-m", "vllm_headroom", "preflight", "--wait", "1h"],
        env=OWN | nvml.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting, ")
        process.send_signal(signal.SIGINT)
        eventually(lambda: process.poll() is not None, "it ends")
        assert process.stderr.read() == ""

    assert process.returncode == -signal.SIGINT


A_SIZE = "accepts a size such as 72GiB, or a number of bytes from 1 MiB on"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--gpu-memory-utilization", "92"),
            "--gpu-memory-utilization: got '92' (did you mean 92%?), accepts a ratio above 0, at most 1",
        ),
        (("--bytes", "much"), f"--bytes: got 'much', {A_SIZE}"),
        (
            ("--bytes", "73"),
            f"--bytes: got '73' (without a unit it is bytes: 73GiB?), {A_SIZE}",
        ),
        (("--gpus", "gpu0"), "--gpus: got 'gpu0', accepts auto, all, or GPU indices or UUIDs separated by commas"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size: got '0', accepts a whole number from 1 to 64"),
        (("--wait", "soon"), "--wait: got 'soon', accepts a duration such as 120s or 2m"),
        (("--colour",), "--colour: not an option of preflight or of vLLM 0.19 to 0.33, see --help"),
    ],
)
def test_bad_options_end_with_status_2_and_one_line(words: tuple[str, ...], line: str) -> None:
    process = preflight(*words)

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"vllm-headroom preflight: {line}\n"


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_variable_that_names_no_gpu_is_bad_input(variable: str) -> None:
    process = preflight(**{variable: "NoDevFiles"})

    assert process.returncode == 2
    assert process.stderr == (
        f"vllm-headroom preflight: {variable}: got 'NoDevFiles', accepts GPU indices or UUIDs; --gpus takes its place\n"
    )


def test_a_vllm_that_sleeps_is_asked_whether_it_could_wake(nvml: FakeNvml, tmp_path: Path) -> None:
    sleeps = RECORDED.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
    with EngineServer(page(sleeps)) as server, serving(tmp_path, server.port) as core:
        nvml.gpus[1].used_bytes, nvml.gpus[1].processes = 12 * GIB, {core: 2 * GIB, os.getpid(): 10 * GIB}
        nvml.write()

        process = preflight("--engine-url", server.url, "--json", **nvml.environment())

    report = document(process)
    assert (process.returncode, [gpu["gpu"] for gpu in report["gpus"]]) == (1, [1])
    assert (
        "the engine sleeps and holds 2.00 GiB; to wake takes about 71.06 GiB, and only" in report["findings"][0]["text"]
    )
