"""A reader or a step that raises costs its own part of a tick, and nothing else."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Final

import pytest
from msgspec.structs import replace

from tests.logs import capture_logs
from tests.samples import probed, values
from tests.unit.daemon.test_sampler import Processes, Said, parsed
from vllm_headroom import catalog
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.canary import Canary
from vllm_headroom.daemon.engine_watch import SMALL_PAGE, Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive import tick as evaluation
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.model import EnginePage, Failure, LogReading, ProbedProcess, Sample
from vllm_headroom.vocabulary import Reason, Source

ERRORS: Final = (
    RecursionError("deep"),
    struct.error("ushort"),
    IndexError("range"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "start"),
    OverflowError("large"),
    KeyError("name"),
    ValueError("text"),
    OSError(5, "Input/output error"),
    AssertionError("never"),
    MemoryError(),
    ZeroDivisionError("zero"),
    RuntimeError("state"),
    ExceptionGroup("several", [IndexError("range"), ExceptionGroup("more", [KeyError("name")])]),
)
SOURCES_BY_READER: Final = {
    "engine": Source.ENGINE,
    "parse": Source.ENGINE,
    "parse a large page": Source.ENGINE,
    "gpus": Source.NVML,
    "processes": Source.PROCESS,
    "probe": Source.PROBE,
    "log": Source.LOG,
    "model": None,
}
STEPS: Final = ("classify_probe", "update_container", "attribute", "complete_page", "add_inside", "list_pools")


class Readers(Said):
    """All readers; the one with the name of `faulty` raises `error`, in its call or when it is awaited."""

    def __init__(self, error: BaseException, faulty: str = "", *, is_late: bool = True) -> None:
        super().__init__()
        self.error, self.faulty, self.is_late = error, faulty, is_late
        if faulty == "parse a large page":
            self.engine = "1" + " " * SMALL_PAGE

    def _answer(self, reader: str, answer: Callable[[], Any]) -> Any:
        def check() -> None:
            if self.faulty == reader:
                raise self.error

        async def wait() -> Any:
            check()
            return await answer()

        if not self.is_late:
            check()
        return wait()

    def fetch(self) -> Any:
        return self._answer("engine", super().fetch)

    def read(self, timeout_seconds: float) -> Any:
        return self._answer("gpus", lambda: super(Readers, self).read(timeout_seconds))

    def find_processes(self, timeout_seconds: float, page: EnginePage | Failure) -> Any:
        return self._answer("processes", lambda: Processes(self).read(timeout_seconds, page))

    def read_probe(self, _timeout_seconds: float) -> Any:
        async def read() -> tuple[ProbedProcess, ...]:
            return (replace(probed(), written_at_seconds=SystemClock().time()),)

        return self._answer("probe", read)

    def read_log(self, _timeout_seconds: float) -> Any:
        async def read() -> LogReading:
            return LogReading(start=None)

        return self._answer("log", read)

    def parse(self, text: str) -> EnginePage | Failure:
        if self.faulty.startswith("parse"):
            raise self.error
        return parsed(text)

    def find_model(self, _processes: object) -> None:
        if self.faulty == "model":
            raise self.error

    def build_sampler(self) -> Sampler:
        return Sampler(
            sources=Sources(
                engine=self,
                gpus=self,
                processes=self.find_processes,
                probe=self.read_probe,
                log=self.read_log,
                model=self.find_model,
            ),
            parse=self.parse,
            rules=TickRules(selection=Selection(everything=True), derivations=build_derivations()),
            clock=SystemClock(),
            gpu_timeout_seconds=2.0,
        )


def tick(sampler: Sampler) -> tuple[Sample, ...]:
    return asyncio.run(sampler.tick()).published.samples


def list_logged_errors(caplog: pytest.LogCaptureFixture) -> list[BaseException | None]:
    """Return the errors that were logged with a traceback."""
    return [record.exc_info[1] for record in caplog.records if record.exc_info]


def check_other_sources(samples: tuple[Sample, ...], source: Source | None, failures: float) -> None:
    """Check that the source alone failed, so many times, and that the others' series are there."""
    for checked_source in Source:
        assert values(samples, catalog.SOURCE_UP)[(str(checked_source),)] == float(checked_source is not source)
        count = values(samples, catalog.SOURCE_FAILURES)[(str(checked_source), str(Reason.UNEXPECTED))]
        assert count == (failures if checked_source is source else 0.0)
    assert bool(values(samples, catalog.ENGINE_RUNNING)) == (source is not Source.ENGINE)
    assert bool(values(samples, catalog.GPU_MEMORY_USED)) == (source is not Source.NVML)


