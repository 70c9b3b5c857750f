"""The example for Alertmanager: who is notified of what, what is one incident, what mutes what."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.assets.promql import written_rules
from tests.assets.situations import matches
from vllm_headroom.units import parse_duration

ALERTS: Final = Path(__file__).parents[2] / "alerts"
FILE: Final = ALERTS / "alertmanager" / "alertmanager.yml"
CONFIG: Final[dict[str, Any]] = yaml.safe_load(FILE.read_text())
RULES: Final = [rule for rule in written_rules() if "alert" in rule]
SEVERITIES: Final = ("page", "critical", "warning", "info")
TEAMS: Final = {
    "memory": "ml-platform",
    "engine": "ml-platform",
    "gpu": "infrastructure",
    "sidecar": "observability",
}
ENGINE: Final = {"cluster", "namespace", "pod", "job", "instance"}
MODEL: Final = {"cluster", "namespace", "job", "model_name"}

HELD_TOGETHER: Final = (
    ("HeadroomGpuMemoryGrowing", "HeadroomGpuMemoryLeak", "HeadroomOutOfMemorySoon"),
    ("HeadroomMemoryDiscrepancy", "HeadroomMemoryDiscrepancyHigh"),
    ("HeadroomHostMemoryLeak", "HeadroomHostMemoryRunsOut", "HeadroomHostOutOfMemorySoon"),
)
"""Each mutes those before it and holds only while they do."""

GPU_RULES: Final = tuple(rule for rule in CONFIG["inhibit_rules"] if "gpu" in rule["equal"])
NAMED_RULES: Final = tuple(rule for rule in CONFIG["inhibit_rules"] if "gpu" not in rule["equal"])

needs_amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool is not installed: apt-get install prometheus-alertmanager"
)


def team(severity: str, area: str) -> str:
    return "nobody" if severity == "info" else TEAMS[area]


def receiver(route: dict[str, Any], labels: Mapping[str, str], inherited: str = "") -> str:
    """Return where the first matching route at each depth leads, as Alertmanager walks them."""
    here = route.get("receiver", inherited)
    for child in route.get("routes", ()):
        if matches(child["matchers"], labels):
            return receiver(child, labels, here)
    return str(here)


def amtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["amtool", *arguments], capture_output=True, text=True, check=False, timeout=60)


@needs_amtool
def test_alertmanager_takes_the_file() -> None:
    checked = amtool("check-config", str(FILE))

    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_amtool
@pytest.mark.parametrize("receivers_file", sorted(FILE.parent.glob("receivers-*.yml")), ids=lambda path: path.stem)
def test_alertmanager_takes_the_file_with_other_receivers(receivers_file: Path, tmp_path: Path) -> None:
    receivers = yaml.safe_load(receivers_file.read_text())["receivers"]
    file = tmp_path / "alertmanager.yml"
    file.write_text(yaml.safe_dump(CONFIG | {"receivers": receivers}))

    checked = amtool("check-config", str(file))

    assert {receiver["name"] for receiver in receivers} == {"nobody", *TEAMS.values()}
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_amtool
@pytest.mark.parametrize(("severity", "area"), [*itertools.product(SEVERITIES, TEAMS)])
def test_alertmanager_routes_to_the_team(severity: str, area: str) -> None:
    labels = ("alertname=HeadroomOfTomorrow", f"severity={severity}", f"area={area}")

    routed = amtool(
        "config", "routes", "test", f"--config.file={FILE}", f"--verify.receivers={team(severity, area)}", *labels
    )

    assert routed.returncode == 0, routed.stdout + routed.stderr


def test_every_alert_reaches_its_team() -> None:
    for rule in RULES:
        labels = {"alertname": rule["alert"], **rule["labels"]}
        assert receiver(CONFIG["route"], labels) == team(labels["severity"], labels["area"]), rule["alert"]


def test_alerts_of_others_are_left_alone() -> None:
    assert receiver(CONFIG["route"], {"alertname": "Watchdog", "severity": "critical"}) == "nobody"


def test_one_incident_is_one_model_one_area_and_one_severity() -> None:
    (headroom,) = CONFIG["route"]["routes"]

    assert set(headroom["group_by"]) == {*MODEL, "area", "severity"}
    groups = {route["matchers"][0]: set(route["group_by"]) for route in headroom["routes"] if "group_by" in route}
    assert all(group >= {"cluster", "area", "severity"} for group in groups.values()), "a page joins no warning"
    assert groups['area="gpu"'] == {"cluster", "area", "severity", "began"}, "a node's failure has no model"


def test_only_a_page_rings() -> None:
    (pagerduty,) = CONFIG["receivers"][1]["pagerduty_configs"]

    assert pagerduty["severity"] == '{{ if eq .GroupLabels.severity "page" }}critical{{ else }}warning{{ end }}'


def test_what_stops_an_engine_is_a_page_to_the_team_that_can_mend_it() -> None:
    paging = {
        rule["alert"]: team("page", rule["labels"]["area"]) for rule in RULES if rule["labels"]["severity"] == "page"
    }

    assert paging.pop("HeadroomEngineLostGpu") == "infrastructure"
    assert paging == dict.fromkeys(
        (
            "HeadroomModelDown",
            "HeadroomReplicasLost",
            "HeadroomModelCrashLoop",
            "HeadroomOutOfMemorySoon",
            "HeadroomHostOutOfMemorySoon",
            "HeadroomNeighbourFillsGpu",
            "HeadroomEngineDown",
            "HeadroomEngineCrashLoop",
            "HeadroomEngineStalled",
        ),
        "ml-platform",
    )


def test_each_team_has_its_key_in_a_file_and_none_is_in_this_one() -> None:
    receivers = {receiver["name"]: receiver.get("pagerduty_configs", []) for receiver in CONFIG["receivers"]}

    assert receivers.pop("nobody") == []
    assert set(receivers) == set(TEAMS.values())
    for name, (pagerduty,) in receivers.items():
        assert pagerduty["routing_key_file"].rpartition("/")[2] == name
        assert pagerduty["send_resolved"] is True
        assert not {"routing_key", "service_key"} & pagerduty.keys()
    assert not re.search(r"\b[0-9A-Za-z]{32}\b", FILE.read_text())


def test_only_memory_alerts_mute_and_only_less_severe_ones_of_their_gpu() -> None:
    for rule in GPU_RULES:
        assert set(rule["equal"]) == {*ENGINE, "gpu", "uuid"}, "MIG instances have one number"
        for source, target in itertools.product(SEVERITIES, SEVERITIES):
            mutes = matches(rule["source_matchers"], of(source)) and matches(rule["target_matchers"], of(target))
            assert not mutes or SEVERITIES.index(source) < SEVERITIES.index(target)
        for side in ("source_matchers", "target_matchers"):
            assert not any(matches(rule[side], of(severity, gpu="")) for severity in SEVERITIES), "host memory"
            assert not any(matches(rule[side], of(severity, area="sidecar")) for severity in SEVERITIES)


def test_nothing_mutes_what_is_more_severe_or_of_another_engine_and_model() -> None:
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in RULES}
    for rule in NAMED_RULES:
        assert {*ENGINE} <= set(rule["equal"]) or {"cluster", "namespace", "job"} <= set(rule["equal"])
        for source, target in itertools.product(severities, severities):
            if matches(rule["source_matchers"], {"alertname": source}) and matches(
                rule["target_matchers"], {"alertname": target}
            ):
                assert source != target
                assert SEVERITIES.index(severities[source]) <= SEVERITIES.index(severities[target])


def test_every_alert_that_a_rule_mutes_by_name_exists() -> None:
    named = {
        name
        for rule in NAMED_RULES
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
        for name in re.findall(r"Headroom\w+", matcher)
    }

    assert named <= {rule["alert"] for rule in RULES}


def of(severity: str, *, area: str = "memory", gpu: str = "0") -> dict[str, str]:
    return {"severity": severity, "area": area, "gpu": gpu}


def test_every_less_severe_alert_is_muted_by_a_page_and_by_a_critical_one() -> None:
    muted = {
        (source, target)
        for source, target in itertools.product(SEVERITIES, SEVERITIES)
        for rule in GPU_RULES
        if matches(rule["source_matchers"], of(source)) and matches(rule["target_matchers"], of(target))
    }

    assert muted == {
        ("page", "critical"),
        ("page", "warning"),
        ("page", "info"),
        ("critical", "warning"),
        ("critical", "info"),
    }


def test_what_mutes_another_fires_for_long_enough_to_be_sent() -> None:
    (headroom,) = CONFIG["route"]["routes"]
    sent_after_seconds = parse_duration(headroom["group_wait"]) + parse_duration(headroom["group_interval"])
    muting = [
        rule
        for rule in RULES
        if any(
            matches(inhibition["source_matchers"], rule["labels"] | {"alertname": rule["alert"], "gpu": "0"})
            for inhibition in CONFIG["inhibit_rules"]
        )
    ]

    assert muting
    assert {
        rule["alert"] for rule in muting if parse_duration(rule.get("keep_firing_for", "0")) < sent_after_seconds
    } == set()


@pytest.mark.parametrize("names", HELD_TOGETHER)
def test_what_mutes_one_another_ends_together(names: tuple[str, ...]) -> None:
    keep_times = {rule["alert"]: rule["keep_firing_for"] for rule in RULES if rule["alert"] in names}

    assert set(keep_times) == set(names)
    assert len(set(keep_times.values())) == 1, (
        f"what outlasts is sent late, what ends before never closes: {keep_times}"
    )
