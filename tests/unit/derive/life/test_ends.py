"""The judge on ends whose truth is known: processes that die in every order, 0 to 10 s apart, beside every witness."""

from __future__ import annotations

from collections import Counter

from tests.unit.derive.life.ends import KINDS, play
from vllm_headroom.vocabulary import Sureness

EACH = 40
LEAST_RIGHT = 0.95


def test_of_480_ends_the_cause_is_right_and_never_surely_wrong() -> None:
    diagnoses = [(kind.__name__, *play(kind, seed)) for kind in KINDS for seed in range(EACH)]
    wrong = Counter(
        (kind, str(diagnosis.cause), str(diagnosis.sureness))
        for kind, cause, diagnosis in diagnoses
        if diagnosis.cause != cause
    )

    assert len(diagnoses) >= 400
    assert not [mistake for mistake in wrong if mistake[2] == Sureness.SURE], wrong
    assert wrong.total() <= (1 - LEAST_RIGHT) * len(diagnoses), wrong
