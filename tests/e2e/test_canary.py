"""The real daemon, with and without a canary, beside an idle vLLM whose core is stopped."""

from __future__ import annotations

import os
import signal

from tests.e2e.life import Start, becomes, last_look, settings, state
from tests.fakes.nvml.library import FakeNvml
from tests.process import daemon


def test_an_idle_core_that_is_stopped_is_stalled_where_a_canary_asks_it(
    start: Start, nvml: FakeNvml, port: int
) -> None:
    vllm = start(idle=True)
    with daemon(**settings(port, nvml, CANARY_INTERVAL_SECONDS="10")) as running:
        becomes(running, "serving")
        running.sees(lambda page: page.value("engine_generation_tokens_total") >= 4, "canaries are answered")

        os.kill(vllm.core, signal.SIGSTOP)
        stalled = becomes(running, "stalled")
        assert stalled.value("source_up", source="engine") == 1
        assert stalled.value("engine_requests_running") == 0
        assert stalled.value("engine_progress_age_seconds") >= 60
        began = last_look(stalled)
        running.sees(lambda page: last_look(page) > began + 60, "the sampling goes on while a canary waits")

        os.kill(vllm.core, signal.SIGCONT)
        becomes(running, "serving")


def test_an_engine_that_is_never_asked_may_be_well(start: Start, nvml: FakeNvml, port: int) -> None:
    vllm = start(idle=True)
    with daemon(**settings(port, nvml)) as running:
        began = last_look(becomes(running, "serving"))
        os.kill(vllm.core, signal.SIGSTOP)

        later = running.sees(lambda page: last_look(page) > began + 120, "two minutes have passed")
        assert state(later) == "unknown", "a canary would know"
        assert later.value("engine_generation_tokens_total") == 0
