#!/usr/bin/env python3
"""Print the alerts as a PrometheusRule or plain rules, or their Alertmanager configuration, with your links."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

RULES: Final = Path(__file__).parent / "rules" / "headroom.yaml"
ALERTMANAGER: Final = Path(__file__).parent / "alertmanager" / "alertmanager.yml"
RELEASE: Final = ("release", "kube-prometheus-stack")
"""By default the chart's Prometheus reads only rules that carry the name of the chart's release."""

ALERT: Final = re.compile(r"^( *)- alert: (\w+)\n(?:(?!\1- ).*\n)*?\1  annotations:\n", re.MULTILINE)
BOARD: Final = (
    "/d/{{ if $labels.instance }}headroom?var-namespace={{ $labels.namespace }}&var-pod={{ $labels.pod }}"
    "&var-instance={{ $labels.instance }}{{ with $labels.uuid }}&var-uuid={{ . }}{{ end }}"
    "{{ else }}headroom-fleet{{ end }}"
)
"""The board of the engine that an alert is of; HeadroomAbsent is of none."""

ADDRESS: Final = """\
# Where the runbooks are, for the boards to link to.
- name: headroom-runbooks
  rules:
  - record: headroom:runbooks:info
    expr: vector(1)
    labels: {{address: {address}}}
"""
RUNBOOKS_URL: Final = "https://github.com/vllm-headroom/vllm-headroom/blob/main/alerts/runbooks/{alert}.md"
"""The runbooks in the public repository: every alert leads to one without any option."""

SEVERITIES: Final = ("page", "critical", "warning", "info")
PATCHES: Final = ("patch-runbooks", "patch-dashboards")

SEVERITY_NAME: Final = re.compile(r"[a-z][a-z0-9_-]*")
SEVERITY_LABEL: Final = re.compile(r"(?<=[{ ]severity: )([\w-]+)(?=[,}\n])")
"""The severity of an alert, in YAML's flow style or, as --values leaves it, in block style."""

SEVERITY_ROW: Final = re.compile(r"^(#(?: severity)? +)((?:page|critical|warning|info) {2,})(?=\S)", re.MULTILINE)
"""A row of the table of severities in a comment at the beginning of a file."""

MUTED_BY_SEVERITY: Final = re.compile(
    r"- source_matchers: \['severity=\"(\w+)\"', (.+)\]\n  target_matchers: \['severity=~\"([\w|]+)\"', .+\]\n"
)
"""An inhibition between severities of the memory alerts of one GPU."""

URL: Final = re.compile(r"https?://[\w.~:/@%+,=\[\]-]+", re.ASCII)
"""Nothing in it that YAML, a template or a query string would take for its own."""

DNS_NAME: Final = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
LABEL_PART: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{3,}")


VALUE: Final = re.compile(r"(?m)(?<=[<>=] )([^#<>\n]+?) # ([a-z_]+)$")
"""A threshold with its name, at the end of a line of an expression."""

NUMBER: Final = re.compile(r"[0-9.]+([eE][+-]?[0-9]+)?( *[*/^+-] *[0-9.]+)*")
"""A number as PromQL takes it, or a product such as 4 * 2^30."""

