"""What is there when a page's commands are typed: GPUs, a vLLM, traces; made up, and the same every time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.assets.console import ROOT
from tests.assets.terminal import COMMANDS, OWN, Scene
from tests.engine_logs import DEATH, VLLM_0_19
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.prometheus_server import PrometheusServer
from tests.fakes.streaming_server import StreamingServer
from tests.fakes.vllm_processes import serving
from tests.unit.commands.advise.traces import healthy, name_model, too_many_requests
from tests.unit.commands.check.engine_traces import MIB, engine
from tests.unit.commands.doctor.looking import Vllm as WatchedVllm
from tests.unit.commands.postmortem.scenes import leak, scene
from tests.unit.commands.replay.prometheus.history import add_dcgm, add_vllm
from tests.unit.commands.replay.traces import leaking
from tests.unit.commands.smoke.serving import Vllm as ServingVllm
from tests.unit.sizing.models import FOLDER as MODELS
from vllm_headroom.trace.entries import encode_line
from vllm_headroom.trace.flight import append_to_record, write_incident

ENGINE: Final = "127.0.0.1:8000"
HISTORY_MINUTES: Final = 6.5 * 60
HEADER: Final = {"headroom_trace": 1}


@contextmanager
def empty_folder(_folder: Path) -> Iterator[Scene]:
    """Nothing."""
    yield Scene()


@contextmanager
def checkout(folder: Path) -> Iterator[Scene]:
    """This repository, set up for `make run`."""
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "vllm-headroom"):
        (commands / name).symlink_to(Path(sys.executable).with_name(name))
    (folder / ".venv" / ".run").touch()
    yield Scene()


@contextmanager
def model(folder: Path) -> Iterator[Scene]:
    """The configuration of a model, without its weights."""
    (folder / "Llama-3.1-70B").mkdir()
    shutil.copy(MODELS / "llama-3.1-70b.json", folder / "Llama-3.1-70B" / "config.json")
    yield Scene()


@contextmanager
def busy_gpu(folder: Path) -> Iterator[Scene]:
    """A GPU on which somebody trains."""
    (folder / "train.py").write_text("import sys; sys.stdin.read()")
    command = ["python", "train.py"]
    with subprocess.Popen(command, cwd=folder, env=OWN | {"PATH": COMMANDS}, stdin=subprocess.PIPE) as training:
        gpu = _gpu(used_bytes=12 * GIB, processes={training.pid: 9 * GIB})
        yield Scene(environment=_nvml(folder, gpu).environment(), real={"(pid 31295)": f"(pid {training.pid})"})


@contextmanager
def freed_gpu(folder: Path) -> Iterator[Scene]:
    """A GPU that the driver takes back from a process that has ended, while somebody waits for it."""
    nvml = _nvml(folder, _gpu(used_bytes=73 * GIB))

    def free() -> None:
        nvml.gpus[0].used_bytes = 0
        nvml.write()

    yield Scene(environment=nvml.environment(), then=free)


@contextmanager
def beside_vllm(folder: Path) -> Iterator[Scene]:
    """A busy vLLM on the second of two GPUs. Its processes tell it from any other vLLM on this machine."""
    with WatchedVllm() as server, serving(folder, server.port) as core:
        gpu = _gpu(used_bytes=74 * GIB, processes={core: 74 * GIB})
        yield _beside(server.url, _nvml(folder, FakeGpu(uuid="GPU-9d24e5f0", used_bytes=30 * GIB), gpu))


@contextmanager
def started_vllm(folder: Path) -> Iterator[Scene]:
    """A vLLM that has just started."""
    with ServingVllm() as server:
        yield _beside(server.url, _nvml(folder, _gpu(used_bytes=74 * GIB)))


@contextmanager
def streaming_vllm(folder: Path) -> Iterator[Scene]:
    """A vLLM that streams its answers, a token in 4 ms."""
    traces = {"/dev/shm/load": str(folder / "load")}  # noqa: S108 - where a page puts it, not this test
    with StreamingServer(interval_seconds=0.004) as server:
        plain_scene = _beside(server.url, _nvml(folder, _gpu(used_bytes=74 * GIB)))
        yield Scene(environment=plain_scene.environment, real=plain_scene.real | traces)


@contextmanager
def leak_recorded(folder: Path) -> Iterator[Scene]:
    """The trace of an engine that leaks with each request."""
    _write(folder / "trace.jsonl", leaking(18))
    yield Scene()


@contextmanager
def history_in_prometheus(_folder: Path) -> Iterator[Scene]:
    """Six hours of a GPU by DCGM and of its vLLM by its own series."""
    with PrometheusServer() as server:
        add_dcgm(server, HISTORY_MINUTES, pod="vllm-0")
        add_vllm(server, HISTORY_MINUTES)
        yield Scene(real={"http://prometheus:9090": server.url})


@contextmanager
def two_versions_recorded(folder: Path) -> Iterator[Scene]:
    """The traces of two versions of vLLM under the same load, of which the newer leaks."""
    _write(folder / "pinned.jsonl", engine(4))
    _write(folder / "nightly.jsonl", engine(4, leak=12.8e6, held_bytes=71_000 * MIB))
    _write(folder / "hour.jsonl", engine(1, per_second=2.0))
    yield Scene()


@contextmanager
def crowd_recorded(folder: Path) -> Iterator[Scene]:
    """The trace of an engine that for an hour runs more requests than its KV cache holds."""
    _write(folder / "trace.jsonl", too_many_requests())
    yield Scene()


@contextmanager
def day_recorded(folder: Path) -> Iterator[Scene]:
    """The trace of a day in which Llama 3.1 8B ran at most 90 requests on an H100."""
    _write(folder / "trace.jsonl", name_model(healthy(24.1), capacity_tokens=442_000))
    yield Scene()


@contextmanager
def log_saved(folder: Path) -> Iterator[Scene]:
    """The log of a vLLM that ran out of memory while it served."""
    (folder / "vllm-0.log").write_text(VLLM_0_19 + DEATH, encoding="utf-8")
    yield Scene()


@contextmanager
def two_starts_logged(folder: Path) -> Iterator[Scene]:
    """The logs of two versions of vLLM with the same options, of which the newer takes more for its activations."""
    newer = VLLM_0_19.replace("0.19.0", "0.32.0").replace("increase: 1.96GiB", "increase: 2.96GiB")
    newer = newer.replace("memory: 37.28 GiB", "memory: 36.28 GiB").replace("size: 244,304", "size: 237,750")
    (folder / "vllm-0.19.log").write_text(VLLM_0_19, encoding="utf-8")
    (folder / "vllm-0.32.log").write_text(newer, encoding="utf-8")
    yield Scene()


@contextmanager
def incident_recorded(folder: Path) -> Iterator[Scene]:
    """The state directory of a daemon whose engine leaked until it ended."""
    incident = scene(leak, 3)
    assert incident.header is not None
    for sample in incident.samples:
        append_to_record(folder, encode_line(sample))
    write_incident(folder, incident.header["t"], incident.header | {"version": "0.1.0"})
    yield Scene(environment={"HEADROOM_STATE_DIR": str(folder)})


def _gpu(*, used_bytes: int, processes: dict[int, int | None] | None = None) -> FakeGpu:
    return FakeGpu(uuid="GPU-6f1c2b3a", used_bytes=used_bytes, processes=processes or {})


def _nvml(folder: Path, *gpus: FakeGpu) -> FakeNvml:
    return FakeNvml(folder, list(gpus))


def _beside(url: str, nvml: FakeNvml) -> Scene:
    return Scene(
        environment={"HEADROOM_ENGINE_URL": url, **nvml.environment()},
        real={ENGINE: url.removeprefix("http://").split("/", maxsplit=1)[0]},
    )


def _write(file: Path, samples: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(sample)}\n" for sample in (HEADER, *samples)), encoding="utf-8")


SCENES: Final[dict[str, Callable[[Path], AbstractContextManager[Scene]]]] = {
    scene_opener.__name__.replace("_", " "): scene_opener
    for scene_opener in (
        empty_folder,
        checkout,
        model,
        busy_gpu,
        freed_gpu,
        beside_vllm,
        started_vllm,
        streaming_vllm,
        leak_recorded,
        history_in_prometheus,
        two_versions_recorded,
        crowd_recorded,
        day_recorded,
        log_saved,
        two_starts_logged,
        incident_recorded,
    )
}
"""Every scene by its name in a page's comments."""
