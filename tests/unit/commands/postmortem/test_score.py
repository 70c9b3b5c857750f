"""The cause that is named, against the truth, over made-up, simulated and demonstrated incidents."""

from __future__ import annotations

from collections import Counter

from tests.unit.commands.postmortem import demonstrated, scenes
from tests.unit.commands.postmortem.scenes import Scene
from vllm_headroom.commands.postmortem.finding import Finding, Sureness
from vllm_headroom.commands.postmortem.follow import Follower
from vllm_headroom.commands.postmortem.judge import judge
from vllm_headroom.model import Snapshot
from vllm_headroom.trace.parse import snapshot_of

EACH = 20
LEAST_RIGHT = 0.95


def named(scene: Scene) -> Finding:
    follower = Follower(scene.header)
    for record in scene.samples:
        snapshot = snapshot_of(record)
        assert isinstance(snapshot, Snapshot), snapshot
        follower.step(snapshot)
    return judge(follower.facts)[0]


def test_the_named_cause_is_right_and_never_surely_wrong() -> None:
    incidents = [scenes.scene(make, seed) for make in scenes.ALL for seed in range(EACH)]
    incidents += demonstrated.incidents()
    said = [(scene.cause, named(scene)) for scene in incidents]
    wrong = [(cause, finding) for cause, finding in said if finding.cause != cause]
    tally = Counter((str(cause), str(finding.cause), str(finding.sureness)) for cause, finding in said)

    assert len(said) >= 200
    assert not [each for each in wrong if each[1].sureness is Sureness.SURE], tally
    assert 1 - len(wrong) / len(said) >= LEAST_RIGHT, tally
    sure = sum(finding.sureness is Sureness.SURE for _, finding in said)
    assert sure / len(said) >= 0.4, tally
