"""What the daemon reports about each scenario, over hours of simulated time without waiting."""

from __future__ import annotations

import pytest

from tests.played import play
from tests.samples import values
from vllm_headroom import catalog
from vllm_headroom.model import Sample
from vllm_headroom.vocabulary import Situation
from vllm_headroom_tools.demo.world import TABLE

EPOCH = 1_760_000_000.0


def played(scenario: str, hours: float) -> list[tuple[Sample, ...]]:
    return [
        published.samples for sample in play(TABLE[scenario], hours, began=EPOCH) if (published := sample.published)
    ]


def states(samples: tuple[Sample, ...]) -> set[str]:
    return {
        labels[-1]
        for metric in (catalog.LEAK_STATE, catalog.HOST_LEAK_STATE)
        for labels, value in values(samples, metric).items()
        if value == 1.0
    }


@pytest.mark.parametrize("scenario", ["healthy", "burst", "neighbour", "restart"])
def test_what_does_not_leak_is_never_called_a_leak(scenario: str) -> None:
    all_states = set().union(*(states(samples) for samples in played(scenario, 8)))

    assert "leaking" not in all_states
    assert "growing" not in all_states
    assert "stable" in all_states


def test_the_leak_is_found_with_its_rate_and_the_time_left() -> None:
    pages = played("leak", 2)

    first_leaking = next(samples for samples in pages if "leaking" in states(samples))
    (per_request,) = values(first_leaking, catalog.LEAK_PER_REQUEST).values()
    (oom_seconds,) = values(first_leaking, catalog.TIME_TO_OOM).values()
    assert per_request == pytest.approx(12_800, rel=0.15)
    assert 3600 < oom_seconds < 86_400


@pytest.mark.parametrize(
    ("scenario", "situation"),
    [
        ("over-budget", Situation.OVER_BUDGET),
        ("low-memory", Situation.LOW_MEMORY),
        ("host-leak", Situation.HOST_LEAK),
        ("filling", Situation.FILLING),
        ("stranded", Situation.STRANDED),
        ("blind", Situation.BLIND),
    ],
)
def test_a_scenario_shows_the_situation_that_it_is_named_after(scenario: str, situation: Situation) -> None:
    evaluations = [sample.latest for sample in play(TABLE[scenario], 1.0, began=EPOCH) if sample.latest is not None]

    assert situation in {evaluation.verdicts[0].situation for evaluation in evaluations}


def test_the_kernel_kills_the_engine_that_leaks_host_memory() -> None:
    pages = played("host-leak", 1.5)

    assert values(pages[-1], catalog.ENGINE_EXITS)[("oom_killed",)] >= 1.0
