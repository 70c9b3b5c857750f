"""What the pages for people claim about the code and the manifests is so."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

import vllm_headroom
from tests.assets.console import ROOT
from tests.assets.terminal import FREE_PORT, OWN

SIDECAR: Final = Path(vllm_headroom.__file__).parent
DESIGN: Final = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
ROUTES: Final[dict[str, Any]] = yaml.safe_load((ROOT / "alerts/alertmanager/alertmanager.yml").read_text())["route"]

RUN: Final = """
import os, sys
end = os._exit
os._exit = lambda status: (sys.stdout.write(" ".join(sys.modules)), sys.stdout.flush(), end(status))
sys.argv = ["vllm-headroom"]
from vllm_headroom.__main__ import main
main()
"""
"""The daemon, which prints what it has imported when it ends."""


def read(page: str) -> str:
    """Return a page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def importers_of(module: str) -> set[str]:
    """Return the modules of the sidecar that import a module, also within a function."""
    return {
        str(file.relative_to(SIDECAR))
        for file in SIDECAR.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if module in imported_by(node)
    }


def imported_by(node: ast.AST) -> set[str]:
    """Return the modules, and the names in them, that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def test_the_figures_of_the_readme_are_rows_of_the_benchmark() -> None:
    readme = read("README.md")
    leaks = (ROOT / "docs/leaks.md").read_text(encoding="utf-8")
    blind = leaks.partition("### Blind sets")[2].partition("### Earlier sets")[0]
    gpu, *host = re.findall(r"^\| seventh, .*$", blind, re.MULTILINE)
    filled, filling, paged = re.findall(r"\d+ of \d+ \([^|]*\| (\d+) of (\d+) \| (\d+) of", gpu)[0]
    gpu_false, gpu_days, *rates = re.findall(r"(\d+) in (\d+) days \| (\d+) \((\d+) to (\d+)\)", gpu)[0]
    host_filled = [re.findall(r"\d+ of \d+ \([^|]*\| (\d+) of (\d+) \|", row)[0] for row in host]
    host_false = [re.findall(r"(\d+) in (\d+) days", row)[0] for row in host]
    host_sums = [sum(map(int, column)) for column in zip(*host_filled, strict=True)]
    host_false_sums = [sum(map(int, column)) for column in zip(*host_false, strict=True)]
    (earlier,) = re.findall(r"^\| first, GPU memory .* days \| (\d+) \((\d+) to (\d+)\)", blind, re.MULTILINE)

    assert (
        f"found {filled} of {filling} leaks that filled the card. It paged for {paged} of them before the card was"
        f" full. It found {host_sums[0]} of {host_sums[1]} leaks that filled host memory. For GPU memory, it raised"
        f" {gpu_false} false alarms in {gpu_days} days without a leak. This is {rates[0]} a year (95 % interval:"
        f" {rates[1]} to {rates[2]}). For host memory, it raised {host_false_sums[0]} false alarms in"
        f" {host_false_sums[1]} days."
    ) in readme
    interval = f"{earlier[1]} to {earlier[2]}"
    assert f"raised {earlier[0]} GPU memory false alarms a year (95 % interval: {interval})" in readme
    (own,) = re.findall(r"found (\d+) of (\d+) leaks\. It raised (\d+) false alarms in (\d+) days", readme)
    assert own in re.findall(
        r"^\| both[^|]* \| (\d+) of (\d+) \([^|]*\| [^|]*\| [^|]*\| (\d+) in (\d+) days \|", leaks, re.MULTILINE
    )


def test_only_the_composition_root_imports_the_settings() -> None:
    importers = importers_of("vllm_headroom.config")

    assert importers == {"daemon/app.py", "daemon/node_daemon.py", "daemon/parts.py"}
    assert all(f"`{name}`" in DESIGN for name in importers)


def test_only_the_entry_of_the_process_imports_the_commands() -> None:
    tools = {path.stem for path in (SIDECAR.parent / "vllm_headroom_tools").iterdir()}

    assert set().union(*(importers_of(f"vllm_headroom_tools.{name}") for name in tools)) == {"__main__.py"}


def test_a_plain_run_loads_the_tools_that_the_code_map_names() -> None:
    sentence = re.search(r"`vllm-headroom run` loads only these modules of `vllm_headroom_tools`: ([^.]+)\.", DESIGN)
    assert sentence
    with subprocess.Popen(
        [sys.executable, "-c", RUN], env=OWN | FREE_PORT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stderr is not None
        assert any("listening" in line for line in daemon.stderr)
        daemon.send_signal(signal.SIGTERM)
        modules, _ = daemon.communicate(timeout=60)

    loaded = {name.split(".")[1] for name in modules.split() if name.startswith("vllm_headroom_tools.")}
    assert loaded == set(re.findall(r"`(\w+)`", sentence[1]))


def test_the_code_map_has_each_part_of_the_sidecar() -> None:
    code_map = DESIGN.partition("## Code map")[2].partition("## Data flow")[0]
    named = {name.strip("/") for name in re.findall(r"`([\w./]+)`", code_map)}
    parts = {path.name for path in SIDECAR.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    assert parts - {"__init__.py"} <= named


def test_the_files_in_which_a_value_is_followed_exist() -> None:
    code_map = DESIGN.partition("## Code map")[2].partition("## Data flow")[0]
    steps = re.findall(r"^\| `(vllm_headroom\w*/[\w/]+\.py)` \|", code_map, re.MULTILINE)
    reading = re.findall(r"`((?:scrape|derive)/[\w/]+\.py)`", code_map)

    assert len(steps) > 9
    assert len(set(steps)) == len(steps)
    assert [step for step in steps if not (SIDECAR.parent / step).is_file()] == []
    assert [name for name in reading if not (SIDECAR / name).is_file()] == []


def test_an_incident_is_what_alertmanager_groups_by() -> None:
    (headroom,) = ROUTES["routes"]

    assert set(headroom["group_by"]) == {"cluster", "namespace", "job", "model_name", "area", "severity"}
    for page in ("DESIGN.md", "docs/paging.md"):
        assert "an incident covers one model, one area and one severity" in read(page).lower(), page
    assert "Alerts are grouped by model, area and severity" in read("alerts/README.md")


def test_the_memory_limit_is_that_of_every_manifest() -> None:
    limit = re.search(r"the container's limit is (\d+) MiB", read("docs/costs.md"))
    manifests = [
        path
        for pattern in ("kubernetes/components/**/*.yaml", "kubernetes/recipes/daemonset/*.yaml", "helm/**/*.yaml")
        for path in sorted((ROOT / "deploy").glob(pattern))
    ]
    limits = {
        str(path.relative_to(ROOT)): megabytes
        for path in (*manifests, ROOT / "deploy/compose/compose.yaml")
        for megabytes in re.findall(r"limits: *\{[^}]*memory: *(\d+)Mi?\}", path.read_text(encoding="utf-8"))
    }

    assert limit
    assert len(limits) >= 5
    assert set(limits.values()) == {limit[1]}, limits


def test_the_role_on_the_page_of_security_is_the_one_that_is_granted() -> None:
    role = (ROOT / "deploy/kubernetes/components/evict/rbac.yaml").read_text(encoding="utf-8")
    granted = {
        (resource, verb)
        for document in yaml.safe_load_all(role)
        for rule in document.get("rules", ())
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }

    assert granted == {
        ("pods", "get"),
        ("pods/eviction", "create"),
        ("poddisruptionbudgets", "list"),
        ("leases", "get"),
        ("leases", "create"),
        ("leases", "update"),
    }
    assert (
        "allows `get` on pods, `list` on PodDisruptionBudgets, `create` on evictions, "
        "and `get`, `create` and `update` on Leases"
    ) in read("SECURITY.md")
