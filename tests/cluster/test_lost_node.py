"""The situation after which the cluster has no node: it is played when all other tests have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.cluster.cluster import FOLDER, IS_OWN_CLUSTER
from tests.cluster.situations import SITUATIONS
from tests.cluster.watching import observe, render_row, write_rows
from tests.process import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not IS_OWN_CLUSTER, reason="it ends the kubelet of a node"),
]

OTHERS_SECONDS: Final = 7200.0
"""How long all other tests may take: this only ends a test that failed."""

WATCH_SECONDS: Final = 210.0
"""How long is looked for what arrives at least: a node counts as lost after 50 s, and the page waits 90 s more."""


def test_who_lost_the_node_of_the_last_engine_is_called(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    situations = [situation for situation in SITUATIONS if situation.is_played_last]

    def wait_for_others() -> None:
        """Wait for the file that play.sh writes."""
        have_ended = (FOLDER / "others-have-ended").exists
        eventually(have_ended, "all other tests have ended", OTHERS_SECONDS, 1.0)

    (observation,) = observe(situations, tmp_path, WATCH_SECONDS, wait_for_others)

    print(render_row(observation))  # noqa: T201 - the run's result
    if request.config.getoption("--update-golden"):
        write_rows([observation])
    assert observation.is_as_expected()
