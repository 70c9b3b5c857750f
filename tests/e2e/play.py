"""Situations in a time lapse, from the sidecars' pages through Prometheus and Alertmanager to what PagerDuty receives.

`python -m tests.e2e.play` plays its own rows and prints the table; names, or parts of them, choose among these and the
situations of alerts/tests; `--write` puts the table into alerts/tests/played.md.

Prometheus federates one page with the series of all engines, so that a situation may have a hundred. Two intervals stay
as they are, for nothing sets them: Alertmanager removes an empty group every 30 s, so what joins a group within 30
simulated minutes of its end may be up to `group_interval` late; and its notifications have 10 s at least.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx

from alerts.generate import with_links
from alerts.tests.engines import Phase
from alerts.tests.situations import (
    SITUATIONS,
    Situation,
    at_work,
    down,
    gone,
    idle,
    loading,
    replicas,
    rest,
    until_gone,
)
from tests.e2e.paging import (
    ALERTS,
    DEADLINE_SECONDS,
    GRAFANA,
    KEYS,
    MISSING,
    PROMETHEUS,
    RUNBOOKS,
    free_addresses,
    knows_its_alertmanager,
    run_alertmanager,
    running,
    wire_pagerduty,
)
from tests.e2e.time_lapse import TimeLapse
from tests.fakes.local_server import LocalServer
from tests.fakes.pagerduty import Event, PagerDuty
from tests.process import NO_TLS, eventually

TABLE: Final = ALERTS / "tests" / "played.md"
SCRAPES: Final = ALERTS.parent / "deploy" / "compose" / "prometheus.yml"
FACTOR: Final = 30.0
"""60 where the machine has nothing else to do: an evaluation every 0.25 s, with all annotations of what fires."""
STEP_MINUTES: Final = 0.25
"""How often the engines' series change: as often as they are scraped."""

MORE_STEP_MINUTES: Final = 2
"""How far apart the samples of `Situation.more` are."""

LEAD_MINUTES: Final = 15
"""What a situation of alerts/tests keeps of the time before its event."""

TAIL_MINUTES: Final = 20
"""How long the play goes on after the last event."""

HEAD: Final = """\
# What arrives at PagerDuty, and when

The shipped rules and Alertmanager configuration in a time lapse. A real Prometheus scrapes and evaluates each 15 s, and
a real Alertmanager sends to a stand-in for PagerDuty. A line is an incident that was opened. Minutes count from the
event, which is the first exit or hang of an engine, and are rounded to half minutes; those before it are negative.
`page` rings, `critical` and `warning` do not.
`.venv/bin/python -m tests.e2e.play --write` writes this file.
"""

BATCH_SERIES: Final = 1500
"""How many series are played at once, more where one situation has more."""

TIMESTAMPS: Final = ("headroom_engine_start_timestamp_seconds", "process_start_time_seconds")
"""Series whose values are times, counted from the beginning of the situation."""

RUN: Final = re.compile(r"(-?[\d.]+)(?:([+-][\d.]+))?x(\d+)")
ALERT_LINE: Final = re.compile(r"^(Headroom\w+)(?:, .+)?, since ", re.MULTILINE)

ILL: Final[Sequence[Situation]] = (
    *(
        Situation(
            name=f"{count} of {count} crash in service and load for {minutes} minutes",
            engines=replicas(count, *rest(at_work(10), loading(minutes, ended=("gone",)))),
        )
        for count in (16, 1)
        for minutes in (33, 5, 3)
    ),
    Situation(
        name="the only one runs out of memory and serves again after 90 s",
        engines=replicas(1, *rest(at_work(10), loading(1.5, ended=("out_of_memory",)))),
    ),
    Situation(
        name="the only one runs out of memory and serves again after 105 s",
        engines=replicas(1, *rest(at_work(10), loading(1.75, ended=("out_of_memory",)))),
    ),
    Situation(
        name="one of five runs out of memory and serves again after 90 s",
        engines=[
            *replicas(4, at_work()),
            *(
                replace(engine, name="llama-4")
                for engine in replicas(1, *rest(at_work(10), loading(1.5, ended=("out_of_memory",))))
            ),
        ],
    ),
    Situation(
        name="out of memory with 8,200 running requests at 7.5 and 15.25 minutes",
        engines=replicas(
            1,
            *rest(
                at_work(7.5, running=8200),
                loading(1.75, ended=("out_of_memory",)),
                at_work(6, running=8200),
                loading(1.75, ended=("out_of_memory",)),
            ),
        ),
    ),
    Situation(
        name="16 of tensor parallel 4 over their budget crash at 62 minutes",
        engines=replicas(16, *rest(at_work(62, outside=3.7), loading(20, ended=("over_budget",))), gpus=4, share=0.945),
    ),
    Situation(
        name="the only one exits and is not started",
        engines=replicas(1, at_work(10), down(80, "gone")),
    ),
    Situation(
        name="three of four vanish with their sidecars and requests queue in the fourth",
        engines=[
            *replicas(3, *until_gone(at_work(20))),
            *(replace(engine, name="llama-3") for engine in replicas(1, *rest(at_work(20), at_work(60, waiting=80)))),
        ],
    ),
    Situation(
        name="the only one hangs",
        engines=replicas(1, at_work(10), Phase(minutes=80, state="stalled", running=20)),
    ),
)

