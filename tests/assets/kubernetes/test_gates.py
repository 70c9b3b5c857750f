"""The component of the gates on a container that has a preStop hook of its own."""

from __future__ import annotations

import re
from typing import Any

from tests.assets.kubernetes.rendering import CASES, documents, find, needs_kustomize, rendered


@needs_kustomize
def test_its_hook_takes_the_place_of_the_containers_own_and_ends_within_the_time_of_grace() -> None:
    (case,) = (each for each in CASES if each.name == "example-gates")
    pod: dict[str, Any] = find(documents(rendered(case)), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    hook = container["lifecycle"]["preStop"]

    assert [*hook] == ["exec"], "Kubernetes refuses a hook with two handlers"
    *_, script = hook["exec"]["command"]
    begin, count, pause = map(int, re.findall(r"(?:sleep|range)\((\d+)\)", script))
    assert begin + count * pause < pod["terminationGracePeriodSeconds"]
