"""Pages of numbers that no engine has: what is shown stays true to its format, and nothing ends."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.process import Daemon, daemon, eventually

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
ABSURD = ("1.7e308", "1e39", "-1", "NaN", "+Inf", "5e-324", "9007199254740993", "0")
SETTINGS = {
    "SAMPLE_INTERVAL_SECONDS": "0.1",
    "KV_BYTES_PER_TOKEN": "131072",
    "GATE_READY_SECONDS": "600",
}


def with_values(value: str) -> str:
    """Return the page with this value in every line, the settings in labels included."""
    settings = re.sub(r'((?:num_gpu_blocks|block_size|gpu_memory_utilization)=)"[^"]*"', rf'\1"{value}"', RECORDED)
    return re.sub(r"^([^#\n].*) \S+$", rf"\1 {value}", settings, flags=re.MULTILINE)


def refused(constant: str) -> NoReturn:
    raise ValueError(constant)


def shows(running: Daemon) -> None:
    json.loads(running.get("/snapshot.json").raise_for_status().text, parse_constant=refused)
    running.get("/").raise_for_status()
    running.page()


def is_read(engine: EngineServer, times: int) -> bool:
    return len(engine.requests) >= times


def test_absurd_numbers_break_neither_the_daemon_nor_what_it_shows(tmp_path: Path) -> None:
    with (
        EngineServer(page(RECORDED)) as engine,
        daemon(ENGINE_URL=engine.url, STATE_DIR=str(tmp_path), **SETTINGS) as running,
    ):
        for value in ABSURD:
            engine.answer = page(with_values(value))
            wanted = len(engine.requests) + 3
            eventually(partial(is_read, engine, wanted), f"{value} was sampled")
            shows(running)

        engine.answer = page(RECORDED)
        running.sees(
            lambda shown_page: shown_page.value("engine_requests_running") > 0, "a page of numbers is read again"
        )
        shows(running)
        assert "derivation failed" not in running.log()
