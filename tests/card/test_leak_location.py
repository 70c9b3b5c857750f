"""A leak in a real vLLM on the stand-in card: the alarm, where the memory grows, and the time that is left."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import pytest

from tests.card.bench import Bench, wait_until_served, watch
from tests.card.card import GIB, MIB, Cards
from tests.process import Page

pytestmark = pytest.mark.card

STEP_BYTES: Final = 12 * MIB
EVERY_SECONDS: Final = 1.0
OPTIONS: Final = ("--enforce-eager", "--max-model-len", "2048", "--gpu-memory-utilization", "0.6")


def leak(bench: Bench, word: str) -> Page:
    """Leak at a steady rate with requests between, until the page says where; fail when the card is nearly full."""
    while True:
        began = time.monotonic()
        held_bytes = sum(bench.cards.read_holders().values())
        assert held_bytes < bench.cards.total_bytes - GIB, "an alarm before the card is full"
        bench.order(word, STEP_BYTES)
        bench.complete()
        page = bench.daemon.page()
        if page.has("leak_location") and page.has("time_to_oom_seconds"):
            return page
        time.sleep(max(0.0, EVERY_SECONDS - (time.monotonic() - began)))


LOCATIONS: Final = {"tensors": "tensors", "outside": "outside_torch"}


@pytest.mark.parametrize("word", LOCATIONS)
def test_a_leak_is_located(tmp_path: Path, word: str) -> None:
    cards = Cards(folder=tmp_path / "cards", total_bytes=24 * GIB)
    with watch(tmp_path, *OPTIONS, cards=cards, TRACE_FILE=str(tmp_path / "trace.jsonl")) as bench:
        wait_until_served(bench).complete()
        began, bytes_before = time.time(), sum(cards.read_holders().values())
        page = leak(bench, word)
        seconds, bytes_after = time.time() - began, sum(cards.read_holders().values())
        room = cards.total_bytes - cards.reserved_bytes - bytes_after
        expected = room / ((bytes_after - bytes_before) / seconds)

    (other_location,) = set(LOCATIONS.values()) - {LOCATIONS[word]}
    sys.stdout.write(f"{word}: after {seconds:.0f} s and {(bytes_after - bytes_before) / MIB:.0f} MiB; time to OOM")
    sys.stdout.write(f" {page.value('time_to_oom_seconds'):.0f} s, by the ledger {expected:.0f} s\n")
    assert page.value("leak_location", location=LOCATIONS[word]) == 1
    assert page.value("leak_location", location=other_location) == 0
    assert page.value("time_to_oom_seconds") == pytest.approx(expected, rel=0.5)