DURATION: Final = re.compile(r"0|([0-9]+(ms|[smhdwy]))+")
DURATIONS: Final = ("for", "keep_firing_for")


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the options ask for; what cannot be done ends with status 2 and one line."""
    parser = command()
    options = parser.parse_args(arguments)
    if options.severity and options.format in PATCHES:
        parser.error(f"--format {options.format} writes no severities: leave out --severity")
    try:
        text = options.rules.read_text(encoding="utf-8")
        check(yaml.safe_load(text))
        if options.severity:
            check_severities(yaml.safe_load(text)["groups"])
        if options.values:
            values = yaml.safe_load(options.values.read_text(encoding="utf-8"))
            text = with_values(yaml.safe_load(text), values)
        if options.format == "alertmanager":
            configuration = ALERTMANAGER.read_text(encoding="utf-8")
            sys.stdout.write(route_severities(configuration, yaml.safe_load(text)["groups"], options.severity))
            return
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"cannot take rules from {options.values or options.rules}: {' '.join(str(error).split())}")
    if options.format in PATCHES:
        sys.stdout.write(patch(yaml.safe_load(text)["groups"], runbooks=options.format == "patch-runbooks"))
        return
    try:
        text = map_severities(text, options.severity)
    except ValueError as error:
        parser.error(f"cannot take rules from {options.rules}: {error}")
    text = with_links(text, runbooks=options.runbooks_url, dashboards=options.dashboards_url)
    if options.format == "prometheusrule":
        text = manifest(text, name=options.name, namespace=options.namespace, labels=options.label or [RELEASE])
    sys.stdout.write(text)


def command() -> Parser:
    """Return what the command line takes."""
    parser = Parser(prog="generate.py", description=__doc__)
    parser.add_argument(
        "--format",
        choices=("prometheusrule", "rules", "alertmanager", *PATCHES),
        default="prometheusrule",
        help="default: %(default)s; alertmanager is alertmanager.yml with your severities; the patches are those of "
        "deploy/kubernetes/components",
    )
    parser.add_argument(
        "--severity",
        type=severity_map,
        default={},
        metavar="OURS=YOURS,...",
        help="how your routes call the severities page, critical, warning and info, such as "
        "page=critical,critical=warning; use the same for the rules and for --format alertmanager",
    )
    parser.add_argument(
        "--name", type=dns_name, default="vllm-headroom", help="of the PrometheusRule, default: %(default)s"
    )
    parser.add_argument("--namespace", type=dns_name, help="of the PrometheusRule, default: the one kubectl is in")
    parser.add_argument(
        "--label",
        type=label,
        action="append",
        metavar="KEY=VALUE",
        help=f"what your Prometheus selects its rules by, can be repeated; default: {'='.join(RELEASE)}",
    )
    parser.add_argument(
        "--runbooks-url",
        type=url,
        default=RUNBOOKS_URL,
        metavar="URL",
        help="where alerts/runbooks is served; {alert} in it becomes the alert's name, which else goes to its end; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--dashboards-url", type=url, metavar="URL", help="your Grafana; without it there are no links to its boards"
    )
    parser.add_argument(
        "--values",
        type=Path,
        metavar="FILE",
        help="your thresholds and severities, as {HeadroomGpuHot: {celsius: 90, severity: critical, for: 20m}}, "
        "or {enabled: false}; a threshold's name is behind it in the rules",
    )
    parser.add_argument(
        "--rules", type=Path, default=RULES, metavar="FILE", help="default: the rules beside this program"
    )
    return parser


def dns_name(text: str) -> str:
    """Return a name that Kubernetes takes for an object."""
    if not DNS_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name for a Kubernetes object: write it like vllm-headroom")
    return text


def label(text: str) -> tuple[str, str]:
    """Return the two sides of KEY=VALUE, as Kubernetes takes them."""
    key, equals, value = text.partition("=")
    prefix, slash, name = key.rpartition("/")
    if (slash and not DNS_NAME.fullmatch(prefix)) or not equals or not LABEL_PART.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is no label: write it like release=kube-prometheus-stack")
    if value and not LABEL_PART.fullmatch(value):
        raise argparse.ArgumentTypeError(f"{value!r} is no label's value: 63 letters, digits, '-', '_' or '.' at most")
    return key, value


def url(text: str) -> str:
    """Return a base without the slash at its end."""
    if not URL.fullmatch(text.replace("{alert}", "alert")):
        raise argparse.ArgumentTypeError(f"{text!r} is no base of addresses: write it like https://grafana.your.org")
    return text.rstrip("/")


def severity_map(text: str) -> dict[str, str]:
    """Return the severities by ours; a page has to keep a name that no other severity gets."""
    names: dict[str, str] = {}
    for pair in text.split(","):
        ours, equals, yours = pair.strip().partition("=")
        if not equals or ours not in SEVERITIES or ours in names or not SEVERITY_NAME.fullmatch(yours):
            raise argparse.ArgumentTypeError(
                f"{pair!r} maps no severity: write page, critical, warning or info once each, as in page=critical"
            )
        names[ours] = yours
    merged = [ours for ours in SEVERITIES[1:] if names.get(ours, ours) == names.get("page", "page")]
    if merged:
        raise argparse.ArgumentTypeError(
            f"page and {merged[0]} would both be {names.get('page', 'page')!r}, so both would ring: "
            f"map {merged[0]} too, as in page=critical,critical=warning"
        )
    return names


def check(rules: object) -> None:
    """Raise ValueError where this is no groups of rules."""
    groups = rules.get("groups") if isinstance(rules, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "rules" in group for group in groups):
        raise ValueError("it holds no groups of rules")


def check_severities(groups: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError where an alert lacks what the map of severities and the routes read."""
    for group in groups:
        for rule in group["rules"]:
            if "alert" not in rule:
                continue
            labels = rule.get("labels") or {}
            if labels.get("severity") not in SEVERITIES or "area" not in labels:
                raise ValueError(
                    f"{rule['alert']} needs the labels area and severity, one of {', '.join(SEVERITIES)},"
                    " for --severity to map"
                )


