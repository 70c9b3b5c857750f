"""Replicas that leak in step, as processes with the real guardrail, whatever goes wrong around them."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.replicas import Situation, play


def test_two_replicas_restart_in_turn_whatever_goes_wrong(tmp_path: Path) -> None:
    """The clocks are six hours apart, both sidecars restart together, and the API server is away for a while."""
    guarded, plain = play(
        Situation(
            replicas=2,
            speed=1000,
            seconds=24,
            served_hours=6,
            near_hours=3,
            budget=2,
            hours_apart=12,
            restart_at=(9,),
            gone=(10, 12),
        ),
        tmp_path,
    )

    assert plain.out_of_memory == 2
    assert min(plain.counts) == 0
    assert guarded.asked.count("create pods/eviction") >= 1
    assert guarded.most_voluntary == 1
    assert guarded.fewer_than(plain) <= guarded.restart_seconds
    assert guarded.out_of_memory <= plain.out_of_memory
    assert guarded.nobody_seconds <= plain.nobody_seconds
