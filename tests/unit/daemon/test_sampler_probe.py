"""The straight line with a probe inside the engine, and without one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from tests.logs import capture_logs
from tests.samples import failure, probed, snapshot, values
from tests.unit.daemon.test_sampler import Processes, Said, parsed
from vllm_headroom import catalog
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.daemon.transitions import FORGET_PROBES_SECONDS, MOST_LOGGED_PROBES, Transitions
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.model import AllocatorReading, Failure, ProbedProcess, ProbeReadings, Sample
from vllm_headroom.vocabulary import Source


@dataclass
class Folder:
    """A source that says what its field says."""

    files: tuple[ProbedProcess, ...] | Failure = field(default_factory=lambda: failure(Source.PROBE))

    async def read(self, timeout_seconds: float) -> tuple[ProbedProcess, ...] | Failure:
        assert timeout_seconds == 2.0
        return self.files


def sampler(probe: Folder | None) -> Sampler:
    sources, read = Said(), None if probe is None else probe.read
    return Sampler(
        sources=Sources(engine=sources, gpus=sources, processes=Processes(sources).read, probe=read),
        parse=parsed,
        rules=TickRules(selection=Selection(everything=True), derivations=build_derivations()),
        clock=SystemClock(),
        gpu_timeout_seconds=2.0,
    )


def ticked(subject: Sampler) -> tuple[Sample, ...]:
    asyncio.run(subject.tick())
    assert subject.published is not None
    return subject.published.samples


def now(**probe_fields: object) -> ProbedProcess:
    device = AllocatorReading(uuid="GPU-0", allocated_bytes=500, reserved_bytes=600)
    return replace(probed(devices=(device,), **probe_fields), written_at_seconds=time.time())


def test_what_a_worker_says_comes_to_its_gpu() -> None:
    subject = sampler(Folder((now(),)))
    samples = ticked(subject)

    assert subject.latest is not None
    assert not isinstance(subject.latest.snapshot.gpus, Failure)
    assert [gpu.inside and gpu.inside.allocated_bytes for gpu in subject.latest.snapshot.gpus] == [500, None]
    assert values(samples, catalog.SOURCE_UP)[("probe",)] == 1.0


def test_a_probe_that_cannot_be_read_costs_what_is_inside_alone() -> None:
    samples = ticked(sampler(Folder()))

    assert values(samples, catalog.SOURCE_UP) == {
        ("engine",): 1.0,
        ("nvml",): 1.0,
        ("process",): 1.0,
        ("probe",): 0.0,
    }
    assert values(samples, catalog.GPU_MEMORY_USED)


def test_without_a_folder_nothing_speaks_of_a_probe() -> None:
    samples = ticked(sampler(None))

    assert not [sample for sample in samples if "probe" in sample.labels]
    assert not [sample for sample in samples if sample.metric.name.startswith("headroom_allocator")]


def test_a_probe_that_gave_up_is_logged_once() -> None:
    subject = sampler(Folder((now(stopped="its reads took long"),)))

    with capture_logs() as lines:
        for _ in range(3):
            ticked(subject)

    assert [line["problem"] for line in lines if line["event"] == "a probe gave up"] == ["its reads took long"]


def test_files_that_are_of_other_processes_each_time_do_not_fill_the_log() -> None:
    folder = Folder()
    subject = sampler(folder)

    with capture_logs() as lines:
        for look in range(5):
            folder.files = tuple(now(pid=100 * look + number, stopped="it lies") for number in range(50))
            ticked(subject)

    assert len([line for line in lines if line["event"] == "a probe gave up"]) == MOST_LOGGED_PROBES


def test_probes_that_are_gone_are_forgotten_within_the_hour_and_later_ones_are_reported() -> None:
    subject = Transitions(Selection())
    lives = [
        tuple(now(pid=100 * run + number, stopped="slow") for number in range(MOST_LOGGED_PROBES)) for run in range(2)
    ]

    with capture_logs() as lines:
        for at, other_probes in ((1000.0, lives[0]), (1005.0, lives[1]), (1000.0 + FORGET_PROBES_SECONDS, lives[1])):
            subject.report(snapshot(at=at, probe=ProbeReadings(others=other_probes)))

    pids = [line["pid"] for line in lines if line["event"] == "a probe gave up"]
    assert pids == [probed_process.pid for run in lives for probed_process in run]
