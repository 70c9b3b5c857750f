"""A real vLLM with the probe on stand-in cards, our daemon beside it, and orders to the worker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx

from tests.card.card import FOLDER, Cards, Engine, serve
from tests.engine.probed import START_SECONDS, read_reports
from tests.engine.serving import is_answering
from tests.fakes.ports import free_port
from tests.process import NO_TLS, Daemon, daemon, eventually
from vllm_headroom_tools.probe.install import install

INSIDE: Final = Path(__file__).with_name("inside")
LOOK_SECONDS: Final = 600.0
"""The probe writes every five seconds; a machine with other work may need longer."""


@dataclass
class Bench:
    """What runs: the cards, vLLM, the daemon, and the folders of probe, orders and state."""

    cards: Cards
    engine: Engine
    daemon: Daemon
    place: Path
    _numbers: Iterator[int] = field(default_factory=count)

    def read_log(self) -> str:
        return self.engine.log.read_text(errors="replace")

    def find_in_log(self, pattern: str) -> str:
        matches = re.findall(pattern, self.read_log())
        assert matches, pattern
        return str(matches[-1])

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.engine.url + path, json=body or None, timeout=120, verify=NO_TLS)

    def complete(self, tokens: int = 4, prompt: str | list[list[int]] = "w300 w301", **body: Any) -> httpx.Response:
        request_fields = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return self.post("/v1/completions", **request_fields | body)

    def abort(self, prompt: str, tokens: int) -> None:
        """Ask for tokens and hang up at the first one."""
        request_fields = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        url = f"{self.engine.url}/v1/completions"
        with httpx.stream("POST", url, json=request_fields, timeout=120, verify=NO_TLS) as answer:
            next(answer.iter_lines())

    def order(self, word: str, amount: int = 0) -> dict[str, Any]:
        """Have the worker's process do something, and return what it answers."""
        path = self.place / "orders" / f"{word}.{next(self._numbers)}"
        path.with_suffix(".part").write_text(str(amount))
        path.with_suffix(".part").replace(path)
        done = path.with_name(f"{path.name}.done")
        eventually(done.exists, f"the worker obeys {word}", START_SECONDS, 0.2)
        answer: dict[str, Any] = json.loads(done.read_text())
        return answer

    def read_reports(self) -> dict[str, dict[str, Any]]:
        """What each process of vLLM says by its probe, by name."""
        return read_reports(self.place / "probe")

    def read_parts(self, card: int = 0) -> dict[str, float]:
        """`headroom_engine_memory_bytes` of a card, by part."""
        page = self.daemon.get("/metrics").text
        lines = re.findall(rf'^headroom_engine_memory_bytes{{gpu="{card}",part="(\w+)".*}} (\S+)$', page, re.MULTILINE)
        return {part: float(value) for part, value in lines}


@contextmanager
def watch(
    place: Path,
    *options: str,
    cards: Cards | None = None,
    model: Path = FOLDER / "tiny",
    modules: tuple[Path, ...] = (),
    variables: Mapping[str, str] | None = None,
    **settings: str,
) -> Iterator[Bench]:
    """Serve, and watch from the start; `settings` are the daemon's.

    `modules` is what else vLLM finds modules in, `variables` what else it has in its environment.
    """
    cards = cards or Cards(folder=place / "cards")
    cards.create()
    for name in ("site", "probe", "orders", "state"):
        (place / name).mkdir()
    install(place / "site")
    port = free_port()
    inside = {
        "PYTHONPATH": ":".join(map(str, (*modules, INSIDE, place / "site"))),
        "HEADROOM_PROBE_DIR": str(place / "probe"),
        "CARD_ORDERS": str(place / "orders"),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        **(variables or {}),
    }
    daemon_settings = cards.environment() | {"PROBE_DIR": str(place / "probe"), "STATE_DIR": str(place / "state")}
    del daemon_settings["CARD_LEDGER"]
    with (
        serve(cards, model, port, place / "vllm.log", options, **inside) as engine,
        daemon(ENGINE_URL=engine.url, **daemon_settings | settings) as watching,
    ):
        yield Bench(cards, engine, watching, place)


def wait_until_served(bench: Bench) -> Bench:
    """Wait until vLLM answers; fail with the end of its log where it has ended."""

    def serves() -> bool:
        assert bench.engine.process.poll() is None, bench.read_log()[-3000:]
        return is_answering(f"{bench.engine.url}/health")

    eventually(serves, "vLLM serves", START_SECONDS, 1)
    return bench


def wait_until_ended(bench: Bench) -> None:
    """Wait until vLLM has ended."""
    eventually(lambda: bench.engine.process.poll() is not None, "vLLM ends", START_SECONDS, 1)
