"""The sampler beside a load, and what it samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from tests.fakes.engine_server import EngineServer, hang
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.nvml.reader import in_process
from tests.fakes.streaming_server import LOOPBACK, StreamingServer
from tests.unit.commands.load.asking import asker, run, target, until
from vllm_headroom import catalog
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.parts import Parts
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.model import EnginePage, Sample
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.scrape.probe import ProbeReader
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import LeakState, Reason, Source
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import build_parser
from vllm_headroom_tools.load.clients import Clients
from vllm_headroom_tools.load.command import COMMAND, read_order
from vllm_headroom_tools.load.compose import _build_parts
from vllm_headroom_tools.load.run import LoadRun, Stage, count_streams
from vllm_headroom_tools.load.sampling import OTHER_MACHINE, LoadObservation, Sampling, UnavailableSource, create_trace


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    with in_process(tmp_path, monkeypatch, [FakeGpu(uuid="GPU-a", used_bytes=GIB)]) as fake:
        yield fake


def sampling(
    server: StreamingServer | EngineServer, trace: Path, *, here: bool = False, timeout_seconds: float = 10
) -> Sampling:
    clock = SystemClock()
    parts = Parts(
        engine=PageReader(url=f"{server.url}/metrics", timeout_seconds=timeout_seconds),
        gpus=Gpus(monotonic=clock.monotonic) if here else UnavailableSource(Source.NVML, Reason.NO_DEVICES),
        processes=UnavailableSource(Source.PROCESS, Reason.UNAVAILABLE).read,
        clock=clock,
    )
    return Sampling(parts=parts, selection=Selection(listed=("0",)), interval_seconds=0.01, trace=trace)


def records(trace: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in trace.read_text().splitlines()]


def test_every_sample_is_recorded_and_seen_by_the_step_it_falls_into(nvml: FakeNvml, tmp_path: Path) -> None:
    trace, first_load_observation, second = tmp_path / "trace", LoadObservation(), LoadObservation()
    create_trace(trace)

    async def steps(server: StreamingServer) -> Sampling:
        load_sampling = sampling(server, trace, here=True)
        await load_sampling.start_step(first_load_observation)
        nvml.gpus[0].used_bytes = 2 * GIB
        nvml.write()
        await load_sampling.start_step(second)
        await load_sampling.sample()
        await load_sampling.close()
        return load_sampling

    with StreamingServer() as server:
        finished_sampling = run(lambda: steps(server))

    assert (finished_sampling.overall.samples, len(records(trace))) == (3, 4)
    (overall_bytes,), (first_bytes,), (second_bytes,) = (
        finished_sampling.overall.gpu_bytes.values(),
        first_load_observation.gpu_bytes.values(),
        second.gpu_bytes.values(),
    )
    assert (overall_bytes.start, overall_bytes.newest) == (GIB, 2 * GIB)
    assert first_bytes.highest == GIB
    assert second_bytes.start == 2 * GIB
    assert second.find_engine_figure(catalog.ENGINE_RUNNING) is not None
    assert list(finished_sampling.overall.failures) == [Source.PROCESS]
    assert finished_sampling.detector.course("GPU-a").state is not LeakState.UNKNOWN


@pytest.mark.usefixtures("nvml")
def test_the_detector_is_run_once_for_each_sample(tmp_path: Path) -> None:
    step_samples: list[Sample] = []
    step, trace = Mock(add=lambda _, samples: step_samples.extend(samples)), tmp_path / "trace"
    create_trace(trace)

    async def steps(server: StreamingServer) -> Sampling:
        load_sampling = sampling(server, trace, here=True)
        await load_sampling.start_step(step)
        await load_sampling.close()
        return load_sampling

    with StreamingServer() as server:
        finished_sampling = run(lambda: steps(server))

    metrics = {sample.metric for sample in step_samples}
    assert finished_sampling.detector.course("GPU-a").state is not LeakState.UNKNOWN
    assert catalog.GPU_MEMORY_USED in metrics
    assert catalog.LEAK_STATE not in metrics


def test_another_machines_gpus_and_processes_are_not_taken_for_the_servers(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    create_trace(trace)

    async def steps(server: StreamingServer) -> Sampling:
        load_sampling = sampling(server, trace)
        await load_sampling.sample()
        await load_sampling.close()
        return load_sampling

    with StreamingServer() as server:
        finished_sampling = run(lambda: steps(server))

    sample = records(trace)[1]
    assert (sample["gpus"], sample["processes"]) == (None, None)
    assert sample["engines"]
    assert {
        source: (count, failure.message) for source, (count, failure) in finished_sampling.overall.failures.items()
    } == {
        Source.NVML: (1, OTHER_MACHINE),
        Source.PROCESS: (1, OTHER_MACHINE),
    }
    assert not finished_sampling.overall.gpu_bytes
    assert finished_sampling.overall.newest_snapshot is not None
    assert isinstance(finished_sampling.overall.newest_snapshot.engines, EnginePage)


@pytest.mark.parametrize(
    ("host", "words", "kinds"),
    [
        (LOOPBACK, (), (Gpus, Processes, type(None))),
        (LOOPBACK, ("--probe-dir", "probe"), (Gpus, Processes, ProbeReader)),
        ("192.0.2.1", ("--probe-dir", "probe"), (UnavailableSource, UnavailableSource, type(None))),
        ("192.0.2.1", ("--gpus", "0"), (Gpus, UnavailableSource, type(None))),
    ],
)
def test_what_is_read_follows_from_where_the_server_is(
    host: str, words: tuple[str, ...], kinds: tuple[type, type, type]
) -> None:
    async def steps() -> None:
        load_order = read_order(
            build_parser(COMMAND, "load").read(["--engine-url", f"http://{host}:8000", "--concurrency", "1", *words])
        )
        parts = _build_parts(load_order, replace(target(8000), address=(host, 8000)), SystemClock())

        readers = (parts.gpus, *(getattr(read, "__self__", None) for read in (parts.processes, parts.probe)))
        assert tuple(map(type, readers)) == kinds
        await parts.gpus.close()

    run(steps)


def test_a_trace_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    create_trace(trace)

    assert records(trace) == [{"headroom_trace": 1}]
    with pytest.raises(BadInput, match="is there already: name another file"):
        create_trace(trace)
    with pytest.raises(BadInput, match="is there already"):
        create_trace(tmp_path)


def test_the_largest_step_is_a_fifth_above_what_was_asked_for() -> None:
    assert [count_streams(concurrency) for concurrency in (1, 5, 10, 64, 10_000)] == [2, 6, 12, 77, 12_000]


def load(server: StreamingServer, trace: Path, *, stop_after: int | None = None) -> tuple[Stage, ...]:
    """Run the steps of ten clients, 0.2 s each; or an hour each, and stop when so many requests are being answered."""

    async def steps() -> tuple[Stage, ...]:
        load_sampling, asking = sampling(server, trace), asker(server)
        clients = Clients(sender=asking, grace_seconds=60, most_requests=None, requests_per_second=None)
        steps = LoadRun(
            concurrency=10,
            seconds=0.2 if stop_after is None else 3600,
            clients=clients,
            sampling=load_sampling,
        )
        running = asyncio.create_task(steps.run_steps())
        if stop_after is not None:
            await until(lambda: server.open == stop_after)
            clients.stop()
        done = await running
        await asking.close()
        await load_sampling.close()
        return done

    create_trace(trace)
    return run(steps)


def test_each_request_counts_in_the_step_in_which_it_began(tmp_path: Path) -> None:
    with StreamingServer(interval_seconds=0.05) as server:
        steps = load(server, tmp_path / "trace")

        assert sum(step.tally.started_requests for step in steps) == server.finished
        assert sum(step.tally.end_to_end_seconds.counts.total() for step in steps) == server.finished
    assert [(step.share, step.clients) for step in steps] == [(0.5, 5), (0.75, 8), (1.0, 10), (1.2, 12)]
    assert all(step.tally.open_requests == 0 and step.tally.started_requests >= 1 for step in steps)
    assert [step.observation.count_growth(catalog.ENGINE_FINISHED) for step in steps] == [
        step.tally.started_requests for step in steps
    ]


def test_a_stop_ends_the_step_and_the_load(tmp_path: Path) -> None:
    with StreamingServer(least_open=6) as server:
        (step,) = load(server, tmp_path / "trace", stop_after=5)

    assert step.tally.started_requests == step.tally.outcomes.total() == 5


def test_a_stop_does_not_wait_for_a_page_that_does_not_come(tmp_path: Path) -> None:
    async def steps(silent: EngineServer) -> tuple[Stage, ...]:
        load_sampling, asking = sampling(silent, tmp_path / "trace", timeout_seconds=3600), asker(silent.port)
        clients = Clients(sender=asking, grace_seconds=60, most_requests=None, requests_per_second=None)
        running = asyncio.create_task(
            LoadRun(concurrency=1, seconds=3600, clients=clients, sampling=load_sampling).run_steps()
        )
        await until(lambda: bool(silent.requests))
        clients.stop()
        done = await running
        await asking.close()
        await load_sampling.close()
        return done

    create_trace(tmp_path / "trace")
    with EngineServer(hang) as silent:
        (step,) = run(lambda: steps(silent))

    assert step.tally.started_requests == 0
