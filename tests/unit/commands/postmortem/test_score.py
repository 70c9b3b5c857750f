"""The cause that is named, against the truth, over made-up, simulated and demonstrated incidents."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random

import pytest

from tests.unit.commands.postmortem import demonstrated, scenes, spoiled
from tests.unit.commands.postmortem.scenes import Scene
from tests.unit.commands.postmortem.spoiled import Spoil
from vllm_headroom.model import Diagnosis
from vllm_headroom.trace.incident import read_incident
from vllm_headroom.vocabulary import EndCause, Sureness
from vllm_headroom_tools.postmortem.report import EndFollower, judge_end
from vllm_headroom_tools.trace import parse_snapshot

EACH = 20
LEAST_RIGHT = 0.95
made_up = cache(scenes.scene)


def named(scene: Scene) -> Diagnosis:
    follower = EndFollower(None if scene.header is None else read_incident(scene.header))
    for record in scene.samples:
        follower.step(parse_snapshot(record))
    return judge_end(follower.ending, has_ended=scene.header is not None or follower.is_page_lost)[0]


def test_the_named_cause_is_right_and_never_surely_wrong() -> None:
    incidents = [made_up(make, seed) for make in scenes.ALL for seed in range(EACH)]
    incidents += demonstrated.incidents()
    findings = [(scene.cause, named(scene)) for scene in incidents]
    wrong = [(cause, finding) for cause, finding in findings if finding.cause != cause]
    tally = Counter((str(cause), str(finding.cause), str(finding.sureness)) for cause, finding in findings)

    assert len(findings) >= 200
    assert not [mistake for mistake in wrong if mistake[1].sureness is Sureness.SURE], tally
    assert 1 - len(wrong) / len(findings) >= LEAST_RIGHT, tally
    sure = sum(finding.sureness is Sureness.SURE for _, finding in findings)
    assert sure / len(findings) >= 0.4, tally


def test_what_was_only_seen_between_two_samples_may_be_a_neighbours() -> None:
    findings = [named(scenes.scene(scenes.hasty_neighbour, seed)) for seed in range(10)]

    assert {str(finding.cause) for finding in findings} == {EndCause.BURST}
    assert Sureness.SURE not in {finding.sureness for finding in findings}


@cache
def diagnose_ends(spoil: Spoil) -> list[tuple[EndCause, Diagnosis]]:
    """Return the truth and what is reported about each kind of incident where a sidecar saw less of it."""
    seeds = [(make, seed) for make in scenes.ALL for seed in range(6)]
    rngs = {maker_seed: Random(f"{spoil.__name__} {maker_seed[0].__name__} {maker_seed[1]}") for maker_seed in seeds}  # noqa: S311 - no secret
    incidents = [(made_up(make, seed), rngs[make, seed]) for make, seed in seeds]
    return [(scene.cause, named(spoil(scene, rng))) for scene, rng in incidents]


@pytest.mark.parametrize("spoil", spoiled.SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_sidecar_that_saw_less_is_never_surely_wrong_and_seldom_likely(spoil: Spoil) -> None:
    diagnoses = diagnose_ends(spoil)
    wrong = [
        (str(cause), str(diagnosis.cause), str(diagnosis.sureness))
        for cause, diagnosis in diagnoses
        if diagnosis.cause != cause
    ]
    misled = [mistake for mistake in wrong if mistake[2] != Sureness.POSSIBLE]

    assert not [mistake for mistake in wrong if mistake[2] == Sureness.SURE], wrong
    assert len(misled) <= 0.05 * len(diagnoses), misled


@pytest.mark.parametrize("spoil", spoiled.KEEP_ENOUGH, ids=lambda spoil: spoil.__name__)
def test_what_does_not_bear_on_the_cause_costs_nothing(spoil: Spoil) -> None:
    diagnoses = diagnose_ends(spoil)

    assert sum(diagnosis.cause == cause for cause, diagnosis in diagnoses) >= LEAST_RIGHT * len(diagnoses)
