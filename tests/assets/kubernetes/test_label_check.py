"""The policy that warns of a label that injects nothing is for workloads with the label, and refuses none."""

from __future__ import annotations

import re
from typing import Final

from tests.assets.kubernetes import schemas
from tests.assets.kubernetes.rendering import COMPONENTS, documents, find

FOUND: Final = documents((COMPONENTS / "label-check" / "policy.yaml").read_text())


def test_it_is_valid_where_there_are_such_policies() -> None:
    newer = [version for version in schemas.versions() if version != "1.29"]

    assert newer
    assert [fault for manifest in FOUND for version in newer for fault in schemas.faults(manifest, version)] == []


def test_it_warns_and_refuses_nothing() -> None:
    policy = find(FOUND, "ValidatingAdmissionPolicy")
    binding = find(FOUND, "ValidatingAdmissionPolicyBinding")

    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Warn"]}
    assert policy["spec"]["failurePolicy"] == "Ignore"


def test_it_asks_for_the_container_of_the_components_under_the_label_of_the_components() -> None:
    policy = find(FOUND, "ValidatingAdmissionPolicy")["spec"]
    (expression,) = (validation["expression"] for validation in policy["validations"])
    native, plain = ((COMPONENTS / name / "patch.yaml").read_text() for name in ("sidecar", "sidecar-plain"))
    (name,) = set(re.findall(r"each\.name == '(\w+)'", expression))

    assert f"- name: {name}\n" in native
    assert f"    name: {name}\n" in plain
    assert policy["matchConstraints"]["objectSelector"]["matchLabels"] == {"vllm-headroom": "enabled"}