def list_severities(text: str) -> list[str]:
    """Return the severities of the alerts of rules, in order."""
    groups = yaml.safe_load(text)["groups"]
    return [rule["labels"]["severity"] for group in groups for rule in group["rules"] if "alert" in rule]


def with_values(rules: dict[str, Any], values: object) -> str:
    """Return the rules, without comments, with other thresholds, severities and durations, or raise ValueError."""
    if not isinstance(values, dict) or not all(isinstance(table, dict) for table in values.values()):
        raise ValueError("it is no mapping of alerts to their values")
    alerts = {}
    for group in rules["groups"]:
        alerts.update({rule["alert"]: rule for rule in group["rules"] if "alert" in rule})
    problems = []
    for name, alert_values in values.items():
        problems += set_values(name, alert_values, alerts)
    if problems:
        raise ValueError("; ".join(problems))
    for group in rules["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.pop("enabled", True)]
    return yaml.safe_dump(rules, sort_keys=False, width=1_000_000, allow_unicode=True)


def set_values(name: object, alert_values: dict[str, Any], alerts: dict[str, Any]) -> list[str]:
    """Set the values of one of the alerts; return what is wrong with them, empty where nothing is."""
    if name not in alerts:
        return [f"there is no alert {name}{suggest(str(name), alerts)}"]
    problems = []
    for key, value in alert_values.items():
        problem = set_value(alerts[name], key, value)
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def suggest(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence with the name that is spelt most like a wrong one; empty where none is."""
    similar_names = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {similar_names[0]}?" if similar_names else ""


def set_value(rule: dict[str, Any], key: str, value: object) -> str | None:
    """Set one value of an alert; return what is wrong where it has no such value."""
    thresholds = [threshold[2] for threshold in VALUE.finditer(rule["expr"])]
    if key == "severity":
        if value not in SEVERITIES:
            return f"severity: got {value}, accepts {', '.join(SEVERITIES)}; --severity renames them"
        rule["labels"] = rule["labels"] | {"severity": value}
    elif key in DURATIONS:
        if not DURATION.fullmatch(str(value)):
            return f"{key}: got {value}, accepts a duration such as 20m"
        rule[key] = value
    elif key == "enabled":
        if not isinstance(value, bool):
            return f"enabled: got {value}, accepts true or false"
        rule[key] = value
    elif key in thresholds:
        if isinstance(value, bool) or not NUMBER.fullmatch(str(value)):
            return f"{key}: got {value}, accepts a number such as 90 or 4 * 2^30, without a unit"
        rule["expr"] = VALUE.sub(
            lambda threshold: f"{value} # {key}" if threshold[2] == key else threshold[0], rule["expr"]
        )
    else:
        own_keys = ", ".join((*dict.fromkeys(thresholds), *DURATIONS, "severity", "enabled"))
        return f"has no value {key}: its values are {own_keys}"
    return None


def map_severities(text: str, names: dict[str, str]) -> str:
    """Return rules whose alerts and table of severities have your names, or raise ValueError."""
    if not names:
        return text

    def rename(found: re.Match[str]) -> str:
        return names.get(found[1], found[1])

    mapped = SEVERITY_LABEL.sub(rename, text)
    wanted_severities = [names.get(severity, severity) for severity in list_severities(text)]
    if list_severities(mapped) != wanted_severities:
        raise ValueError(
            "its labels are written so that --severity cannot map them: write labels: {severity: page, ...}"
        )
    return rename_table(mapped, names)


def rename_table(text: str, names: dict[str, str]) -> str:
    """Return a text with your names in the rows of its table of severities, in columns as wide as before."""

    def rename_row(found: re.Match[str]) -> str:
        begin, cell = found.groups()
        severity = cell.rstrip()
        return begin + names.get(severity, severity).ljust(len(cell))

    return SEVERITY_ROW.sub(rename_row, text)


def route_severities(text: str, groups: Sequence[dict[str, Any]], names: dict[str, str]) -> str:
    """Return an Alertmanager configuration for rules whose severities have your names.

    Two severities may share a name then: what mutes what within one GPU is written by the names of the alerts.
    """
    if not names:
        return text

    def list_memory_alerts(severities: str) -> str:
        alerts = [
            rule["alert"]
            for group in groups
            for rule in group["rules"]
            if "alert" in rule
            and rule["labels"]["area"] == "memory"
            and rule["labels"]["severity"] in severities.split("|")
        ]
        return "|".join(alerts)

    def mute_by_name(found: re.Match[str]) -> str:
        muting, area, muted = found.groups()
        # An empty pattern would match each alert without the label.
        if not list_memory_alerts(muting) or not list_memory_alerts(muted):
            return ""
        return (
            f"- source_matchers: ['alertname=~\"{list_memory_alerts(muting)}\"', {area}]\n"
            f"  target_matchers: ['alertname=~\"{list_memory_alerts(muted)}\"', {area}]\n"
        )

    text = MUTED_BY_SEVERITY.sub(mute_by_name, text)
    info = names.get("info", "info")
    if info in {names.get(severity, severity) for severity in SEVERITIES[:-1]}:
        text = text.replace("    - matchers: ['severity=\"info\"']\n      receiver: nobody\n", "")
    text = text.replace("'severity=\"info\"'", f"'severity=\"{info}\"'")
    page = names.get("page", "page")
    text = text.replace("'severity=\"page\"'", f"'severity=\"{page}\"'")
    text = text.replace('eq .GroupLabels.severity "page"', f'eq .GroupLabels.severity "{page}"')
    return rename_table(text, names)


def with_links(text: str, *, runbooks: str | None, dashboards: str | None) -> str:
    """Return rules whose alerts lead to their runbooks and boards, to neither where it is not known."""
    pattern = runbooks if runbooks is None or "{alert}" in runbooks else f"{runbooks}/{{alert}}"

    def linked(found: re.Match[str]) -> str:
        links = {
            "runbook_url": pattern and pattern.replace("{alert}", found[2]),
            "dashboard_url": dashboards and f"{dashboards}{BOARD}",
        }
        lines = (f"{found[1]}    {name}: {json.dumps(link)}\n" for name, link in links.items() if link)
        return found[0] + "".join(lines)

    address = ADDRESS.format(address=json.dumps(pattern)) if pattern else ""
    # Last, so that the places of the other groups, by which Kustomize patches, stay.
    return f"{ALERT.sub(linked, text)}{address}"


def patch(groups: Sequence[dict[str, Any]], *, runbooks: bool) -> str:
    """Return the JSON patch of a PrometheusRule that gives each alert a link; its first part is no address yet."""
    lines = []
    for place, group in enumerate(groups):
        for number, rule in enumerate(group["rules"]):
            if "alert" in rule:
                name, link = (
                    ("runbook", f"RUNBOOKS/{rule['alert']}.md") if runbooks else ("dashboard", f"GRAFANA{BOARD}")
                )
                path = f"/spec/groups/{place}/rules/{number}/annotations/{name}_url"
                lines.append(f"- {{op: add, path: {path}, value: {json.dumps(link)}}}\n")
    if runbooks:
        path = f"/spec/groups/{len(groups)}/rules/0/labels/address"
        lines.append(f'- {{op: replace, path: {path}, value: "RUNBOOKS/{{alert}}.md"}}\n')
    return "# Made by alerts/generate.py.\n" + "".join(lines)


def manifest(text: str, *, name: str, namespace: str | None, labels: Sequence[tuple[str, str]]) -> str:
    """Return rules as a PrometheusRule, with their comments."""
    lines = [
        "# Made from alerts/rules/headroom.yaml by alerts/generate.py, whose options put in your labels and hosts.",
        "apiVersion: monitoring.coreos.com/v1",
        "kind: PrometheusRule",
        "metadata:",
        f"  name: {scalar(name)}",
        *([f"  namespace: {scalar(namespace)}"] if namespace else []),
        "  labels:",
        *(f"    {scalar(key)}: {scalar(value)}" for key, value in dict(labels).items()),
        "spec:",
        *(f"  {line}" if line.strip() else "" for line in text.splitlines() if line not in {"---", "..."}),
    ]
    return "\n".join((*lines, ""))


def scalar(text: str) -> str:
    """Return a string as YAML, in quotes where it could be read as something else."""
    return text if PLAIN.fullmatch(text) and yaml.safe_load(text) == text else json.dumps(text)


if __name__ == "__main__":
    main()
