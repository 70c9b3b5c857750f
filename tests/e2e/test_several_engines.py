"""The real daemon over several engines: what happens to one of them is that one's alone."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.life import HURRIED, Start
from tests.fakes.nvml.library import FakeNvml
from tests.process import Daemon, Page, daemon, eventually


def state(page: Page, url: str) -> str:
    states = ("unknown", "down", "starting", "serving", "stalled", "asleep")
    (seen_state,) = (state for state in states if page.value("engine_state", state=state, engine_url=url) == 1)
    return seen_state


def count_exits(page: Page, url: str) -> float:
    reasons = ("replaced", "gone", "out_of_memory", "oom_killed")
    return sum(page.value("engine_exits_total", reason=reason, engine_url=url) for reason in reasons)


def become(running: Daemon, *wanted: tuple[str, str]) -> Page:
    return running.sees(
        lambda page: all(state(page, url) == state_name for url, state_name in wanted), f"states {wanted}"
    )


def test_an_engine_that_crashes_is_down_alone_and_its_exit_is_still_counted_after_a_restart_of_the_daemon(
    start: Start, nvml: FakeNvml, tmp_path: Path, port: int, another_port: int
) -> None:
    first_vllm = start("first")
    start("second", port=another_port)
    first_url, second_url = (f"http://127.0.0.1:{number}/metrics" for number in (port, another_port))
    settings = {
        "ENGINES": f"{first_url},{second_url}",
        "STATE_DIR": str(tmp_path / "state"),
        **HURRIED,
        **nvml.environment(),
    }
    with daemon(**settings) as running:
        become(running, (first_url, "serving"), (second_url, "serving"))
        first_vllm.end()
        page = become(running, (first_url, "down"), (second_url, "serving"))
        assert (count_exits(page, first_url), count_exits(page, second_url)) == (1, 0)
        # An incident is written after the sample that shows the exit.
        page = running.sees(lambda page: page.has("last_incident_timestamp_seconds"), "the incident is written")
        assert not page.has("last_incident_timestamp_seconds", engine_url=second_url)
        assert page.value("engines", kind="watched") == 2
        assert running.get("/readyz").status_code == 200
        engines = running.get("/snapshot.json").json()["engines"]
        assert [(engine["engine"], engine["snapshot"]["engine_state"]) for engine in engines] == [
            (first_url, "down"),
            (second_url, "serving"),
        ]
        status, _ = running.stop()
        assert status == 0
    assert len(list((tmp_path / "state").glob("engine-*/incidents/*.jsonl"))) == 1

    with daemon(**settings) as running:
        page = become(running, (second_url, "serving"))
        page = running.sees(lambda page: count_exits(page, first_url) == 1, "the exit is remembered")
        assert count_exits(page, second_url) == 0
        assert eventually(lambda: "saved state taken up" in running.log(), "the second engine's state is taken up")
