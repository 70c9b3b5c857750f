"""The engine's log: whether it can be read, and is an engine's."""

from __future__ import annotations

from tests.engine_logs import VLLM_0_19
from tests.samples import failure
from vllm_headroom.model import LogReading
from vllm_headroom.parse.log.reader import read_log
from vllm_headroom.vocabulary import Source
from vllm_headroom_tools.doctor.engine_log import FROM_LOG, check_log
from vllm_headroom_tools.doctor.fixes import Status


def test_each_state_of_the_log_has_its_check() -> None:
    (start,) = read_log([VLLM_0_19.encode()]).starts
    missing = check_log(failure(Source.LOG))

    assert check_log(None).state is Status.NOT_APPLICABLE
    assert (missing.state, missing.absent) == (Status.MISSING, FROM_LOG)
    assert missing.fixes
    assert check_log(LogReading(start=None)).state is Status.UNKNOWN
    assert check_log(LogReading(start=start)).text == "a start of vllm 0.19.0 of org/m, which serves"
