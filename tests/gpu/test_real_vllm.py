"""A real vLLM on the first card of this machine: the parts, what a leak does, how it ends, and sleep.

CARD_FOLDER needs `venv/bin/vllm` and the model `tiny` (tests/engine/tiny_model.py). It takes about 11 minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pynvml
import pytest

from tests.card.bench import Bench, wait_until_ended, wait_until_served, watch
from tests.card.card import FOLDER, GIB, MIB, Cards
from tests.card.test_ends import read_postmortem, request_prompt_logprobs, write_model
from tests.card.test_probe_on_card import read_settled
from tests.engine.serving import words
from tests.process import Page, eventually

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (FOLDER / "venv/bin/vllm").exists(), reason="CARD_FOLDER has no vLLM"),
]

LLAMA_8B: Final = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
SERVES: Final = ("--max-model-len", "4096", "--gpu-memory-utilization", "0.9", "--attention-backend", "TRITON_ATTN")
GRAPHS: Final = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')
CLIENTS: Final = 4
LASTS_SECONDS: Final = 500.0
"""How long the leak takes to fill the card: in a run's first minutes an alarm takes at least five."""

FULL_BYTES: Final = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCard(Cards):
    """The first card, as NVML describes it."""

    handle: Any

    def create(self) -> Cards:
        return self

    def environment(self) -> dict[str, str]:
        return {"CARD_LEDGER": os.devnull}

    def read_holders(self, card: int = 0) -> dict[int, int]:
        assert card == 0
        return {
            process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        }

    def read_free(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).free)


@pytest.fixture(scope="module")
def card() -> RealCard:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return RealCard(folder=Path(), handle=handle, total_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def say(*spoken_words: object) -> None:
    sys.stdout.write(f"{time.strftime('%X')} {' '.join(map(str, spoken_words))}\n")
    sys.stdout.flush()


@contextmanager
def serve_llama(place: Path, card: RealCard, *options: str) -> Iterator[Bench]:
    model, trace = write_model(place / "tiny", **LLAMA_8B), str(place / "trace.jsonl")
    options = (*SERVES, *options)
    with watch(place, *options, cards=card, model=model, TRACE_FILE=trace, SAMPLE_INTERVAL_SECONDS="1") as running:
        wait_until_served(running).complete()
        yield running


@pytest.fixture(scope="module")
def bench(card: RealCard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with serve_llama(tmp_path_factory.mktemp("llama"), card, *GRAPHS) as running:
        yield running


def test_the_parts_sum_to_what_nvml_says_is_held(card: RealCard, bench: Bench) -> None:
    parts, stats = read_settled(bench)
    held_bytes = card.read_holders()
    plan = ("plan", "--model-config", str(bench.place / "tiny"), "--gpu-memory", str(card.total_bytes), *SERVES[:4])
    say(
        subprocess.run(
            [sys.executable, "-m", "vllm_headroom", *plan], capture_output=True, text=True, check=True
        ).stdout
    )
    say(bench.find_in_log(r"Free memory on device.*"), bench.find_in_log(r"GPU KV cache size.*"))
    say(parts, "NVML", held_bytes, "torch", stats["reserved_bytes.all.current"])

    assert sum(parts.values()) == sum(held_bytes.values())
    assert list(held_bytes) == [bench.read_reports()["EngineCore"]["pid"]], "the server makes no context"
    assert parts["outside_torch"] == sum(held_bytes.values()) - stats["reserved_bytes.all.current"]
    assert parts["weights"] + parts["kv_cache"] + parts["other_tensors"] == stats["allocated_bytes.all.current"]
    assert float(bench.find_in_log(r"Available KV cache memory: ([\d.]+) GiB")) == pytest.approx(
        parts["kv_cache"] / GIB, abs=0.01
    )


def test_memory_past_torch_is_outside(bench: Bench) -> None:
    parts_before, _ = read_settled(bench)
    assert bench.order("outside", 512 * MIB) == {"error": 0}
    eventually(
        lambda: bench.read_parts()["outside_torch"] > parts_before["outside_torch"], "the page has it", every_seconds=1
    )
    parts_after, _ = read_settled(bench)

    assert parts_after["outside_torch"] - parts_before["outside_torch"] == 512 * MIB


@contextmanager
def load(bench: Bench) -> Iterator[None]:
    """Ask without a pause, from several clients."""
    over = threading.Event()

    def ask(client: int) -> None:
        for number in itertools.count():
            if over.is_set():
                break
            with contextlib.suppress(httpx.HTTPError):
                bench.complete(64, words(client * 211 + number * 37, 64))

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for client in clients:
        client.start()
    yield
    over.set()
    for client in clients:
        client.join()


def leak_until_full(bench: Bench, card: RealCard) -> list[tuple[float, Page]]:
    """Leak once a second until the card is full; return the pages on which the engine leaks, and their times."""
    step, alarms = round(card.read_free() / LASTS_SECONDS / MIB) * MIB, list[tuple[float, Page]]()
    say("room", card.read_free() // MIB, "MiB; MiB a second:", step // MIB)
    while card.read_free() > FULL_BYTES:
        due = time.monotonic() + 1
        bench.order("tensors", step)
        page = bench.daemon.page()
        if page.has("time_to_oom_seconds"):
            alarms.append((time.monotonic(), page))
        time.sleep(max(0.0, due - time.monotonic()))
    return alarms


def test_a_leak_is_forecast_until_the_card_is_full(card: RealCard, bench: Bench) -> None:
    with load(bench):
        alarms = leak_until_full(bench, card)
        full = time.monotonic()
        request_prompt_logprobs(bench)
        wait_until_ended(bench)
    verdict = read_postmortem(bench)
    assert alarms, "an alarm before the card is full"
    first_seconds, page = alarms[0]
    say("first alarm", full - first_seconds, "s before it was full; foretold", page.value("time_to_oom_seconds"))

    assert page.value("time_to_oom_seconds") == pytest.approx(full - first_seconds, rel=0.5)
    assert page.value("leak_state", state="leaking") == 1
    assert page.value("leak_location", location="tensors") == 1
    assert bench.daemon.page().value("engine_exits_total", reason="out_of_memory") == 1
    assert verdict["cause"] in ("out_of_memory_leak", "out_of_memory_burst")
    assert "OutOfMemoryError" in bench.read_log()


def test_sleep_gives_the_card_back(card: RealCard, tmp_path: Path) -> None:
    with serve_llama(tmp_path, card, "--enforce-eager", "--enable-sleep-mode") as running:
        awake = sum(card.read_holders().values())
        running.post("/sleep?level=1")
        asleep = sum(card.read_holders().values())
        running.daemon.sees(
            lambda page: (
                page.value("engine_awake") == 0 and page.value("gpu_memory_held_bytes", holder="engine") == asleep
            ),
            "it sleeps",
        )
        running.post("/wake_up")
        say("awake", awake, "asleep", asleep, "awake again", sum(card.read_holders().values()))

        assert running.complete().status_code == 200
        assert asleep < 4 * GIB < awake
        running.daemon.sees(lambda page: page.value("engine_awake") == 1, "it is awake")
