"""The real daemon beside a vLLM that serves, and whose metrics page is an error or stays as it is."""

from __future__ import annotations

import json

from tests.e2e.life import Start, becomes, last_look, settings, state
from tests.fakes.nvml.library import FakeNvml
from tests.process import Daemon, Page, daemon
from vllm_headroom.vocabulary import Situation


def situation(page: Page) -> str:
    (shown_situation,) = (situation for situation in Situation if page.value("situation", situation=situation) == 1)
    return shown_situation


def headline(running: Daemon) -> str:
    verdicts = json.loads(running.get("/snapshot.json").text)["verdicts"]
    return str(next(verdict["sentence"] for verdict in verdicts if verdict["subject"] == "engine"))


def minutes_later(running: Daemon, minutes: int) -> Page:
    began = last_look(running.page())
    return running.sees(lambda page: last_look(page) > began + 60 * minutes, f"{minutes} minutes have passed")


def test_a_page_that_is_an_error_from_the_start_is_unknown(start: Start, nvml: FakeNvml, port: int) -> None:
    vllm = start(broken=True)
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "unknown")
        later = minutes_later(running, 5)
        assert (state(later), situation(later)) == ("unknown", "blind")
        assert "answers other requests" in headline(running)
        assert "PROMETHEUS_MULTIPROC_DIR" in headline(running)

        vllm.set_fault("broken", on=False)
        becomes(running, "serving")


def test_a_page_that_becomes_an_error_is_no_hang(start: Start, nvml: FakeNvml, port: int) -> None:
    vllm = start()
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "serving")
        vllm.set_fault("broken")
        becomes(running, "unknown")
        later = minutes_later(running, 5)
        assert (state(later), situation(later)) == ("unknown", "blind")
        assert later.value("engine_restarts_total") == 0
        assert "no reason for a restart" in headline(running)


def test_a_page_that_never_comes_is_no_hang_while_the_server_answers(start: Start, nvml: FakeNvml, port: int) -> None:
    vllm = start()
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "serving")
        vllm.set_fault("late")
        becomes(running, "unknown")
        later = minutes_later(running, 5)
        assert (state(later), situation(later)) == ("unknown", "blind")
        assert "PROMETHEUS_MULTIPROC_DIR" in headline(running)


def test_gauges_that_nothing_supports_are_stale_and_those_of_a_spinning_gpu_are_a_hang(
    start: Start, nvml: FakeNvml, port: int
) -> None:
    nvml.gpus[0].utilization_percent = 0
    vllm = start()
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "serving")
        vllm.set_fault("stale")
        later = minutes_later(running, 5)
        assert (state(later), situation(later)) == ("serving", "healthy")
        assert later.value("engine_requests_running") == 2
        assert "these gauges are stale" in headline(running)

        nvml.gpus[0].utilization_percent = 100
        nvml.write()
        becomes(running, "stalled")
        vllm.set_fault("stale", on=False)
        becomes(running, "serving")
