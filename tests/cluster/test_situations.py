"""Every situation on a real cluster, side by side: what arrives at PagerDuty, and how soon."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.cluster.cluster import IS_OWN_CLUSTER
from tests.cluster.situations import SITUATIONS
from tests.cluster.watching import observe, render_row, write_rows

pytestmark = pytest.mark.cluster

WATCH_SECONDS: Final = 690.0
"""How long is looked for what arrives at least, from the first step on; it goes on until the slowest alert is there."""


def test_what_arrives_is_what_has_to(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    situations = [
        situation
        for situation in SITUATIONS
        if not situation.is_played_last and (IS_OWN_CLUSTER or not situation.needs_own_cluster)
    ]
    observations = observe(situations, tmp_path, WATCH_SECONDS)

    print("\n".join(map(render_row, observations)))  # noqa: T201 - the run's result
    if request.config.getoption("--update-golden"):
        write_rows(observations)
    wrong = [render_row(observation) for observation in observations if not observation.is_as_expected()]
    assert wrong == []
