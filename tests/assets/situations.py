"""The situations, played: what Prometheus fires in each, and what the shipped Alertmanager makes of it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from alerts.tests.situations import Situation
from tests.assets.alerts import narrow_groups
from tests.assets.promql import RULES, read_yaml

CONFIG: Final[dict[str, Any]] = read_yaml((RULES.parent / "alertmanager" / "alertmanager.yml").read_text("utf-8"))
SEEN: Final = {"first": "situation:first", "last": "situation:last", "times": "situation:times"}
GROUPS: Final = read_yaml((RULES / "headroom.yaml").read_text("utf-8"))["groups"]
PLAY: Final = {"group_eval_order": [*(group["name"] for group in GROUPS), "situations"]}
"""Promtool takes groups in any order otherwise, and a rule may see what is one turn old."""

MATCHER: Final = re.compile(r'(\w+)(=~|=)"(.*)"')
SAMPLE: Final = re.compile(r"(\{[^}]*\}) ([\d.eE+-]+)(?=,|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """An alert that fired: its labels, in which minutes, and how often it began."""

    labels: Mapping[str, str]
    first: int
    last: int
    times: int

    @property
    def name(self) -> str:
        """Return the name of the alert."""
        return self.labels["alertname"]


def play(
    situations: Sequence[Situation], folder: Path, *, minutes: int, interval: int, only: Sequence[str] = ()
) -> list[Fired]:
    """Return what fires in so many minutes of the situations: promtool expects nothing, and reports it all.

    With `only`, other alerts are neither evaluated nor fed, which is several times as fast.
    """
    rules = str(RULES / "headroom.yaml")
    read = ""
    if only:
        groups = narrow_groups(" ".join(only))
        rules, read = str(folder / "rules.yaml"), json.dumps(groups)
        Path(rules).write_text(json.dumps({"groups": groups}), "utf-8")
    series = [
        {"series": name, "values": values}
        for situation in situations
        for name, values in (
            *(pair for engine in situation.located() for pair in engine.series(interval)),
            *((name.replace("{namespace}", situation.namespace), values) for name, values in situation.more),
        )
        if not only or name.partition("{")[0] in read
    ]
    (folder / "results.yaml").write_text(json.dumps(_results(interval)), "utf-8")
    test = {
        "interval": f"{interval}m",
        "input_series": series,
        "promql_expr_test": [{"expr": value, "eval_time": f"{minutes - interval}m"} for value in SEEN.values()],
    }
    files = [rules, str(folder / "results.yaml")]
    file = folder / "situations.yaml"
    file.write_text(
        json.dumps(PLAY | {"rule_files": files, "evaluation_interval": f"{interval}m", "tests": [test]}), "utf-8"
    )
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return _read_report(done.stdout + done.stderr)


def _results(interval: int) -> dict[str, Any]:
    """Return the rules that keep, for each alert that fires, the first and last time and the number of times."""
    firing, window = 'ALERTS{alertstate="firing"}', f"[{3 * interval}m]"
    began = f"1 * {firing} unless 1 * {firing} offset {interval}m"
    rules = {
        SEEN["first"]: f"last_over_time(situation:first{window}) or 0 * {firing} + time()",
        SEEN["last"]: f"0 * {firing} + time() or last_over_time(situation:last{window})",
        SEEN[
            "times"
        ]: f"last_over_time(situation:times{window}) + (({began}) or 0 * last_over_time(situation:times{window}))"
        f" or 1 * {firing}",
    }
    return {"groups": [{"name": "situations", "rules": [{"record": k, "expr": v} for k, v in rules.items()]}]}


def _read_report(output: str) -> list[Fired]:
    """Return what fired, from promtool's report of what it did not expect."""
    if re.search(r"\berr(or)?:|unmarshal", output):
        raise ValueError(output[:2000])
    figures: dict[str, dict[str, float]] = {}
    for part in output.split('expr: "')[1:]:
        key = next(key for key, name in SEEN.items() if part.startswith(name))
        for labels, value in SAMPLE.findall(part):
            figures.setdefault(labels.partition("alertname=")[2], {})[key] = float(value)
    return [
        Fired(
            labels=dict(re.findall(r'(\w+)="([^"]*)"', f"alertname={labels}")),
            first=int(alert_figures["first"] / 60),
            last=int(alert_figures["last"] / 60),
            times=int(alert_figures["times"]),
        )
        for labels, alert_figures in figures.items()
    ]


def count_incidents(fired: Sequence[Fired]) -> int:
    """Return how many incidents Alertmanager opens: groups of which something was not muted for five minutes."""
    return len({_group(alert) for alert in fired if _is_sent(alert, fired)})


def _is_sent(alert: Fired, fired: Sequence[Fired]) -> bool:
    route = _route(alert.labels)
    muted = [
        muting_alert for muting_alert in fired if muting_alert is not alert and mutes(muting_alert.labels, alert.labels)
    ]
    minutes = range(alert.first, alert.last + 1)
    heard = [
        at for at in minutes if not any(muting_alert.first - 2 <= at <= muting_alert.last + 2 for muting_alert in muted)
    ]
    return route["receiver"] != "nobody" and len(heard) > 4


def mutes(source: Mapping[str, str], target: Mapping[str, str]) -> bool:
    """Return whether an alert with the one labels mutes one with the others."""
    return any(
        matches(rule["source_matchers"], source)
        and matches(rule["target_matchers"], target)
        and all(source.get(name) == target.get(name) for name in rule["equal"])
        for rule in CONFIG["inhibit_rules"]
    )


def _group(alert: Fired) -> tuple[str, ...]:
    labels = _route(alert.labels)["group_by"]
    return tuple(alert.labels.get(name, "") for name in labels)


def _route(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the receiver and the labels to group by, as Alertmanager finds them."""
    chosen_route: dict[str, Any] = {}
    routes = [CONFIG["route"]]
    while routes:
        here = next((route for route in routes if matches(route.get("matchers", []), labels)), None)
        if here is None:
            break
        chosen_route |= {key: here[key] for key in ("receiver", "group_by") if key in here}
        routes = here.get("routes", [])
    return chosen_route


def matches(matchers: Sequence[str], labels: Mapping[str, str]) -> bool:
    """Return whether labels match; only = and =~ are understood."""
    parts = [MATCHER.fullmatch(matcher) for matcher in matchers]
    assert all(parts), f"none but = and =~ is expected in {matchers}"
    return all(
        re.fullmatch(part[3] if part[2] == "=~" else re.escape(part[3]), labels.get(part[1], ""))
        for part in parts
        if part
    )
