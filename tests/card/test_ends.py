"""Engines that run out of memory for real: torch's OutOfMemoryError, and what daemon and postmortem report."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.card.bench import LOOK_SECONDS, Bench, wait_until_ended, wait_until_served, watch
from tests.card.card import FOLDER, GIB, MIB, Cards, take
from tests.command import read_data

pytestmark = pytest.mark.card

OPTIONS: Final = ("--enforce-eager", "--max-model-len", "4096", "--gpu-memory-utilization", "0.9")
LONG: Final = list(range(3, 1000)) * 2


def write_model(folder: Path, **changes: int) -> Path:
    """The tiny model with a vocabulary of today's size, so that logits are what they are in the field."""
    shutil.copytree(FOLDER / "tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 151_936} | changes))
    return folder


@contextmanager
def serve_on_small_card(place: Path, **changes: int) -> Iterator[Bench]:
    cards = Cards(folder=place / "cards", total_bytes=12 * GIB)
    model = write_model(place / "tiny", **changes)
    with watch(place, *OPTIONS, cards=cards, model=model, SAMPLE_INTERVAL_SECONDS="1") as running:
        yield running


def read_free(bench: Bench) -> int:
    cards = bench.cards
    return cards.total_bytes - cards.reserved_bytes - sum(cards.read_holders().values())


def ask_in_vain(bench: Bench, **body: Any) -> None:
    with contextlib.suppress(httpx.HTTPError):
        bench.complete(4, **body)


def request_prompt_logprobs(bench: Bench) -> None:
    """Ask for the log-probabilities of a whole prompt: gigabytes of logits that vLLM's profile run does not make."""
    ask_in_vain(bench, prompt=LONG, prompt_logprobs=5)


def leak_until_full(bench: Bench) -> None:
    """Leak all but a little, in steps that the daemon sees, and let the next large prompt find the card full."""
    while read_free(bench) > 128 * MIB:
        bench.order("tensors", min(64 * MIB, read_free(bench) - 64 * MIB))
    ask_in_vain(bench, prompt=LONG, prompt_logprobs=1)


def let_neighbour_take_the_rest(bench: Bench) -> None:
    with take(bench.cards, read_free(bench) - bench.cards.context_bytes - 32 * MIB):
        bench.daemon.sees(
            lambda page: page.value("gpu_memory_held_bytes", holder="other") > GIB / 2, "it is seen", LOOK_SECONDS, 1
        )
        ask_in_vain(bench, prompt=LONG, prompt_logprobs=1)
        wait_until_ended(bench)


def read_postmortem(bench: Bench) -> dict[str, Any]:
    bench.daemon.sees(lambda page: page.has("last_incident_timestamp_seconds"), "an incident", LOOK_SECONDS, 1)
    command = [sys.executable, "-m", "vllm_headroom", "postmortem", str(bench.place / "state"), "--json"]
    postmortem: dict[str, Any] = read_data(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    sys.stdout.write(
        json.dumps(
            {key: postmortem[key] for key in ("what", "cause", "sure", "sentence", "evidence") if key in postmortem}
        )
        + "\n"
    )
    return postmortem


@pytest.mark.parametrize(
    ("end", "causes"),
    [
        (request_prompt_logprobs, {"out_of_memory_burst"}),
        (leak_until_full, {"out_of_memory_leak", "out_of_memory_burst"}),
        (let_neighbour_take_the_rest, {"out_of_memory_neighbour"}),
    ],
)
def test_an_engine_that_runs_out_of_memory(tmp_path: Path, end: Callable[[Bench], None], causes: set[str]) -> None:
    with serve_on_small_card(tmp_path) as bench:
        wait_until_served(bench).complete()
        bench.daemon.sees(
            lambda page: page.has("allocator_ooms_total") and page.value("source_up", source="engine") == 1,
            "the probe and the page are read",
            LOOK_SECONDS,
            1,
        )
        end(bench)
        wait_until_ended(bench)
        postmortem = read_postmortem(bench)
        exits = bench.daemon.page()

    assert "OutOfMemoryError" in bench.read_log()
    assert postmortem["cause"] in causes
    assert postmortem["sure"] in ("sure", "likely")
    assert exits.value("engine_exits_total", reason="out_of_memory") == 1


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    with serve_on_small_card(tmp_path, hidden_size=8192, intermediate_size=28672, num_hidden_layers=8) as bench:
        wait_until_ended(bench)
        postmortem = read_postmortem(bench)

    assert "OutOfMemoryError" in bench.read_log()
    assert postmortem["cause"] == "start_never_fitted"
