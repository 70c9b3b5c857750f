"""What mutes what and what is one incident: the model that counts incidents, against a real Alertmanager."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

import pytest

from tests.assets.alerts import rules
from tests.assets.situations import Fired, count_incidents, mutes
from tests.e2e.paging import ALERTMANAGER, ALERTS, free_addresses, hurried_alertmanager, run_alertmanager
from tests.process import eventually

ENGINE: Final = {
    "namespace": "llm",
    "job": "vllm-headroom",
    "pod": "vllm-0",
    "instance": "10.0.0.7:9839",
    "model_name": "llama",
}
GPU: Final = {"gpu": "0", "uuid": "GPU-a"}
KINDS: Final = [
    {**ENGINE, **(GPU if rule.labels["area"] in {"memory", "gpu"} and "Host" not in rule.name else {}), **rule.labels}
    | {"alertname": rule.name, "model_name": "llama"}
    for rule in rules()
    if rule.is_alert
]
EVERY: Final = list(itertools.combinations(KINDS, 2))
MUTED: Final = [
    (first_alert, second_alert)
    for first_alert, second_alert in EVERY
    if mutes(first_alert, second_alert) or mutes(second_alert, first_alert)
]
PAIRS: Final = {
    f"pair-{place}": [{"cluster": f"pair-{place}", **kind} for kind in pair]
    for place, pair in enumerate([*MUTED, *(pair for pair in EVERY[::9] if pair not in MUTED)])
}
"""Those that the model mutes and a ninth of the others, each in its own cluster: nothing reaches beyond one."""

pytestmark = pytest.mark.skipif(ALERTMANAGER is None, reason="apt-get install prometheus-alertmanager")


def test_alertmanager_mutes_and_groups_each_pair_of_alerts_as_the_model_does(tmp_path: Path) -> None:
    address, _ = free_addresses()
    text = (ALERTS / "alertmanager" / "alertmanager.yml").read_text("utf-8")
    (tmp_path / "alertmanager.yml").write_text(
        hurried_alertmanager(text, tmp_path, "http://127.0.0.1:1").replace("group_wait: 2s", "group_wait: 1h"), "utf-8"
    )
    alerts = [labels for pair in PAIRS.values() for labels in pair]
    with run_alertmanager(address, tmp_path) as alertmanager:
        alertmanager.post(*alerts)
        eventually(lambda: len(alertmanager.alerts()) == len(alerts), "Alertmanager has every alert")
        groups = alertmanager.groups()

    heard: dict[str, set[str]] = {name: set() for name in PAIRS}
    muted = set()
    for group in groups:
        for alert in group["alerts"]:
            labels = alert["labels"]
            if alert["status"]["inhibitedBy"]:
                muted.add((labels["cluster"], labels["alertname"]))
            elif group["receiver"]["name"] != "nobody":
                heard[labels["cluster"]].add(str(sorted(group["labels"].items())))
    expected = {
        (name, first_alert["alertname"])
        for name, pair in PAIRS.items()
        for first_alert, second_alert in (pair, reversed(pair))
        if mutes(second_alert, first_alert)
    }
    fired = {name: [Fired(labels=labels, first=0, last=60, times=1) for labels in pair] for name, pair in PAIRS.items()}

    assert muted == expected
    assert len(expected) > 50
    assert {name: len(notifications) for name, notifications in heard.items()} == {
        name: count_incidents(pair) for name, pair in fired.items()
    }
