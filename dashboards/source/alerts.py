"""The tables of firing alerts: what each means, since when, and the way to its runbook."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

import yaml

from dashboards.source.around import CELL
from dashboards.source.colours import NEUTRAL
from dashboards.source.grafana import MINUTE, Json, override, query, values
from dashboards.source.panels import table
from dashboards.source.ranking import (
    NARROW,
    OPEN,
    ROWS,
    SEVERITIES,
    leading,
    organized,
    shortened,
    with_link,
    with_value,
)
from dashboards.source.series import BY_TARGET, TARGET

RULES: Final = Path(__file__).parents[2] / "alerts" / "rules" / "headroom.yaml"

PLAIN: Final = (
    (re.compile(r" in about \{\{.*?\}\}"), ""),
    (re.compile(r" \{\{ or \(and .*?\}\}"), " soon"),
    (re.compile(r"\{\{ or [^}]*?\"([^\"]+)\" \}\}"), r"\1"),
    # A lookup may have a second one as its alternative; the words are in the last alternative.
    (re.compile(r"\{\{ with .*?\{\{ else \}\}(?!\{\{ with)(.*?)(?:\{\{ end \}\})+"), r"\1"),
)
"""What is left of a summary's templates: a table has one sentence for an alert, without the figures of one firing."""

ALERT: Final = f"alertname, severity, {BY_TARGET}"
SELECTED: Final = f'alertname=~"Headroom.+",{TARGET}'
SINCE: Final = override("since", unit=MINUTE, custom__width=115)


@cache
def summaries() -> dict[str, str]:
    """Return the summary of each alert, in words that hold whenever it fires."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    return {rule["alert"]: plain_summary(rule["annotations"]["summary"]) for rule in rules}


def plain_summary(summary: str) -> str:
    """Return a summary without templates."""
    for template, words in PLAIN:
        summary = template.sub(words, summary)
    return summary.strip()


def alerts(width: int) -> Json:
    """Return the table of the alerts of many engines; the runbooks' column needs their address in Prometheus."""
    names = ("open", "severity", "alertname", "summary", "since", "cluster", "namespace", "pod", "instance", "runbook")
    return _alerts(
        "Firing alerts",
        f"What fires now and for which engine, the most severe first, {ROWS} at most; since when its condition has "
        "held; and its runbook where an address of the runbooks was given with the rules.",
        names,
        hidden=("address", "job"),
        width=width,
        height=7,
        overrides=[OPEN, override("alert", custom__width=230), override("pod", custom__width=185), *NARROW[:3]],
    )


def alerts_of_one_engine() -> Json:
    """Return the table of the alerts of the engine shown: whose they are need not be said."""
    return _alerts(
        "Firing alerts",
        "What fires now for this engine, the most severe first; since when its condition has held; and its runbook "
        "where an address of the runbooks was given with the rules.",
        ("severity", "summary", "since", "runbook"),
        hidden=("address", "job", "open", "alertname", "cluster", "namespace", "pod", "instance"),
        width=11,
        height=6,
        overrides=[],
    )


def _alerts(
    title: str,
    description: str,
    columns: tuple[str, ...],
    *,
    hidden: tuple[str, ...],
    width: int,
    height: int,
    overrides: list[Json],
) -> Json:
    by_severity = (
        f'{rank} * max by ({ALERT}) (ALERTS{{{SELECTED},alertstate="firing",severity="{severity}"}})'
        for rank, (severity, _) in zip(range(len(SEVERITIES), 0, -1), SEVERITIES, strict=True)
    )
    firing = f"topk({ROWS}, {' or '.join(by_severity)})"
    since = f"1000 * min by ({ALERT}) (ALERTS_FOR_STATE{{{SELECTED}}})"
    meant = f'label_join({with_link(firing)}, "summary", "", "alertname")'
    severities = [(severity, severity, colour) for severity, colour in SEVERITIES]
    sentences = [(name, summary, NEUTRAL) for name, summary in summaries().items()]
    return table(
        title,
        description,
        [
            query(shortened(f"({_runbook(meant)} or on (open, alertname) ({meant}))")),
            query(shortened(with_link(since))),
        ],
        [
            {"id": "merge", "options": {}},
            with_value("A"),
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "Value #A", "desc": True}]}},
            organized(
                ["Value #B" if name == "since" else name for name in columns],
                (*hidden, "Value #A"),
                {"alertname": "alert", "Value #B": "since"},
            ),
        ],
        width=width,
        height=height,
        noValue="none",
        overrides=[
            override(
                "severity", custom__width=80, mappings=[values(*severities)], custom__cellOptions={"type": "color-text"}
            ),
            override("summary", mappings=[values(*sentences)]),
            SINCE,
            *overrides,
            leading("runbook", "what to do", "Runbook", CELL, targetBlank=True),
        ],
    )


def _runbook(firing: str) -> str:
    """Return `firing` with the address of the runbooks; `{alert}` in the address is replaced by an alert's name."""
    joined = f'label_join(({firing}) * on () group_left (address) {ADDRESS}, "runbook", " ", "address", "alertname")'
    return f'label_replace({joined}, "runbook", "$1$3$2", "runbook", "(.*)[{{]alert[}}](.*) (.*)")'


ADDRESS: Final = "topk(1, headroom:runbooks:info)"
