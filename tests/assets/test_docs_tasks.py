"""The task pages of docs/ work as they stand: their configurations are read, and the scrape configuration scrapes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from mkdocs_hooks import lead_out, list_guests
from tests.assets import console, terminal
from tests.assets.console import ROOT, Block
from tests.assets.terminal import SIDECAR, Scene
from tests.dashboards.store import Prometheus, missing, running
from tests.process import eventually
from vllm_headroom.vocabulary import Situation

DOCS: Final = ROOT / "docs"
RUNBOOKS: Final = ROOT / "alerts" / "runbooks"
MONITOR: Final = ROOT / "deploy" / "kubernetes" / "components" / "podmonitor" / "podmonitor.yaml"
SITE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("!!python", "#"))


def blocks(page: str, language: str) -> list[Block]:
    return [block for block in console.blocks() if block.page.name == page and block.language == language]


def pages(nav: Any) -> list[str]:
    """Return the pages of a part of the site's navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for nav_part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(nav_part)]


def test_the_site_has_every_page_once() -> None:
    assert sorted(pages(SITE["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_a_link_leads_to_the_site_where_that_has_its_page_and_to_the_repository_otherwise() -> None:
    text = (
        "[a](../running.md#gpus) [b](../../deploy/README.md#x) [c](../../alerts) [d](../../Makefile) [e](https://x/y)"
    )
    assert lead_out(text, DOCS / "commands", "URL") == (
        "[a](../running.md#gpus) [b](../repository/deploy/README.md#x) [c](../repository/alerts/README.md)"
        " [d](URL/blob/main/Makefile) [e](https://x/y)"
    )
    text = "[a](../../docs/probe.md) [b](HeadroomGpuLost.md#meaning) [c](../generate.py) [d](#impact)"
    assert lead_out(text, DOCS.parent / "alerts/runbooks", "URL") == (
        "[a](../../../probe.md) [b](HeadroomGpuLost.md#meaning) [c](URL/blob/main/alerts/generate.py) [d](#impact)"
    )


def test_every_runbook_is_on_the_site() -> None:
    runbooks = {f"alerts/runbooks/{page.name}" for page in RUNBOOKS.glob("*.md")}

    assert runbooks <= set(list_guests())


def test_each_situation_is_explained_with_its_first_action() -> None:
    text = (DOCS / "situations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z ]+) \| .+ \| ([A-Z].+) \|$", text, re.MULTILINE)

    assert rows == [(situation.replace("_", " "), situation.action) for situation in Situation]


def test_the_monitor_on_the_page_is_the_one_that_is_installed() -> None:
    (shown,) = (yaml.safe_load(block.body) for block in blocks("prometheus.md", "yaml") if "PodMonitor" in block.body)
    installed = yaml.safe_load(MONITOR.read_text(encoding="utf-8"))

    assert shown["metadata"].pop("namespace")
    assert shown == installed


@pytest.mark.skipif(bool(missing()), reason=f"not on the PATH: {missing()} (Debian: prometheus)")
def test_the_scrape_configuration_scrapes_and_the_queries_find_the_sidecar(tmp_path: Path) -> None:
    (config,) = (
        yaml.safe_load(block.body) for block in blocks("prometheus.md", "yaml") if "scrape_configs" in block.body
    )
    shutil.copy(ROOT / "alerts" / "rules" / "headroom.yaml", tmp_path)
    (job,) = config["scrape_configs"]
    with terminal.opened(tmp_path, Scene()) as typed:
        typed.says("vllm-headroom demo --scenario healthy &")
        job["static_configs"] = [{"targets": [typed.real(SIDECAR)]}]
        job["scrape_interval"] = "1s"
        with running(tmp_path, config, lookback="5m") as prometheus:
            for query in blocks("prometheus.md", "promql"):
                _wait_for_one(prometheus, query.body)


def _wait_for_one(prometheus: Prometheus, expr: str) -> None:
    def is_one() -> bool:
        return [series["value"][1] for series in prometheus.ask("query", query=expr)["result"]] == ["1"]

    eventually(is_one, expr)
