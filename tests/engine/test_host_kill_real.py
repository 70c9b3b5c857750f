"""A real vLLM leaks host memory in a real cgroup until the kernel kills it: predicted, reported, and named."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.command import read_data
from tests.engine.serving import HERE, Engine, serving, started, words
from tests.fakes.cgroups import leave, limited
from tests.fakes.ports import free_port
from tests.process import Daemon, Page, daemon, eventually

pytestmark = pytest.mark.engine

GIB: Final = 2**30
BYTES_PER_SECOND: Final = 8_000_000
LASTS_SECONDS: Final = 1020
"""From the first request on: eight to ten minutes until the detector is sure, two until the page, and five to spare."""

NEAR_SECONDS, FOR_SECONDS = 3600.0, 120.0
"""HeadroomHostOutOfMemorySoon: leaking, and less than this left, for so long."""


@contextlib.contextmanager
def asked(engine: Engine) -> Iterator[None]:
    """Ask the engine once a second, until it has gone or the block ends."""
    over = threading.Event()

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            number = 0
            while not over.wait(1.0):
                engine.complete(words(37 * number, 16), 8)
                number += 1

    client = threading.Thread(target=ask)
    client.start()
    yield
    over.set()
    client.join()


def until_killed(folder: Path, running: Daemon) -> tuple[float, list[tuple[float, float]]]:
    """Return when the kernel killed, and each time at which the engine was leaking, with what was foretold then."""
    foretold = []
    while "oom_kill 0" in (folder / "memory.oom_control").read_text():
        now, page = time.monotonic(), running.page()
        leaking = {"process": "engine_core", "state": "leaking"}
        if page.has("host_leak_state", **leaking) and page.value("host_leak_state", **leaking) == 1:
            foretold.append((now, page.value("host_time_to_oom_seconds")))
        time.sleep(1)
    return time.monotonic(), foretold


def ended(page: Page) -> bool:
    return page.value("engine_exits_total", reason="oom_killed") == 1


def postmortem(state: Path) -> Any:
    command = [sys.executable, "-m", "vllm_headroom", "postmortem", str(state), "--json"]
    return read_data(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_real_leak_is_forecast_and_reported_before_the_kernel_kills_and_named_after(tmp_path: Path) -> None:
    state, port = tmp_path / "state", free_port()
    leak = {
        "PYTHONPATH": str(HERE / "leaking_plugin"),
        "LEAKED": str(tmp_path),
        "LEAKS": "engine_core=time",
        "LEAKED_BYTES_PER_SECOND": str(BYTES_PER_SECOND),
    }
    with limited(64 * GIB) as folder, serving(port, tmp_path / "serve.log", **leak) as engine:
        if not (folder / "memory.oom_control").exists():
            pytest.skip("this machine's cgroups are of version 2; their tree is read in tests/unit/scrape/proc")
        (folder / "cgroup.procs").write_text(str(engine.process.pid))
        started(engine)
        leave(folder, LASTS_SECONDS * BYTES_PER_SECOND)
        with daemon(ENGINE_URL=engine.url, STATE_DIR=str(state)) as running, asked(engine):
            killed, foretold = until_killed(folder, running)
            page = running.sees(ended, "the life ended by the kernel's hand")
            last_incident = eventually(
                lambda: running.get("/snapshot.json").json()["last_incident"], "an incident is set aside"
            )

    first_seconds, left_seconds = foretold[0]
    middle, later = foretold[len(foretold) // 2]
    near = [at for at, seconds in foretold if seconds < NEAR_SECONDS]
    print(  # noqa: T201 - the record of a long run
        f"foretold {left_seconds:.0f} s, it took {killed - first_seconds:.0f}; then {later:.0f}, {killed - middle:.0f}"
    )
    report = postmortem(state)
    print(report["cause"], report["sure"], report["file"])  # noqa: T201 - as above

    assert killed - near[0] > FOR_SECONDS, "the page is sent before"
    assert left_seconds == pytest.approx(killed - first_seconds, rel=0.15)
    assert later == pytest.approx(killed - middle, abs=0.15 * (killed - first_seconds) + 30), (
        "it counts down each half minute"
    )
    assert page.value("host_oom_kills_total") == 1
    assert (report["cause"], report["sure"]) == ("killed_by_kernel", "sure")
    assert report["file"] == last_incident["file"]