@pytest.mark.parametrize("reader", SOURCES_BY_READER)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_reader_that_raises_fails_alone(reader: str, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    if (reader, type(error)) == ("parse a large page", OSError):
        pytest.skip("a thread that cannot be started is `unavailable`")
    readers = Readers(error, reader)
    source = SOURCES_BY_READER[reader]
    sampler = readers.build_sampler()
    tick(sampler)
    check_other_sources(tick(sampler), source, 2.0)
    readers.faulty = ""
    assert values(tick(sampler), catalog.ENGINE_RUNNING)

    assert list_logged_errors(caplog) == [error], "the traceback is logged once"


@pytest.mark.parametrize("reader", ["engine", "gpus", "processes", "probe", "log"])
def test_a_reader_may_raise_before_it_is_awaited(reader: str) -> None:
    sampler = Readers(IndexError("range"), reader, is_late=False).build_sampler()

    check_other_sources(tick(sampler), SOURCES_BY_READER[reader], 1.0)


def test_a_reader_that_answered_again_is_logged_again() -> None:
    readers = Readers(IndexError("range"), "gpus")
    sampler = readers.build_sampler()
    with capture_logs() as lines:
        for faulty in ("gpus", "gpus", "", "gpus"):
            readers.faulty = faulty
            tick(sampler)

    assert [line["event"] for line in lines].count("source raised, its series are absent") == 2


@pytest.mark.parametrize("reader", ["engine", "gpus", "processes", "probe", "log"])
def test_a_cancelled_tick_is_cancelled(reader: str) -> None:
    with pytest.raises(asyncio.CancelledError):
        tick(Readers(asyncio.CancelledError(), reader).build_sampler())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["recall", "report", "report_leaks", "canary"])
def test_a_step_beside_the_evaluation_that_raises_costs_no_series(
    step: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    async def recall(_: object) -> dict[str, Any]:
        raise error

    sampler = Readers(error).build_sampler()
    if step == "recall":
        sampler._recall = recall
    elif step == "canary":
        canary = Canary(fail, 60.0, SystemClock(), pause_seconds=60.0)  # type: ignore[arg-type]
        monkeypatch.setattr(canary, "note_tick", fail)
        sampler._canary = canary
    else:
        monkeypatch.setattr(sampler._transitions, step, fail)
    tick(sampler)
    check_other_sources(tick(sampler), None, 0.0)

    assert list_logged_errors(caplog) == [error], "the traceback is logged once"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_step_of_the_snapshot_that_raises_costs_its_part(
    step: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(evaluation, step, fail)
    sampler = Readers(error).build_sampler()
    with capture_logs() as lines:
        tick(sampler)
        samples = tick(sampler)

    source = {"classify_probe": Source.PROBE, "attribute": Source.NVML}.get(step)
    check_other_sources(samples, source, 2.0)
    assert [line["event"] for line in lines].count("derivation failed, its series are absent") == 1


@pytest.mark.parametrize("seconds", [9_300_000_000.0, 253_402_300_799.0, 1e15])
def test_a_clock_that_is_centuries_ahead_costs_no_tick(
    seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SystemClock, "time", lambda _: seconds)

    check_other_sources(tick(Readers(IndexError()).build_sampler()), None, 0.0)
    assert not list_logged_errors(caplog)