WELL: Final[Sequence[Situation]] = (
    Situation(
        name="a rollout of three, one after the other",
        engines=[
            *(
                replace(engine, name=f"llama-a{turn}")
                for turn in range(3)
                for engine in replicas(1, *until_gone(at_work(25 + 15 * turn), down(0.5, "stopped")))
            ),
            *(
                replace(engine, name=f"llama-b{turn}")
                for turn in range(3)
                for engine in replicas(1, *rest(gone(minutes=10 + 15 * turn), down(2), loading(11)))
            ),
        ],
    ),
    Situation(
        name="16 stopped and made again by a deploy that loads for 33 minutes",
        engines=[
            *replicas(16, *until_gone(at_work(10), down(0.5, "stopped"))),
            *(
                replace(engine, name=f"{engine.name}-new")
                for engine in replicas(16, *rest(gone(minutes=12), down(2), loading(33)))
            ),
        ],
    ),
    Situation(
        name="scaled from four to one, which has no queue",
        engines=[
            *replicas(3, *until_gone(at_work(20))),
            *(replace(engine, name="llama-3") for engine in replicas(1, *rest(at_work(20), at_work(60, waiting=2)))),
        ],
    ),
    Situation(name="scaled to zero after ten idle minutes", engines=replicas(2, *until_gone(at_work(10), idle(11)))),
    Situation(
        name="a drained restart by hand",
        engines=replicas(1, *rest(at_work(10), idle(5), down(2, "gone"), loading(12))),
    ),
    Situation(
        name="a stop by SIGTERM at work, then a load of 33 minutes",
        engines=replicas(1, *rest(at_work(10), loading(33, ended=("stopped",)))),
    ),
)

