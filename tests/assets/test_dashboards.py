"""The dashboards are those of the generator, with nothing that a linter or a tired reader complains of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from alerts.generate import BOARD
from dashboards.generate import CONFIG_MAPS, DASHBOARDS, main, render_config_maps, render_dashboard
from tests.conftest import Golden
from tests.dashboards.checks import CHECKS
from tests.dashboards.grafana import FOLDER, NAMES, load, panels, variables

EXCEPTIONS: Final = {
    **{
        (board, "narrowed", mark): "what is new is seen against pods of before, which were others"
        for board in ("headroom", "headroom-fleet", "headroom-incident")
        for mark in ("New image", "New version of the sidecar")
    },
    **{
        ("headroom", "narrowed", panel): "vLLM's own page is a target of another job and port"
        for panel in ("Time to the first token", "Requests that fail")
    },
    ("headroom", "choosable", "uuid"): "All is the engine's GPUs, not every GPU that can be seen",
    ("headroom", "counters", "XID errors since the sidecar started"): "rare: how many there were is the question",
    ("headroom-incident", "choosable", "uuid"): "All is the engine's GPUs, not every GPU that can be seen",
    (
        "headroom-incident",
        "counters",
        "XID errors and restarts",
    ): "the first event makes a new series, which rate misses",
}
"""What a check may complain of, and why: by dashboard, check, and where."""

APPLY_BYTES: Final = 256 * 1024
"""What `kubectl apply` can keep of an object in its annotation."""


def test_nothing_is_wrong_but_what_has_a_reason(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        for check in CHECKS:
            with subtests.test(name=name, check=check):
                faults = list(CHECKS[check](load(name)))
                excused = {where for dashboard, rule, where in EXCEPTIONS if (dashboard, rule) == (name, check)}

                assert [fault for fault in faults if fault.where not in excused] == []
                assert excused <= {fault.where for fault in faults}, "an exception that nothing needs any more"


def test_an_exception_is_of_a_dashboard_and_a_check_that_there_are() -> None:
    assert {(dashboard, check) for dashboard, check, _ in EXCEPTIONS} <= {
        (name, check) for name in NAMES for check in CHECKS
    }


def test_a_dashboard_is_what_the_generator_makes(golden: Golden, subtests: pytest.Subtests) -> None:
    for name in DASHBOARDS:
        with subtests.test(name):
            golden(FOLDER / f"{name}.json", render_dashboard(name))


def test_every_dashboard_is_generated() -> None:
    assert set(NAMES) == DASHBOARDS.keys()


def test_a_dashboard_is_found_by_the_name_of_its_file(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name):
            assert load(name)["uid"] == name


def test_the_config_maps_are_what_the_generator_makes(golden: Golden) -> None:
    golden(FOLDER / CONFIG_MAPS, render_config_maps())


def test_the_config_maps_hold_the_dashboards() -> None:
    config_maps = list(yaml.safe_load_all((FOLDER / CONFIG_MAPS).read_text(encoding="utf-8")))
    boards = {file: json.loads(text) for rendered_map in config_maps for file, text in rendered_map["data"].items()}

    assert boards == {f"{name}.json": load(name) for name in NAMES}
    for config_map in config_maps:
        assert config_map["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert len(json.dumps(config_map)) < APPLY_BYTES


def test_an_alert_opens_a_dashboard_with_variables_it_has() -> None:
    uids, chosen = set(re.findall(r"headroom[a-z-]*", BOARD)), re.findall(r"var-(\w+)=", BOARD)

    assert uids == {"headroom", "headroom-fleet"}
    assert set(chosen) <= {variable["name"] for variable in variables(load("headroom"))}


def test_for_grafana_com_the_data_source_is_asked_for_and_all_else_is_the_same(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for name in DASHBOARDS:
        with subtests.test(name):
            main(["--export", str(tmp_path / "new")])
            board = json.loads((tmp_path / "new" / f"{name}.json").read_text(encoding="utf-8"))
            (asked_source,) = board.pop("__inputs")
            needed = board.pop("__requires")
            chosen = board["templating"]["list"][0].pop("current")

            assert (asked_source["type"], asked_source["pluginId"], chosen["value"]) == (
                "datasource",
                "prometheus",
                f"${{{asked_source['name']}}}",
            )
            assert {name["id"] for name in needed if name["type"] == "panel"} == {
                panel["type"] for panel in panels(board)
            }
            assert board.pop("__elements") == {}
            board["templating"]["list"][0]["current"] = {}
            assert board == load(name)
