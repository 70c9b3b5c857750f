"""Prometheus and Alertmanager as processes, on the shipped rules and configuration with their patience taken out."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import httpx

from alerts.generate import with_links
from tests.process import NO_TLS, eventually

ALERTS: Final = Path(__file__).parents[2] / "alerts"
RUNBOOKS: Final = "https://runbooks.example"
GRAFANA: Final = "https://grafana.example"
KEYS: Final = {
    team: sha256(team.encode()).hexdigest()[:32] for team in ("ml-platform", "infrastructure", "observability")
}
DEADLINE_SECONDS: Final = 120.0

PROMETHEUS: Final = shutil.which("prometheus")
ALERTMANAGER: Final = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
"""Debian's name, and that of the project's own archive."""

MISSING: Final = [
    package
    for package, program in (("prometheus", PROMETHEUS), ("prometheus-alertmanager", ALERTMANAGER))
    if program is None
]

CONFIG: Final = """
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [rules.yaml]
scrape_configs:
- job_name: vllm-headroom
  static_configs: TARGETS
alerting:
  alertmanagers:
  - static_configs: [{targets: [ADDRESS]}]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where Prometheus scrapes an engine's page, and the labels its service discovery gives it."""

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Alertmanager:
    """A running Alertmanager, by its API."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v2/alerts"

    def post(self, *alerts: Mapping[str, str]) -> None:
        """Let alerts with these labels fire that Prometheus knows nothing of."""
        payload = [{"labels": labels} for labels in alerts]
        httpx.post(self._url, json=payload, timeout=60, verify=NO_TLS).raise_for_status()

    def alerts(self) -> list[dict[str, Any]]:
        """Return all alerts."""
        return self._ask("")

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of alerts, by receiver."""
        return self._ask("/groups")

    def _ask(self, path: str) -> list[dict[str, Any]]:
        reply: list[dict[str, Any]] = httpx.get(f"{self._url}{path}", timeout=60, verify=NO_TLS).json()
        return reply

    def muted(self, **labels: str) -> set[str]:
        """Return the names of the alerts that mute the one with these labels now."""
        alerts = self.alerts()
        names = {alert["fingerprint"]: alert["labels"]["alertname"] for alert in alerts}
        return {
            names[by]
            for alert in alerts
            if labels.items() <= alert["labels"].items()
            for by in alert["status"]["inhibitedBy"]
            if by in names
        }


@contextmanager
def paging(
    folder: Path, pagerduty_url: str, targets: Sequence[Target], *, by_workload: bool = False
) -> Iterator[Alertmanager]:
    """Run both until the end, from when Prometheus knows its Alertmanager; `by_workload` as shipped, else by engine."""
    assert PROMETHEUS
    address, alertmanager_address = free_addresses()
    text = (ALERTS / "alertmanager" / "alertmanager.yml").read_text()
    text = text if by_workload else grouped_by_engine(text)
    (folder / "alertmanager.yml").write_text(hurried_alertmanager(text, folder, pagerduty_url))
    rules = with_links((ALERTS / "rules" / "headroom.yaml").read_text(), runbooks=RUNBOOKS, dashboards=GRAFANA)
    (folder / "rules.yaml").write_text(hurried_rules(rules))
    groups = json.dumps([{"targets": [target.address], "labels": dict(target.labels)} for target in targets])
    config = CONFIG.replace("TARGETS", groups).replace("ADDRESS", alertmanager_address)
    (folder / "prometheus.yml").write_text(config)
    with ExitStack() as stack:
        alertmanager = stack.enter_context(run_alertmanager(alertmanager_address, folder))
        stack.enter_context(
            running(
                address,
                folder / "prometheus.log",
                PROMETHEUS,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                # An alert not sent again for four times as long counts as over: a busy machine may pause for seconds.
                "--rules.alert.resend-delay=5s",
            )
        )
        eventually(lambda: knows_its_alertmanager(address), "Prometheus finds Alertmanager", DEADLINE_SECONDS)
        yield alertmanager


@contextmanager
def run_alertmanager(address: str, folder: Path, *more_options: str) -> Iterator[Alertmanager]:
    """Run an Alertmanager until the end, with the alertmanager.yml in the folder."""
    assert ALERTMANAGER
    options = (
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        "--cluster.listen-address=",
        *more_options,
    )
    with running(address, folder / "alertmanager.log", ALERTMANAGER, *options):
        yield Alertmanager(address)


def free_addresses() -> tuple[str, str]:
    with (
        socket.create_server(("127.0.0.1", 0)) as first_socket,
        socket.create_server(("127.0.0.1", 0)) as second_socket,
    ):
        return f"127.0.0.1:{first_socket.getsockname()[1]}", f"127.0.0.1:{second_socket.getsockname()[1]}"


@contextmanager
def running(address: str, log: Path, *command: str) -> Iterator[None]:
    """Run a program that listens on `address`, from when it is ready to the end of the context."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=stream, stderr=subprocess.STDOUT
        )

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        return is_answering(f"http://{address}/-/ready")

    try:
        eventually(ready, f"{command[0]} is ready", DEADLINE_SECONDS)
        yield
    finally:
        process.kill()
        process.wait(30)


def is_answering(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10, verify=NO_TLS).is_success
    except httpx.TransportError:
        return False


def knows_its_alertmanager(address: str) -> bool:
    answer = httpx.get(f"http://{address}/api/v1/alertmanagers", timeout=10, verify=NO_TLS)
    return bool(answer.json()["data"]["activeAlertmanagers"])


def hurried_rules(text: str) -> str:
    """Return rules that wait a second for each five minutes, so that what waited longer still does.

    Of the windows only those are cut that delay what is reported; the longer ones remember.
    """
    text = re.sub(
        r"^( +(?:for|keep_firing_for): )(\d+)([smh])$",
        lambda match: f"{match[1]}{max(1, int(match[2]) * {'s': 1, 'm': 60, 'h': 3600}[match[3]] // 300)}s",
        text,
        flags=re.MULTILINE,
    )
    return re.sub(r"\[(\d)m\]", r"[\1s]", text)


def grouped_by_engine(text: str) -> str:
    """Return the configuration with the `group_by` that is in it as a comment."""
    (group_line,) = re.findall(r"^ +# (group_by: .+)\n", text, re.MULTILINE)
    return re.sub(r"^( +)group_by: .+$", rf"\1{group_line}", text, count=1, flags=re.MULTILINE)


def hurried_alertmanager(text: str, folder: Path, pagerduty_url: str) -> str:
    """Return the shipped configuration with this PagerDuty, keys in `folder`, and seconds for minutes."""
    for old, new in (("group_wait: 30s", "group_wait: 2s"), ("group_interval: 5m", "group_interval: 1s")):
        assert old in text
        text = text.replace(old, new)
    return wire_pagerduty(text, folder, pagerduty_url)


def wire_pagerduty(text: str, folder: Path, pagerduty_url: str) -> str:
    """Return the shipped configuration with this PagerDuty, and write its keys into `folder`."""
    for team, key in KEYS.items():
        (folder / team).write_text(f"{key}\n")
    keys_folder = "/etc/alertmanager/secrets/pagerduty"
    assert keys_folder in text
    return f"global: {{pagerduty_url: '{pagerduty_url}'}}\n{text.replace(keys_folder, str(folder))}"
