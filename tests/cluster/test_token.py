"""The guardrail with a token that expires, beside the other tests, since it takes ten minutes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.cluster import START_SECONDS, kubectl
from tests.cluster.guardrail import BUDGET, build_workload, list_ready, read_log
from tests.process import eventually

pytestmark = pytest.mark.cluster

TOKEN_SECONDS: Final = 600
"""The shortest time for which Kubernetes issues a token."""


def test_the_guardrail_goes_on_with_the_token_that_the_kubelet_renews(tmp_path: Path) -> None:
    """It asks for a budget at each turn; one is there when the first token has expired."""
    with ExitStack() as stack:
        workload = build_workload(tmp_path, "token", 1, token_seconds=TOKEN_SECONDS, budgets=())
        stack.callback(workload.delete)
        eventually(
            lambda: any("no PodDisruptionBudgets select this pod" in line for line in read_log(workload)),
            "the sidecar looks for a budget",
            START_SECONDS,
            2.0,
        )
        (pod,) = workload.pods()
        time.sleep(TOKEN_SECONDS + 60)
        kubectl("apply", "--namespace", workload.namespace, "--filename=-", input_text=BUDGET)
        eventually(lambda: pod["metadata"]["name"] not in list_ready(workload), "it is evicted", START_SECONDS, 2.0)
