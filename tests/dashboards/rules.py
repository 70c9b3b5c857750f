"""What Prometheus would have recorded and alerted, from the rules' own expressions: promtool backfills no alerts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import promql_parser as promql

from tests.assets.promql import recorded, written_rules

Series = list[dict[str, Any]]
Ask = Callable[[str], Series]
"""Returns the series of an expression over time."""

NEVER: Final = float("-inf")


def evaluated(ask: Ask, times: Sequence[float]) -> str:
    """Return what the recording rules give, and ALERTS, as OpenMetrics; `times` are those of the evaluations."""
    lines = [line for name, expr in inlined() for line in _lines(name, ask(expr))]
    for rule in alerting():
        alerts, since = _alerts(rule, ask(rule["expr"]), times)
        lines += [*_lines("ALERTS", alerts), *_lines("ALERTS_FOR_STATE", since)]
    return "".join([*lines, "# EOF\n"])


def inlined() -> Iterator[tuple[str, str]]:
    """Yield the recording rules with what earlier ones mean in place of their names: nothing is recorded yet."""
    earlier: dict[str, str] = {}
    for name, expr in recorded():
        earlier[name] = _NAME.sub(lambda match: _meant(match, earlier), f"({expr})")
        yield name, earlier[name]


_NAME: Final = re.compile(r"([\w:]+)(?:\[(\w+)\])?( offset \w+)?")


def _meant(match: re.Match[str], earlier: Mapping[str, str]) -> str:
    """Return what a name means; an offset can only be of a range of an expression, here of its one value then."""
    name, length, offset = match.groups()
    if name not in earlier:
        return match[0]
    if length:
        return f"{earlier[name]}[{length}:1m]{offset or ''}"
    return f"last_over_time({earlier[name]}[1m:1m]{offset})" if offset else earlier[name]


def alerting() -> Iterator[Mapping[str, Any]]:
    """Yield the alerting rules."""
    yield from (rule for rule in written_rules() if "alert" in rule)


def _alerts(rule: Mapping[str, Any], series: Series, times: Sequence[float]) -> tuple[Series, Series]:
    """Return ALERTS and ALERTS_FOR_STATE of a rule, without labels that are templates: no board asks for one."""
    written = {label: text for label, text in rule["labels"].items() if "{{" not in text}
    wait, keep = (_seconds(rule[key]) if key in rule else 0.0 for key in ("for", "keep_firing_for"))
    alerts, active_since = [], []
    for a_series in series:
        labels = {label: value for label, value in a_series["metric"].items() if label != "__name__"}
        labels |= {**written, "alertname": rule["alert"]}
        states = list(_states({float(at) for at, _ in a_series["values"]}, times, wait, keep))
        for state in ("pending", "firing"):
            values = [(at, 1) for at, held_state, _ in states if held_state == state]
            alerts.append({"metric": {**labels, "alertstate": state}, "values": values})
        active_since.append(
            {"metric": labels, "values": [(at, since) for at, held_state, since in states if held_state]}
        )
    return alerts, active_since


def _states(active: set[float], times: Sequence[float], wait: float, keep: float) -> Iterator[tuple[float, str, float]]:
    """Yield the state at each time, and since when: pending for `for`, then firing, and `keep_firing_for` longer."""
    since = last_active = NEVER
    state = ""
    for at in times:
        if at in active:
            since, last_active = (since if state else at), at
            state = "firing" if state == "firing" or at - since >= wait else "pending"
        elif state != "firing" or at - last_active >= keep:
            state = ""
        yield at, state, since


def _seconds(duration: str) -> float:
    return promql.parse_duration(duration).total_seconds()


def _lines(name: str, series: Series) -> Iterator[str]:
    """Yield the lines of a rule's series; two whose names alone differed are one when they have the rule's name."""
    points: dict[str, list[tuple[float, Any]]] = {}
    for a_series in series:
        labels = ",".join(f'{label}="{value}"' for label, value in a_series["metric"].items() if label != "__name__")
        points.setdefault(labels, []).extend((float(at), value) for at, value in a_series["values"])
    for labels, values in points.items():
        yield from (f"{name}{{{labels}}} {value} {at}\n" for at, value in sorted(values))
