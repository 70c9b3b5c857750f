"""The sampler beside a load of a vLLM with the probe in it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, FakeGpu
from tests.fakes.nvml.reader import in_process
from tests.fakes.streaming_server import StreamingServer
from tests.unit.commands.load.asking import run
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.parts import Parts
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.scrape.probe import ProbeReader
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom_tools.cli import build_parser
from vllm_headroom_tools.load.command import COMMAND, read_order
from vllm_headroom_tools.load.sampling import Sampling, UnavailableSource, create_trace


def sampling(server: StreamingServer, trace: Path, folder: Path) -> Sampling:
    clock = SystemClock()
    parts = Parts(
        engine=PageReader(url=f"{server.url}/metrics", timeout_seconds=10),
        gpus=Nvml(monotonic=clock.monotonic),
        processes=UnavailableSource(Source.PROCESS, Reason.UNAVAILABLE).read,
        probe=ProbeReader(folder, parse=parse_probe).read,
        clock=clock,
    )
    return Sampling(parts=parts, selection=Selection(listed=("0",)), interval_seconds=0.01, trace=trace)


def test_what_the_probe_writes_is_recorded_and_that_it_says_nothing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "probe"
    create_trace(trace)
    folder.mkdir()
    device = {"uuid": "GPU-a", "allocated": 500, "reserved": 600, "inactive_split": 40}
    report = {"headroom_probe": 1, "pid": 7, "started_at": 1.0, "t": time.time(), "role": "worker", "devices": [device]}

    async def steps(server: StreamingServer) -> Sampling:
        load_sampling = sampling(server, trace, folder)
        await load_sampling.sample()
        (folder / "7-1.json").write_text(json.dumps(report))
        await load_sampling.sample()
        await load_sampling.close()
        return load_sampling

    with in_process(tmp_path, monkeypatch, [FakeGpu(uuid="GPU-a", used_bytes=GIB)]), StreamingServer() as server:
        finished_sampling = run(lambda: steps(server))

    (without,), (probed_gpu,) = (json.loads(line)["gpus"] for line in trace.read_text().splitlines()[1:])
    assert "allocated" not in without
    assert (probed_gpu["allocated"], probed_gpu["reserved_by_torch"], probed_gpu["parts"]["fragmented"]) == (
        500,
        600,
        40,
    )
    assert finished_sampling.overall.failures[Source.PROBE][0] == 1


def test_the_probes_folder_is_the_sidecars_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--engine-url", "http://127.0.0.1:8000", "--concurrency", "1"]
    monkeypatch.setenv("HEADROOM_PROBE_DIR", "/run/headroom-probe")

    assert read_order(build_parser(COMMAND, "load").read(words)).probe_dir == Path("/run/headroom-probe")
