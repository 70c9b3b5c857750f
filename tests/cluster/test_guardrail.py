"""The guardrail on a real API server whose certificates are as bare as those of EKS."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster.cluster import START_SECONDS, Workload, kubectl, read
from tests.cluster.guardrail import build_workload, list_ready, read_log
from tests.process import eventually
from vllm_headroom.daemon.evict import LEASE_SECONDS

pytestmark = pytest.mark.cluster

REPLICAS: Final = 3
EVICTIONS: Final = 3
LOOK_SECONDS: Final = 1.0
TURNS_SECONDS: Final = 60.0
"""Enough for more refusals of the same request."""

LEASE: Final = "vllm-headroom-deployment-vllm"

VERBS: Final = (
    "pods get",
    "pods/eviction create",
    "poddisruptionbudgets list",
    "leases get",
    "leases create",
    "leases update",
)
"""Each verb of the shipped Role."""


def read_lease(workload: Workload) -> dict[str, Any]:
    output = kubectl("--namespace", workload.namespace, "get", "lease", LEASE, "--output=json", check=False)
    spec: dict[str, Any] = json.loads(output)["spec"] if output.startswith("{") else {}
    return spec


def test_one_pod_at_a_time_is_evicted_and_the_next_waits_for_its_replacement_alone(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    workload = build_workload(tmp_path, "guardrail", REPLICAS)
    request.addfinalizer(workload.delete)
    eventually(lambda: len(list_ready(workload)) == REPLICAS, "all serve", START_SECONDS)
    fewest_ready = REPLICAS
    taken_seconds: list[float] = []
    evicted_pods: list[str] = []
    deadline = time.monotonic() + START_SECONDS
    while len(taken_seconds) < EVICTIONS and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        fewest_ready = min(fewest_ready, len(list_ready(workload)))
        holder = read_lease(workload).get("holderIdentity", "").partition("_")[0]
        if holder and holder not in evicted_pods[-1:]:
            taken_seconds.append(time.monotonic())
            evicted_pods.append(holder)

    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(taken_seconds)]
    print(f"seconds between evictions {pauses}, fewest ready {fewest_ready}")  # noqa: T201 - the result
    budget = read("poddisruptionbudget/vllm", "--namespace", workload.namespace)
    assert budget["status"]["expectedPods"] == REPLICAS
    assert len(taken_seconds) == EVICTIONS
    assert fewest_ready == REPLICAS - 1
    # A replacement leaks as fast, and may be evicted before one of the first pods.
    assert not {pod["metadata"]["name"] for pod in workload.pods()} & set(evicted_pods[:-1])
    assert max(pauses) < LEASE_SECONDS, "the Lease was given back, and did not have to expire"


def take_verb_away(workload: Workload, missing: str) -> None:
    """Change the shipped Role so that one verb of one resource is missing."""
    resource, verb = missing.split()
    role = read("role/vllm-headroom", "--namespace", workload.namespace)
    for rule in role["rules"]:
        if rule["resources"] == [resource]:
            rule["verbs"].remove(verb)
    role["rules"] = [rule for rule in role["rules"] if rule["verbs"]]
    workload.kubectl("replace", "--filename=-", input_text=json.dumps(role))


def find_refusals(workload: Workload) -> set[str]:
    """Return the refusals of the API server in the log, each without the reason to evict, which changes."""
    lines = (line.partition(" why=")[0].partition("problem=")[2] for line in read_log(workload))
    return {line for line in lines if "forbidden" in line}


def test_a_verb_that_is_missing_gives_one_clear_line(tmp_path: Path) -> None:
    workloads = {}
    with ExitStack() as stack:
        for number, missing in enumerate(VERBS):
            workload = build_workload(tmp_path, f"verb-{number}", 1)
            stack.callback(workload.delete)
            workloads[missing] = workload
            take_verb_away(workload, missing)
            if missing == "leases update":  # a Lease is changed where there is one
                lease = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": LEASE, "namespace": workload.namespace},
                }
                kubectl("create", "--filename=-", input_text=json.dumps(lease))

        for missing, workload in workloads.items():
            has_refusal = partial(find_refusals, workload)
            eventually(has_refusal, f"a line of the log without {missing}", START_SECONDS, 2.0)
        time.sleep(TURNS_SECONDS)
        refusals = {missing: find_refusals(workload) for missing, workload in workloads.items()}

    for missing, problems in refusals.items():
        resource, verb = missing.split()
        print(f"without {missing}: {problems}")  # noqa: T201 - the result
        (problem,) = problems
        assert f'cannot {verb} resource \\"{resource}\\"' in problem
