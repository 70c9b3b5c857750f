"""vLLM's sleep mode on the stand-in card: what is left while it sleeps, and a wake that does not fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import pytest

from tests.card.bench import LOOK_SECONDS, Bench, wait_until_served, watch
from tests.card.card import GIB, MIB, Cards, take

pytestmark = pytest.mark.card

HOLDERS: Final = ("engine", "other", "unattributed")
OTHER: Final = 14 * GIB
"""What a neighbour takes while the engine sleeps: more than the engine needs to wake up again."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    place = tmp_path_factory.mktemp("sleep")
    cards = Cards(folder=place / "cards", total_bytes=24 * GIB)
    options = ("--enforce-eager", "--enable-sleep-mode", "--max-model-len", "2048", "--gpu-memory-utilization", "0.7")
    with watch(place, *options, cards=cards, SAMPLE_INTERVAL_SECONDS="1") as running:
        wait_until_served(running).complete()
        yield running


def read_held(bench: Bench) -> int:
    return sum(bench.cards.read_holders().values())


@pytest.mark.parametrize("level", [1, 2])
def test_the_residue_is_what_the_card_still_holds(bench: Bench, level: int) -> None:
    awake = read_held(bench)
    assert bench.post(f"/sleep?level={level}").status_code == 200
    residue = read_held(bench)
    sys.stdout.write(f"level {level}: {awake / MIB:.0f} MiB awake, {residue / MIB:.0f} MiB asleep\n")
    assert residue < awake / 5

    page = bench.daemon.sees(
        lambda page: page.value("sleep_residue_bytes") == residue and page.value("engine_awake") == 0,
        "the page has the residue",
        LOOK_SECONDS,
        1,
    )
    assert not page.has("leak_bytes_per_second")
    assert sum(bench.read_parts().values()) <= residue, "a cache that sleeps takes nothing"

    assert bench.post("/wake_up").status_code == 200
    assert read_held(bench) >= awake - 64 * MIB
    bench.daemon.sees(lambda page: page.value("engine_awake") == 1, "it is awake", LOOK_SECONDS, 1)
    assert bench.complete().status_code == 200


def test_it_wakes_up_by_tags(bench: Bench) -> None:
    bench.post("/sleep?level=1")
    asleep = read_held(bench)
    bench.post("/wake_up?tags=weights")
    with_weights = read_held(bench)
    bench.post("/wake_up?tags=kv_cache")

    assert asleep < with_weights < read_held(bench)
    assert bench.complete().status_code == 200


def test_aborts_and_a_reset_cache_leave_nothing(bench: Bench) -> None:
    bench.complete(8)
    held_before = read_held(bench)
    for _ in range(20):
        bench.abort("w300 w301 " * 40, 400)
    bench.post("/reset_prefix_cache")
    bench.complete(8)

    assert read_held(bench) - held_before <= 64 * MIB
    bench.daemon.sees(lambda page: page.value("engine_requests_running") == 0, "nothing runs", LOOK_SECONDS, 1)


def test_a_wake_that_does_not_fit_is_reported(bench: Bench) -> None:
    bench.post("/sleep?level=1")
    with take(bench.cards, OTHER):
        assert bench.post("/wake_up").status_code >= 500
        held_bytes = read_held(bench)
        page = bench.daemon.sees(
            lambda page: (
                sum(page.value("gpu_memory_held_bytes", holder=holder) for holder in HOLDERS) == held_bytes
                and page.has("engine_awake")
            ),
            "the page has what is held now",
            LOOK_SECONDS,
            1,
        )

    assert "out of memory" in bench.read_log().lower()
    sys.stdout.write(f"awake: {page.value('engine_awake')}\n")
    assert page.value("gpu_memory_held_bytes", holder="other") >= OTHER
    assert page.value("engine_awake") == 0, "it did not wake up"
