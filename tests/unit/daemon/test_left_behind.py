"""What an engine left behind is reported where it stays, and not of what ends by itself within seconds."""

from __future__ import annotations

from typing import Final

from tests.logs import capture_logs
from tests.unit.daemon.test_sampler import Said, ticked
from tests.unit.daemon.test_sampler_life import readings, sampler
from tests.unit.derive.life.watch import WHOLE
from vllm_headroom.clock import SystemClock
from vllm_headroom.derive.verdicts import judge_snapshot
from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import Reason, Source

LEFT_BEHIND: Final = "Pid 10 is left behind by an engine that has ended: end it with kill 10, or kill -9 10."


class Later(SystemClock):
    """Runs so many seconds ahead."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


def test_what_an_engine_left_behind_and_stays_is_reported_once_and_on_the_page_where_no_gpu_can_be_read() -> None:
    failed = Failure(source=Source.NVML, reason=Reason.LIBRARY_MISSING, message="no NVML")
    sources, clock = Said(processes=readings(), gpus=failed), Later()
    subject = sampler(sources, clock=clock)
    none, one_pid = frozenset[int](), frozenset({10})
    with capture_logs() as lines:
        for ahead, orphans in (
            (0, none),
            (0, one_pid),
            (20, one_pid),
            (25, none),
            (40, one_pid),
            (60, one_pid),
            (70, one_pid),
            (75, one_pid),
            (80, none),
        ):
            clock.ahead, sources.processes = ahead, readings(engine=() if orphans else WHOLE, orphans=orphans)
            ticked(subject)
            assert subject.latest is not None
            sentences = [verdict.sentence for verdict in judge_snapshot(subject.latest.snapshot, subject.latest.values)]
            assert (LEFT_BEHIND in sentences) is (ahead in (70, 75)), "half a minute after it was first seen so"

    problems = [line["problem"] for line in lines if line["event"] == "an engine that exited left processes behind"]
    assert problems == ["pid 10 is left behind by an engine that has ended: end it with kill 10, or kill -9 10"]