ROWS: Final = (*ILL, *WELL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """An incident that PagerDuty opened, and how many simulated minutes after the event of its situation."""

    situation: Situation
    after_minutes: float
    severity: str
    alerts: tuple[str, ...]
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What arrived, and what shows that the machine was too slow for the factor."""

    notifications: Sequence[Notification]
    failed_scrapes: int
    missed_evaluations: int


def play(situations: Sequence[Situation], folder: Path, *, factor: float = FACTOR, minutes: float = 0) -> Played:
    """Play situations beside each other, up to this minute or until some time after the last event."""
    assert PROMETHEUS
    minutes = minutes or max(map(find_event_minute, situations)) + TAIL_MINUTES
    lapse = TimeLapse(factor=factor, origin_seconds=time.time())
    address, alertmanager_address = free_addresses()
    with ExitStack() as stack:
        pagerduty = stack.enter_context(PagerDuty(KEYS.values()))
        sidecars = stack.enter_context(Sidecars(situations, lapse))
        write_configuration(folder, lapse, pagerduty.url, sidecars.address, alertmanager_address)
        stack.enter_context(
            run_alertmanager(alertmanager_address, folder, f"--alerts.gc-interval={lapse.shorten('30m')}")
        )
        options = (
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--query.lookback-delta={lapse.shorten('5m')}",
            f"--rules.alert.resend-delay={lapse.shorten('1m')}",
            f"--rules.alert.for-grace-period={lapse.shorten('10m')}",
        )
        stack.enter_context(running(address, folder / "prometheus.log", PROMETHEUS, *options))
        eventually(lambda: knows_its_alertmanager(address), "Prometheus finds Alertmanager", DEADLINE_SECONDS)
        began_seconds = sidecars.begin()
        time.sleep(minutes * 60 / factor)
        failed_scrapes = count_failed_scrapes(address)
        missed_evaluations = count_missed_evaluations(address)
        events = list(pagerduty.events)
    assert not pagerduty.refused, pagerduty.refused
    notifications = [
        describe(event, situations, (event.arrival_seconds - began_seconds) * factor / 60)
        for event in events
        if event.notifies
    ]
    return Played(notifications=notifications, failed_scrapes=failed_scrapes, missed_evaluations=missed_evaluations)


def find_event_minute(situation: Situation) -> float:
    """Return when the first engine exits or serves no more; where none does, when its second phase begins."""
    ends = []
    changes = []
    for engine in situation.engines:
        minute = 0.0
        for phase, next_phase in pairwise(engine.phases):
            minute += phase.minutes
            changes.append(minute)
            if next_phase.ended or (phase.state == "serving" and phase.up and not next_phase.has_page):
                ends.append(minute)
    return min(ends or changes or [0.0])


def shorten_lead(situation: Situation) -> Situation:
    """Return a situation whose engines lose what is long before its event."""
    lead = min(engine.phases[0].minutes for engine in situation.engines) - 1
    lost_minutes = min(find_event_minute(situation) - LEAD_MINUTES, lead) // MORE_STEP_MINUTES * MORE_STEP_MINUTES
    if lost_minutes <= 0:
        return situation
    engines = []
    for engine in situation.engines:
        first_phase = replace(engine.phases[0], minutes=engine.phases[0].minutes - lost_minutes)
        engines.append(replace(engine, phases=(first_phase, *engine.phases[1:])))
    lost_samples = int(lost_minutes // MORE_STEP_MINUTES)
    more_samples = [(name, write_samples(expand(values)[lost_samples:])) for name, values in situation.more]
    return replace(situation, engines=engines, more=more_samples)


def expand(values: str) -> list[float | None]:
    """Return the samples that promtool's notation means, None where there is none."""
    samples: list[float | None] = []
    for part in values.split():
        if part == "stale":
            samples.append(None)
        elif part.startswith("_"):
            samples += [None] * int(part.removeprefix("_x") or 1)
        elif match := RUN.fullmatch(part):
            first_value, step = float(match[1]), float(match[2] or 0)
            samples += [first_value + step * turn for turn in range(int(match[3]) + 1)]
        else:
            samples.append(float(part))
    return samples


def write_samples(samples: Sequence[float | None]) -> str:
    return " ".join("_" if sample is None else f"{sample:g}" for sample in samples)


class Sidecars(LocalServer):
    """All engines' series on one page, as Prometheus federates them; none before `begin`."""

    def __init__(self, situations: Sequence[Situation], lapse: TimeLapse) -> None:
        self._lapse = lapse
        self._began_seconds = math.inf
        self._series = [
            (name, values, name.startswith(TIMESTAMPS))
            for situation in situations
            for name, values in list_series(situation)
        ]
        super().__init__(self._handler())

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def begin(self) -> float:
        """Begin the situations, and return when, in Unix time."""
        self._began_seconds = time.time()
        return self._began_seconds

    def page(self) -> bytes:
        """Return what is on the page now."""
        elapsed_seconds = time.time() - self._began_seconds
        if elapsed_seconds < 0:
            return b""
        step = int(elapsed_seconds * self._lapse.factor / 60 / STEP_MINUTES)
        epoch_seconds = self._lapse.simulated_seconds(self._began_seconds)
        lines = []
        for name, values, is_timestamp in self._series:
            value = values[step] if step < len(values) else None
            if value is not None:
                lines.append(f"{name} {value + epoch_seconds if is_timestamp else value:.17g}\n")
        return "".join(lines).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                content = server.page()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def list_series(situation: Situation) -> Iterator[tuple[str, list[float | None]]]:
    """Yield each series of a situation with its samples, a step apart."""
    for engine in situation.located():
        for name, values in engine.series(STEP_MINUTES):
            yield name, expand(values)
    repeats = int(MORE_STEP_MINUTES / STEP_MINUTES)
    for name, values in situation.more:
        samples = [sample for sample in expand(values) for _ in range(repeats)]
        yield name.replace("{namespace}", situation.namespace), samples


def write_configuration(
    folder: Path, lapse: TimeLapse, pagerduty_url: str, sidecars: str, alertmanager_address: str
) -> None:
    """Write the shipped rules, routes and scrapes, all by the simulated clock."""
    alertmanager = (ALERTS / "alertmanager" / "alertmanager.yml").read_text("utf-8")
    alertmanager = wire_pagerduty(lapse.shorten_settings(alertmanager), folder, pagerduty_url)
    (folder / "alertmanager.yml").write_text(alertmanager, "utf-8")
    rules = with_links((ALERTS / "rules" / "headroom.yaml").read_text("utf-8"), runbooks=RUNBOOKS, dashboards=GRAFANA)
    (folder / "rules.yaml").write_text(lapse.shorten_rules(rules), "utf-8")
    prometheus = lapse.shorten_settings(SCRAPES.read_text("utf-8"))
    for shipped, played in (
        ("job_name: vllm-headroom", "job_name: played"),
        ("headroom:9839", sidecars),
        ("rules/*.yaml", "rules.yaml"),
        ("alertmanager:9093", alertmanager_address),
    ):
        assert shipped in prometheus
        prometheus = prometheus.replace(shipped, played)
    (folder / "prometheus.yml").write_text(prometheus, "utf-8")


def count_failed_scrapes(address: str) -> int:
    query = {"query": 'sum(count_over_time(up{job="played"}[1d]) - sum_over_time(up{job="played"}[1d]))'}
    answer = httpx.get(f"http://{address}/api/v1/query", params=query, timeout=60, verify=NO_TLS).json()
    return sum(int(sample["value"][1]) for sample in answer["data"]["result"])


def count_missed_evaluations(address: str) -> int:
    text = httpx.get(f"http://{address}/metrics", timeout=60, verify=NO_TLS).text
    return sum(
        int(float(count))
        for count in re.findall(r"^prometheus_rule_group_iterations_missed_total.* (\S+)$", text, re.MULTILINE)
    )


def describe(event: Event, situations: Sequence[Situation], minute: float) -> Notification:
    """Return what an event that opened an incident reports, in which situation."""
    payload = event.payload
    namespace = payload["group"].rpartition("/")[2]
    situation = max(
        (situation for situation in situations if namespace.startswith(situation.namespace)),
        key=lambda candidate: len(candidate.namespace),
    )
    return Notification(
        situation=situation,
        after_minutes=minute - find_event_minute(situation),
        severity=payload["custom_details"]["severity"],
        alerts=tuple(dict.fromkeys(ALERT_LINE.findall(payload["custom_details"]["firing"]))),
        title=payload["summary"].replace(situation.namespace, "prod"),
    )


def write_table(situations: Sequence[Situation], notifications: Sequence[Notification]) -> str:
    """Return the table, a line for each notification, and one for each situation that has none."""
    lines = [
        "| situation | notified after | severity | by | title |",
        "| --- | --- | --- | --- | --- |",
    ]
    for situation in situations:
        arrived = [arrival for arrival in notifications if arrival.situation is situation]
        if not arrived:
            lines.append(f"| {situation.name} | nobody | | | |")
        for notification in arrived:
            minutes = round(2 * notification.after_minutes) / 2
            alerts = ", ".join(notification.alerts)
            lines.append(
                f"| {situation.name} | {minutes:g} min | {notification.severity} | {alerts} | {notification.title} |"
            )
    return "\n".join(lines) + "\n"


def choose(names: Sequence[str]) -> list[Situation]:
    """Return the rows and situations in whose names one of these is."""
    if not names:
        return list(ROWS)
    everything = {situation.name: situation for situation in (*map(shorten_lead, SITUATIONS), *ROWS)}
    return [situation for situation in everything.values() if any(name in situation.name for name in names)]


def batch_situations(situations: Sequence[Situation]) -> list[list[Situation]]:
    """Return what is played together: a busy machine evaluates so many series in time."""
    batches: list[list[Situation]] = []
    room = 0
    for situation in sorted(situations, key=find_event_minute):
        series = sum(1 for _ in list_series(situation))
        if series > room:
            batches.append([])
            room = BATCH_SERIES
        batches[-1].append(situation)
        room -= series
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.play", description=__doc__.splitlines()[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="a part of a situation's name; without: all rows")
    parser.add_argument("--factor", type=float, default=FACTOR, help="how many times as fast (default: %(default)g)")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ALERTS.parent)} too")
    options = parser.parse_args()
    if MISSING:
        sys.exit(f"not installed: apt-get install {' '.join(MISSING)}")
    situations = choose(options.names)
    if not situations:
        sys.exit("no situation has such a name")
    plays = []
    for batch in batch_situations(situations):
        with tempfile.TemporaryDirectory() as folder:
            plays.append(play(batch, Path(folder), factor=options.factor))
    table = write_table(situations, [notification for played in plays for notification in played.notifications])
    sys.stdout.write(f"{options.factor:g} times as fast as the clock.\n\n{table}")
    failed_scrapes = sum(played.failed_scrapes for played in plays)
    missed_evaluations = sum(played.missed_evaluations for played in plays)
    if failed_scrapes or missed_evaluations:
        sys.stderr.write(
            f"The machine was too slow: {failed_scrapes} scrapes failed and {missed_evaluations} "
            "evaluations were missed. Use a lower --factor where the table looks late.\n"
        )
    if options.write:
        TABLE.write_text(f"{HEAD}\n{table}", "utf-8")


if __name__ == "__main__":
    main()
